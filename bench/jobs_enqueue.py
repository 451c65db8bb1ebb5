"""How fast are jobs enqueued: by call size, by calls at once, and into lanes with their counts?

One process, 100 B payload; and handlers of 20 slots that enqueue one job each. Enqueue without
lanes, beside the peers, is in `jobs_drain.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from bench.apps.chain import CONCURRENCY, QUEUE
from bench.figures import Figure, Goal, figure
from bench.harness import Run, produce, wait_started
from bench.jobs_drain import BULK_PER_S, WHY_BULK
from bench.limits import CELL, COMMITS, COPY, limit_in, limits_cell
from bench.ours import open_app
from bench.systems import OURS
from headrace.engines.sql import compile_query

CALLERS_PER_S = 10_000
LANED_SINGLE_PER_S = 2_000
LANED_BULK_PER_S = 80_000
SLOTS = 20
BACKENDS = compile_query(
    "backends",
    "-- Connections of all processes to this database.\nSELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()",
)
WHY_LANES = {
    "single": "a lone caller waits for a round trip and a synced commit for each job",
    "bulk": "each job also adds a row to the journal of lanes, with an index entry",
}


async def measure(run: Run) -> list[Figure]:
    """100 a call and at once without lanes; one and 1,000 a call into few and many lanes."""
    lanes = (10_000,) if run.quick else (100, 10_000, 100_000)
    cells: dict[str, Callable[[], Awaitable[Mapping[str, float]]]] = {
        CELL: partial(limits_cell, run),
        "100 a call": partial(_calls_of_100, run),
        "at once": partial(_at_once, run),
        "handlers": partial(_by_handlers, run),
    }
    cells |= {f"{count:,} lanes": partial(_laned, run, count) for count in lanes}
    found = await run.alternate(cells)
    goals = {"single": Goal(at_least=LANED_SINGLE_PER_S), "bulk": Goal(at_least=LANED_BULK_PER_S)}
    names = {
        "single": "enqueue into lanes, one a call",
        "bulk": "enqueue into lanes, 1,000 a call",
    }
    limit = {
        "single": limit_in(found, COMMITS),
        "bulk": limit_in(found, COPY),
    }
    figures = [
        figure(
            names[metric],
            "jobs/s",
            f"{count:,} lanes",
            ours=found.get(metric, {}).get(f"{count:,} lanes"),
            goal=goals[metric],
            why=WHY_LANES[metric],
            limit=limit[metric],
        )
        for metric in names
        for count in lanes
    ]
    hundred = found.get("hundred", {}).get("100 a call")
    return [
        figure("enqueue, 100 a call", "jobs/s", "20,000 jobs", ours=hundred, limit=limit["bulk"]),
        figure(
            "enqueue, one a call, 16 callers of a process",
            "jobs/s",
            "20,000 jobs",
            ours=found.get("callers", {}).get("at once"),
            goal=Goal(at_least=CALLERS_PER_S),
            why="the statements of all callers wait for synced commits, one after another",
            limit=limit["single"],
        ),
        figure(
            "CPU of an enqueued job, 16 callers of a process",
            "us",
            "20,000 jobs",
            ours=found.get("callers_cpu", {}).get("at once"),
            is_less_better=True,
        ),
        figure(
            "enqueue, 1,000 a call, two calls at once",
            "jobs/s",
            "200,000 jobs",
            ours=found.get("calls", {}).get("at once"),
            goal=Goal(at_least=BULK_PER_S),
            why=WHY_BULK,
            limit=limit["bulk"],
        ),
        *[
            figure(
                name,
                unit,
                f"{SLOTS} slots, {CONCURRENCY} calls at once in each",
                ours=found.get(metric, {}).get("handlers"),
                is_less_better=unit != "jobs/s",
            )
            for metric, name, unit in (
                ("chained", "handlers that enqueue one job each", "jobs/s"),
                ("chained_cpu", "CPU of a handler that enqueues one job, with the server", "us"),
                ("backends", "connections to PostgreSQL while these handlers run", "connections"),
            )
        ],
        *figures,
    ]


async def _calls_of_100(run: Run) -> Mapping[str, float]:
    async with run.cell(OURS) as cell:
        cell.env = {"BENCH_BULK": "100"}
        return {"hundred": (await produce(cell, "bulk", 20_000)).rate_per_s}


async def _at_once(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell:
        callers = await produce(cell, "callers", 20_000)
        calls = await produce(cell, "calls", 200_000)
        return {
            "callers": callers.rate_per_s,
            "callers_cpu": callers.cpu_us,
            "calls": calls.rate_per_s,
        }


async def _by_handlers(run: Run) -> Mapping[str, float]:
    jobs = run.sized(40_000, 20_000)
    async with run.cell(OURS) as cell:
        cell.env = {"BENCH_QUEUE": QUEUE}
        jobs = (await produce(cell, "bulk", jobs)).enqueued
        app = open_app(cell.url)
        worker = cell.work("bench.apps.chain:app", slots=SLOTS)
        try:
            early = await wait_started(cell, worker, 1)
            before_s = worker.cpu_s() + cell.engines.cpu_s()
            await wait_started(cell, worker, jobs // 2)
            backends = await app.engines.postgres.value(BACKENDS)
            found = await wait_started(cell, worker, jobs)
            spent_s = worker.cpu_s() + cell.engines.cpu_s() - before_s
        finally:
            await worker.end()
            await app.close()
    return {
        "chained": found.rate_per_s,
        "chained_cpu": spent_s / (jobs - early.count) * 1e6,
        "backends": backends,
    }


async def _laned(run: Run, lanes: int) -> Mapping[str, float]:
    async with run.cell(OURS) as cell:
        cell.env = {"BENCH_QUEUE": "noop_lanes", "BENCH_LANES": str(lanes)}
        single = await produce(cell, "single", run.sized(4_000, 1_000))
        bulk = await produce(cell, "bulk", run.sized(100_000, 30_000))
        return {"single": single.rate_per_s, "bulk": bulk.rate_per_s}
