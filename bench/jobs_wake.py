"""How long from the enqueue call to the handler: one idle queue, and twenty queues that share four
slots?

Open loop: jobs are sent at moments drawn beforehand (seeded), whatever happened to the ones
before, so that waiting for a slow one hides nothing. The clock starts before the enqueue call.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

from bench.apps.waits import QUEUES
from bench.children import BenchFault, wait_for
from bench.figures import Figure, Goal, figure, percentile
from bench.harness import READY_S, Run
from bench.ours import open_app
from bench.tally import read_starts
from headrace.jobs.tasks import Task

APP = "bench.apps.waits:app"
IDLE_PER_S = 50
LIGHT_PER_S = 100
SLOTS = 4
IDLE_GOALS = {"p50": Goal(at_most=3), "p99": Goal(at_most=15), "p99.9": None}
LIGHT_GOALS = {"p50": None, "p99": Goal(at_most=50), "p99.9": None}
WHY = "each job waits for two synced commits, so a slow disk delays it"
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


async def measure(run: Run) -> list[Figure]:
    """Both waits, in turns."""
    found = await run.alternate(
        {"idle": lambda: _idle(run), "light": lambda: _light(run)},
    )
    size_idle = f"1 queue, {IDLE_PER_S}/s"
    size_light = f"{QUEUES} queues, {SLOTS} slots, {LIGHT_PER_S}/s of 5 ms"
    return [
        *(
            figure(
                f"enqueue to handler, idle system, {share}",
                "ms",
                size_idle,
                ours=found.get(share, {}).get("idle"),
                goal=goal,
                why=WHY,
            )
            for share, goal in IDLE_GOALS.items()
        ),
        *(
            figure(
                f"enqueue to handler, light load, {share}",
                "ms",
                size_light,
                ours=found.get(share, {}).get("light"),
                goal=goal,
                why=WHY,
            )
            for share, goal in LIGHT_GOALS.items()
        ),
    ]


async def _idle(run: Run) -> Mapping[str, float]:
    return await _waits(run, ["wake"], IDLE_PER_S, 1)


async def _light(run: Run) -> Mapping[str, float]:
    queues = [f"light{number}" for number in range(QUEUES)]
    return await _waits(run, queues, LIGHT_PER_S, SLOTS)


async def _waits(run: Run, queues: list[str], rate_per_s: int, slots: int) -> Mapping[str, float]:
    async with run.cell() as cell:
        worker = cell.work(APP, slots=slots)
        app = open_app(cell.url)
        tasks = [app.task(queue)(_nothing) for queue in queues]
        try:
            await app.jobs.queues.declare()
            warm = await _send(tasks, _moments(rate_per_s, 1.0, seed=1))
            await wait_for(
                lambda: len(read_starts(cell.tally_folder)) == warm, "warm-up", READY_S, worker
            )
            sent = await _send(tasks, _moments(rate_per_s, run.sized(20, 4), seed=2))
            await wait_for(
                lambda: len(read_starts(cell.tally_folder)) >= warm + sent, "all starts", 20, worker
            )
        finally:
            await worker.end()
            await app.close()
        starts = read_starts(cell.tally_folder)
    if len({key for key, _ in starts}) != warm + sent:
        raise BenchFault(f"{warm + sent} jobs sent, {len(starts)} starts")
    measured = sorted(starts)[warm:]
    waits_ms = [(started_ns - sent_ns) / 1e6 for sent_ns, started_ns in measured]
    return {name: percentile(waits_ms, share) for name, share in SHARES.items()}


def _moments(rate_per_s: int, seconds: float, seed: int) -> list[float]:
    """Arrivals of a Poisson process."""
    chance = random.Random(seed)
    moments, at_s = [], 0.0
    while (at_s := at_s + chance.expovariate(rate_per_s)) < seconds:
        moments.append(at_s)
    return moments


async def _send(tasks: list[Task], moments: list[float]) -> int:
    """Enqueue a job at each of the moments, of the tasks in turn; how many."""
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, at_s in enumerate(moments):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            group.create_task(_enqueue(tasks[number % len(tasks)]))
    return len(moments)


async def _enqueue(task: Task) -> None:
    await task.enqueue(at_ns=time.monotonic_ns())


async def _nothing(at_ns: int) -> None:
    """Never run here."""
