"""Handlers that enqueue one job each: 20 calls at once in a slot."""

from __future__ import annotations

from bench.tally import Tally
from headrace import Headrace

app = Headrace()
_tally = Tally()
QUEUE = "chain"
CONCURRENCY = 20
kept = app.queue("chained")


@app.task(QUEUE, concurrency=CONCURRENCY)
async def chain(text: str) -> None:
    """Enqueue one job, then count this one."""
    await kept.enqueue(text=text)
    _tally.add()
