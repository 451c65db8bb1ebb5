"""A workflow of ten steps that do nothing; it records its start and its end."""

from __future__ import annotations

import time

from bench.tally import Starts
from headrace import Headrace
from headrace.jobs import WorkflowContext

app = Headrace()
_ends = Starts()
STEPS = 10
CONCURRENCY = 20


async def nothing() -> None:
    """The function of each step."""


@app.workflow("steps", concurrency=CONCURRENCY, keep_result=False)
async def steps(ctx: WorkflowContext, number: int) -> None:
    """Ten steps, one after another."""
    for step in range(STEPS):
        await ctx.step(f"step {step}", nothing)
    _ends.add(time.monotonic_ns(), number)
