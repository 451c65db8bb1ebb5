"""An application with 100 MB in memory: bytes that jobs read, or plain objects, whose counters get
copied.

`BENCH_HEAP=objects` loads dicts; else one bytes object of the same size.
"""

from __future__ import annotations

import os
import random

from bench.tally import Tally
from headrace import Headrace
from headrace.jobs import Batch

app = Headrace()
_tally = Tally()
SIZE_BYTES = 100 * 2**20
READS = 20
RECORD_BYTES = 256
IS_OBJECTS = os.environ.get("BENCH_HEAP") == "objects"


def _objects() -> list[dict[str, object]]:
    return [{"id": n, "name": f"record {n}", "tags": [n, n + 1]} for n in range(SIZE_BYTES // 430)]


HEAP = _objects() if IS_OBJECTS else os.urandom(2**20) * (SIZE_BYTES // 2**20)


@app.task("heavy", batch=100)
async def heavy(jobs: Batch[dict[str, str]]) -> None:
    """Read twenty random records a job."""
    total = 0
    for _ in range(READS * len(jobs)):
        total += _read()
    _tally.add(len(jobs))


def _read() -> int:
    if isinstance(HEAP, bytes):
        at = random.randrange(0, len(HEAP) - RECORD_BYTES)
        return len(HEAP[at : at + RECORD_BYTES])
    return len(str(random.choice(HEAP)["name"]))
