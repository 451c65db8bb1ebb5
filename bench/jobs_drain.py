"""How fast does one worker drain a backlog of no-op jobs, and does the rate hold as it grows?

The time is from the first handler call to the last, with payloads of 100 B. The backlog is made by
the calls that the README and the guides show, and these enqueues are timed, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bench.figures import Figure, Goal, Runs, figure, others
from bench.harness import Run, drain, produce
from bench.limits import CELL, COMMITS, COPY, limit_in, limits_cell
from bench.systems import OURS, PEERS, REDIS_PEERS, System, peer_python

CPU_US = 342
"""A lone caller's CPU on 2026-11-22, before callers shared statements: it may not cost more."""
DRAIN_PER_S = 60_000
SINGLE_PER_S = 4_000
BULK_PER_S = 200_000
WHY_BULK = "the indexes of waiting jobs seem to cost half of a statement (docs/decisions/0027)"
SIZES = (10_000, 100_000, 1_000_000)
ONE_CALL = "headrace, one call a job"
Found = dict[str, dict[str, Runs]]


async def measure(run: Run) -> list[Figure]:
    """Drains at three sizes, enqueue alone and in bulk, ours and the peers' in turns."""
    figures: list[Figure] = []
    for size in SIZES[:2] if run.quick else SIZES:
        print(f"drain of {size:,}", flush=True)
        systems = _systems(run, size)
        cells = {
            system.name: partial(_cell, run, system, _jobs(run, system, size), size=size)
            for system in systems
        }
        cells[CELL] = partial(limits_cell, run)
        if size < SIZES[-1] and not _is_left_out(run, size):
            cells[ONE_CALL] = partial(_one_call, run, size)
        found = await run.alternate(cells)
        figures += _figures(found, size, _missing(run, found, size))
    return figures


def _systems(run: Run, size: int) -> list[System]:
    peers = PEERS if peer_python() and not _is_left_out(run, size) else ()
    return [OURS, *(peer for peer in peers if size in peer.drains)]


def _is_left_out(run: Run, size: int) -> bool:
    """Whether a quick run does without the peers here."""
    return run.quick and size > SIZES[0]


def _jobs(run: Run, system: System, size: int) -> int:
    return min(system.drains[size], system.quick_jobs) if run.quick else system.drains[size]


async def _cell(run: Run, system: System, jobs: int, *, size: int) -> Mapping[str, float]:
    async with run.cell(system) as cell:
        if system is not OURS:
            await produce(cell, "prepare", 0)
        waiting = 0
        found: dict[str, float] = {}
        if size == SIZES[0]:
            single = await produce(cell, "single", run.sized(system.singles, system.singles // 4))
            found |= {"single": single.rate_per_s, "single_cpu": single.cpu_us}
            waiting = single.enqueued
            if system is OURS:
                sync = await produce(cell, "sync", run.sized(system.singles, system.singles // 4))
                found |= {"sync": sync.rate_per_s, "sync_cpu": sync.cpu_us}
                waiting += sync.enqueued
        bulk = await produce(cell, "bulk", jobs)
        drained = await drain(cell, waiting + bulk.enqueued)
        return found | {
            "bulk": bulk.rate_per_s,
            "bulk_cpu": bulk.cpu_us,
            "drain": drained.rate_per_s,
            "drain_cpu": drained.cpu_us,
        }


async def _one_call(run: Run, size: int) -> Mapping[str, float]:
    """Ours without `batch`: one handler call a job, 200 at once, as the peers have it."""
    async with run.cell() as cell:
        cell.env = {"BENCH_QUEUE": "noop_single"}
        drained = await drain(cell, (await produce(cell, "bulk", size)).enqueued)
        return {"drain": drained.rate_per_s, "drain_cpu": drained.cpu_us}


def _figures(found: Found, size: int, missing: list[str]) -> list[Figure]:
    text = f"{size:,} jobs"
    commits, copy = limit_in(found, COMMITS), limit_in(found, COPY)
    drains = found.get("drain", {})
    one_call = drains.pop(ONE_CALL, None)
    found.get("drain_cpu", {}).pop(ONE_CALL, None)
    drain_goal = Goal(at_least=DRAIN_PER_S, times=_times(drains))
    row = partial(_row, missing=missing)
    figures = [
        row(
            drains,
            "no-op drain, one worker, batches of 100",
            text,
            goal=drain_goal,
            why="agent, slot and PostgreSQL share the cores: more slots add little",
            limit=copy,
        ),
        row(found.get("drain_cpu", {}), "CPU of a drained job, worker and servers", text),
        row(
            found.get("bulk", {}),
            "enqueue, 1,000 a call",
            text,
            goal=Goal(at_least=BULK_PER_S),
            why=WHY_BULK,
            limit=copy,
        ),
        row(found.get("bulk_cpu", {}), "CPU of an enqueued job, 1,000 a call", text),
    ]
    if one_call is not None:
        ours = _ours(drains, one_call)
        figures.append(row(ours, "no-op drain, one worker, one call a job", text, limit=commits))
    if size == SIZES[0]:
        goal = Goal(at_least=SINGLE_PER_S)
        figures += [
            row(
                found.get("single", {}),
                "enqueue, one connection",
                "1 a call",
                goal=goal,
                why="a lone caller waits for a round trip and a synced commit for each job",
                limit=commits,
            ),
            row(
                found.get("single_cpu", {}),
                "CPU of an enqueued job",
                "1 a call",
                goal=Goal(at_most=CPU_US),
                why="compare the CPU of the peers: this machine's speed differs between hours",
            ),
            row(found.get("sync", {}), "enqueue from sync code, one caller", "1 a call"),
            row(found.get("sync_cpu", {}), "CPU of a job enqueued from sync code", "1 a call"),
        ]
    return figures


def _ours(runs: dict[str, Runs], ours: Runs | None) -> dict[str, Runs]:
    """The same peers beside another way of ours."""
    return others(runs) | ({OURS.name: ours} if ours else {})


def _row(
    runs: dict[str, Runs],
    name: str,
    size: str,
    *,
    missing: list[str],
    goal: Goal | None = None,
    why: str = "",
    limit: dict[str, float] | None = None,
) -> Figure:
    is_cpu = name.startswith("CPU")
    return figure(
        name,
        "us" if is_cpu else "jobs/s",
        size,
        ours=runs.get(OURS.name),
        peers=others(runs),
        limit=limit,
        goal=goal,
        why=why,
        is_less_better=is_cpu,
        not_measured=missing,
    )


def _times(drains: dict[str, Runs]) -> dict[str, float]:
    """The multiples that the contract requires, of the peers that have a drain of this size."""
    redis = {name: drains[name].median for name in REDIS_PEERS if name in drains}
    required = {"pgqueuer": 5.0, "awa-pg": 3.0}
    if redis:
        required[max(redis, key=lambda name: redis[name])] = 10.0
    return {peer: times for peer, times in required.items() if peer in drains}


def _missing(run: Run, found: Found, size: int) -> list[str]:
    if not peer_python():
        return ["peers: their environment is not there, `make bench` makes it"]
    if _is_left_out(run, size):
        return ["peers: left out of a quick run at this size"]
    slow = [f"{p.name}: {size:,} jobs take it minutes" for p in PEERS if size not in p.drains]
    drains = found.get("drain", {})
    failed = [p.name for p in PEERS if size in p.drains and p.name not in drains]
    return slow + [f"{name}: its cell failed" for name in failed]
