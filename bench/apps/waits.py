"""Handlers that record when they start: `wake` for one queue, `light0` to `light19` for many, 5 ms
of work each.

The payload is the moment of the enqueue on the same machine's monotonic clock.
"""

from __future__ import annotations

import time

import msgspec

from bench.tally import Starts
from headrace import Headrace

app = Headrace()
_starts = Starts()
QUEUES = 20
WORK_S = 0.005


class Sent(msgspec.Struct):
    """The payload."""

    at_ns: int


@app.task("wake", concurrency=10)
async def wake(sent: Sent) -> None:
    """Record the start."""
    _starts.add(time.monotonic_ns(), sent.at_ns)


def light(sent: Sent) -> None:
    """Record the start, then work a little."""
    _starts.add(time.monotonic_ns(), sent.at_ns)
    time.sleep(WORK_S)


for number in range(QUEUES):
    app.task(f"light{number}")(light)
