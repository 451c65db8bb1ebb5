"""How many steps of workflows are recorded per second, in one slot?

Each workflow has ten steps that do nothing, one after another; twenty run at once. The clock runs
from the enqueue of all workflows to the end of the last one. Each step is a commit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from bench.apps.steps import CONCURRENCY, STEPS
from bench.children import wait_for
from bench.figures import Figure, figure
from bench.harness import READY_S, Run
from bench.limits import CELL, COMMITS, limit_in, limits_cell
from bench.ours import open_app
from bench.tally import read_starts

APP = "bench.apps.steps:app"
QUEUE = "workflow.steps"


async def measure(run: Run) -> list[Figure]:
    """Steps per second of one slot, beside the commits of one client."""
    found = await run.alternate({CELL: lambda: limits_cell(run), "steps": lambda: _steps(run)})
    workflows = run.sized(2_000, 300)
    return [
        figure(
            "steps of workflows, one slot",
            "steps/s",
            f"{workflows:,} workflows of {STEPS} steps, {CONCURRENCY} at once",
            ours=found.get("steps", {}).get("steps"),
            limit=limit_in(found, COMMITS),
        )
    ]


async def _steps(run: Run) -> Mapping[str, float]:
    workflows = run.sized(2_000, 300)
    async with run.cell() as cell:
        worker = cell.work(APP, slots=1)
        app = open_app(cell.url)
        queue = app.queue(QUEUE)
        try:
            await app.jobs.queues.declare()
            await queue.enqueue(number=-1)
            await wait_for(
                lambda: len(read_starts(cell.tally_folder)) == 1, "warm-up", READY_S, worker
            )
            began_ns = time.monotonic_ns()
            await queue.enqueue_many({"number": number} for number in range(workflows))
            await wait_for(
                lambda: len(read_starts(cell.tally_folder)) > workflows, "all ends", 120, worker
            )
        finally:
            await worker.end()
            await app.close()
        ends = read_starts(cell.tally_folder)
    last_ns = max(ended_ns for _, ended_ns in ends)
    return {"steps": workflows * STEPS / ((last_ns - began_ns) / 1e9)}
