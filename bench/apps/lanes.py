"""Three queues of one limiter, and handlers that record when each job starts; the payload names its
lane.

`BENCH_RATE` is the limiter's rate.
"""

from __future__ import annotations

import os
import time

import msgspec

from bench.tally import Starts
from headrace import Headrace
from headrace.jobs import Batch

app = Headrace()
_starts = Starts()
LIMITER = "partner"
RATE_VARIABLE = "BENCH_RATE"
QUEUES = ("lane_a", "lane_b", "lane_c")


class Visit(msgspec.Struct):
    """The payload."""

    lane: int


async def visit(jobs: Batch[Visit]) -> None:
    """Record the starts."""
    at_ns = time.monotonic_ns()
    _starts.add(at_ns, *(job.payload.lane for job in jobs))


app.limiter(LIMITER, rate=os.environ.get(RATE_VARIABLE, "10/m"))
for queue in QUEUES:
    app.task(queue, batch=100, limiter=LIMITER)(visit)
