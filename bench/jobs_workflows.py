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
from bench.harness import READY_S, Run, produce
from bench.limits import CELL, COMMITS, limit_in, limits_cell
from bench.ours import open_app
from bench.systems import System, peer_python
from bench.tally import read_starts

APP = "bench.apps.steps:app"
QUEUE = "workflow.steps"
DBOS = System(name="dbos", module="bench.peers.dbos_steps", settings="asyncio, 20 at once")


async def measure(run: Run) -> list[Figure]:
    """Steps per second of one slot, beside the commits of one client."""
    cells = {CELL: lambda: limits_cell(run), "headrace": lambda: _steps(run)}
    if peer_python() is not None:
        cells["dbos"] = lambda: _dbos(run)
    found = await run.alternate(cells)
    workflows = run.sized(2_000, 300)
    rates, cpu = found.get("steps", {}), found.get("cpu", {})
    return [
        figure(
            "steps of workflows, one slot",
            "steps/s",
            f"{workflows:,} workflows of {STEPS} steps, {CONCURRENCY} at once",
            ours=rates.get("headrace"),
            peers={"dbos": rates["dbos"]} if "dbos" in rates else {},
            limit=limit_in(found, COMMITS),
        ),
        figure(
            "CPU of a step of a workflow, with the server",
            "us",
            f"{workflows:,} workflows of {STEPS} steps, {CONCURRENCY} at once",
            ours=cpu.get("headrace"),
            peers={"dbos": cpu["dbos"]} if "dbos" in cpu else {},
            is_less_better=True,
        ),
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
            before_s = worker.cpu_s() + cell.engines.cpu_s()
            await queue.enqueue_many({"number": number} for number in range(workflows))
            await wait_for(
                lambda: len(read_starts(cell.tally_folder)) > workflows, "all ends", 120, worker
            )
            cpu_s = worker.cpu_s() + cell.engines.cpu_s() - before_s
        finally:
            await worker.end()
            await app.close()
        ends = read_starts(cell.tally_folder)
    last_ns = max(ended_ns for _, ended_ns in ends)
    steps = workflows * STEPS
    return {"steps": steps / ((last_ns - began_ns) / 1e9), "cpu": cpu_s / steps * 1e6}


async def _dbos(run: Run) -> Mapping[str, float]:
    async with run.cell(DBOS) as cell:
        produced = await produce(cell, "steps", run.sized(2_000, 300))
    return {"steps": produced.rate_per_s, "cpu": produced.cpu_us}
