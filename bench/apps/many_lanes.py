"""One queue whose lanes let five jobs go in an hour, and a handler that counts."""

from __future__ import annotations

import msgspec

from bench.tally import Tally
from headrace import Headrace
from headrace.jobs import Batch

app = Headrace()
_tally = Tally()
QUEUE = "noop_lanes"
STARTS_MAX = 5
RATE = f"{STARTS_MAX}/h"


class Note(msgspec.Struct):
    """The payload."""

    text: str


app.limiter(QUEUE, rate=RATE)


@app.task(QUEUE, batch=100, retries=5)
async def noop_lanes(jobs: Batch[Note]) -> None:
    """Count the jobs of a call."""
    _tally.add(len(jobs))
