"""Do many lanes cost speed: 100,000 lanes with a million jobs waiting, drained until every lane is
exhausted?

Each lane has twice the jobs that its limit allows, so that half of them start and half stay, in
exhausted lanes. Then claims find nothing in a queue full of waiting jobs: what such an empty
claim costs is read from the server's log during notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import asyncpg

from bench.apps.many_lanes import QUEUE, RATE, STARTS_MAX
from bench.children import BenchFault
from bench.figures import Figure, Goal, figure, percentile
from bench.harness import Run, wait_started
from bench.limits import CELL, COPY, limit_in, limits_cell
from bench.ours import nothing, open_app
from bench.peers.driver import PAYLOAD
from bench.systems import OURS, Cell
from bench.tally import read_tally
from headrace.jobs import NewJob

APP = "bench.apps.many_lanes:app"
JOBS_A_LANE = 10
HINTS = 60
HINT_EVERY_S = 0.03
CHANNEL = "headrace_jobs"
RATE_GOAL = Goal(at_least=60_000)
WHY = "a claim locks and updates a row of each lane it visits, which other jobs do not need"
FEW_LANES = 1_000
WHY_FEW = "the run has few claims, and the first ones of a connection take twice as long as others"
EMPTY_GOAL = Goal(at_most=1)


async def measure(run: Run) -> list[Figure]:
    """Three sizes."""
    figures: list[Figure] = []
    for lanes in (5_000,) if run.quick else (1_000, 10_000, 100_000):
        found = await run.alternate(
            {CELL: partial(limits_cell, run), OURS.name: partial(_drain, run, lanes)}
        )
        size = f"{lanes:,} lanes, {lanes * JOBS_A_LANE:,} waiting"
        for metric, name, unit, goal in (
            ("rate", "drain of lanes", "jobs/s", RATE_GOAL),
            ("empty_p50", "empty claim of exhausted lanes, p50", "ms", EMPTY_GOAL),
            ("empty_p99", "empty claim of exhausted lanes, p99", "ms", None),
        ):
            ours = found.get(metric, {}).get(OURS.name)
            limit = limit_in(found, COPY) if metric == "rate" else {}
            why = WHY_FEW if lanes <= FEW_LANES else WHY
            figures.append(figure(name, unit, size, ours=ours, goal=goal, why=why, limit=limit))
    return figures


async def _drain(run: Run, lanes: int) -> Mapping[str, float]:
    starts = lanes * STARTS_MAX
    async with run.cell() as cell:
        await _fill(cell, lanes)
        await cell.engines.settle(cell.database)
        await cell.engines.log_durations(cell.database, share=1.0)
        worker = cell.work(APP)
        try:
            found = await wait_started(cell, worker, starts)
            logged = cell.engines.log_size()
            await _hint(cell)
        finally:
            await worker.end()
        claims = cell.engines.claims_ms(logged)
        if (count := read_tally(cell.tally_folder).count) != starts:
            raise BenchFault(f"{starts} starts allowed, {count} seen")
    if not claims:
        raise BenchFault("the server's log names no claim")
    return {
        "rate": found.rate_per_s,
        "empty_p50": percentile(claims, 0.5),
        "empty_p99": percentile(claims, 0.99),
    }


async def _fill(cell: Cell, lanes: int) -> None:
    app = open_app(cell.url)
    try:
        app.limiter(QUEUE, rate=RATE)
        app.task(QUEUE)(nothing)
        await app.jobs.queues.declare()
        for first in range(0, lanes, 1_000):
            names = [f"customer:{lane}" for lane in range(first, min(lanes, first + 1_000))]
            jobs = [NewJob(queue=QUEUE, payload=PAYLOAD, lane=name) for name in names] * JOBS_A_LANE
            for start in range(0, len(jobs), 10_000):
                await app.jobs.enqueue_many(jobs[start : start + 10_000])
    finally:
        await app.close()


async def _hint(cell: Cell) -> None:
    """Notify the worker repeatedly that there may be work."""
    connection = await asyncpg.connect(cell.url)
    try:
        queue = await connection.fetchval("SELECT id FROM headrace.queue WHERE name = $1", QUEUE)
        for _ in range(HINTS):
            await connection.execute("SELECT pg_notify($1, $2)", CHANNEL, str(queue))
            await asyncio.sleep(HINT_EVERY_S)
    finally:
        await connection.close()
