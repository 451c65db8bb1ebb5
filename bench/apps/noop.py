"""No-op handlers: `noop` takes batches of 100, `noop_single` one job a call, 200 at once."""

from __future__ import annotations

import msgspec

from bench.tally import Tally
from headrace import Headrace
from headrace.jobs import Batch

app = Headrace()
_tally = Tally()


class Note(msgspec.Struct):
    """The payload."""

    text: str


@app.task("noop", batch=100, retries=5)
async def noop(jobs: Batch[Note]) -> None:
    """Count the jobs of a call."""
    _tally.add(len(jobs))


@app.task("noop_single", concurrency=200, retries=5)
async def noop_single(note: Note) -> None:
    """Count one."""
    _tally.add()
