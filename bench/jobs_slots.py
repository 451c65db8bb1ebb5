"""What do slots cost.

A hundred of them beside one, and the memory of each over an app that holds 100 MB?

Memory is the proportional set size of each slot (smaps_rollup), which shares out what processes
have in common: idle after the start, and after 2,000 jobs a slot of twenty reads each, among 20
slots and among 100. Slots are the processes whose parent is the zygote, so the leaves of the role's
family.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.kit.processes import descendants

from bench.children import BenchFault, Child, wait_for
from bench.figures import Figure, Goal, figure
from bench.harness import READY_S, Run, produce, wait_started
from bench.systems import OURS, Cell
from bench.tally import read_tally

SLOTS = 100
FEW_SLOTS = 20
JOBS_A_SLOT = 2_000
STARTED_S = 2.0
"""For slots that were just forked to come to rest."""
LOSS_GOAL = Goal(at_most=20)
IDLE_GOAL = Goal(at_most=8)
BYTES_GOAL = Goal(at_most=10)
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_PRIVATE = re.compile(r"^Private_Dirty:\s+(\d+) kB", re.MULTILINE)
APP = "bench.apps.heavy:app"
HEAPS = ("bytes", "objects")


async def measure(run: Run) -> list[Figure]:
    """Drains with one and a hundred slots in turns, then memory."""
    jobs = run.sized(200_000, 50_000)
    counts = (1, SLOTS) if run.quick else (1, 10, SLOTS)
    cells = {f"{slots} slots": partial(_drain, run, jobs, slots) for slots in counts}
    rates = (await run.alternate(cells)).get("rate", {})
    figures = [
        figure("no-op drain by slots", "jobs/s", name, ours=rates.get(name)) for name in cells
    ]
    one, many = rates.get("1 slots"), rates.get(f"{SLOTS} slots")
    loss = None
    if one and many:
        values = zip(one.values, many.values, strict=False)
        loss = type(one)(tuple(max(0.0, (1 - b / a) * 100) for a, b in values))
    size = f"{SLOTS} slots beside 1"
    figures.append(
        figure(
            "loss of drain rate with many slots",
            "%",
            size,
            ours=loss,
            goal=LOSS_GOAL,
            why="all slots share the cores, and each has its own claims and acks",
        )
    )
    if run.quick:
        run.leave_out("10 slots", f"the memory of {FEW_SLOTS} slots and of objects")
        return figures + await _memory_figures(run, SLOTS, HEAPS[:1])
    for slots in (FEW_SLOTS, SLOTS):
        figures += await _memory_figures(run, slots, HEAPS)
    return figures


async def _memory_figures(run: Run, slots: int, heaps: Sequence[str]) -> list[Figure]:
    """What a slot costs among `slots`; the goal is of a hundred, who share the app's own pages."""
    is_goal = slots == SLOTS
    memory = await run.alternate({heap: partial(_memory, run, heap, slots) for heap in heaps})
    figures = []
    for heap in heaps:
        worked_goal = BYTES_GOAL if is_goal and heap == "bytes" else None
        for metric, name, goal in (
            ("idle", "PSS of a slot, idle", IDLE_GOAL if is_goal else None),
            ("worked", f"PSS of a slot after {JOBS_A_SLOT:,} jobs", worked_goal),
            ("private_idle", "private dirty memory of a slot, idle", None),
            ("private_worked", f"private dirty memory of a slot after {JOBS_A_SLOT:,} jobs", None),
        ):
            ours = memory.get(metric, {}).get(heap)
            text = f"{slots} slots, app with 100 MB of {heap}"
            figures.append(figure(name, "MiB", text, ours=ours, goal=goal))
    return figures


async def _drain(run: Run, jobs: int, slots: int) -> Mapping[str, float]:
    async with run.cell() as cell:
        made = await produce(cell, "bulk", jobs)
        await cell.engines.settle(cell.database)
        # The queue is paused until every slot has started: what a fork costs is no cost of a claim.
        await cell.engines.run("UPDATE headrace.queue SET paused = true", cell.database)
        worker = cell.work(slots=slots)
        try:
            await wait_for(lambda: len(_slots(worker)) >= slots, f"{slots} slots", READY_S, worker)
            await asyncio.sleep(STARTED_S)
            await cell.engines.run("UPDATE headrace.queue SET paused = false", cell.database)
            found = await wait_started(cell, worker, made.enqueued)
        finally:
            await worker.end()
        if (count := read_tally(cell.tally_folder).count) != made.enqueued:
            raise BenchFault(f"{made.enqueued} jobs, {count} handler starts")
        return {"rate": found.rate_per_s}


async def _memory(run: Run, heap: str, slots: int) -> Mapping[str, float]:
    async with run.cell(OURS) as cell:
        cell.env = {"BENCH_HEAP": heap, "BENCH_QUEUE": "heavy"}
        worker = cell.work(APP, slots=slots)
        try:
            await wait_for(lambda: len(_slots(worker)) >= slots, f"{slots} slots", READY_S, worker)
            idle = _memory_mib(worker)
            jobs = await _work_through(cell, worker, slots)
            worked = _memory_mib(worker)
        finally:
            await worker.end()
        if (count := read_tally(cell.tally_folder).count) != jobs:
            raise BenchFault(f"{jobs} jobs, {count} handler starts")
        return {
            "idle": idle[0],
            "worked": worked[0],
            "private_idle": idle[1],
            "private_worked": worked[1],
        }


async def _work_through(cell: Cell, worker: Child, slots: int) -> int:
    jobs = JOBS_A_SLOT * slots
    made = await produce(cell, "bulk", jobs)
    await wait_started(cell, worker, made.enqueued)
    return made.enqueued


def _slots(worker: Child) -> list[int]:
    """The leaves of the family."""
    family = descendants(worker.pid)
    return [pid for pid in family if not descendants(pid)]


def _memory_mib(worker: Child) -> tuple[float, float]:
    """Mean proportional set size and private dirty memory of the slots."""
    found = []
    for pid in _slots(worker):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        rows = [pattern.findall(text) for pattern in (_PSS, _PRIVATE)]
        if all(rows):
            found.append([int(row[0]) / 1024 for row in rows])
    if not found:
        raise BenchFault("no slot whose memory could be read")
    pss, private = (sum(column) / len(found) for column in zip(*found, strict=True))
    return pss, private
