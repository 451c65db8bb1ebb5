"""An application that writes a history of what its handlers did, into the folder HISTORY.

Each handler notes its start first of all; then it takes `hold_s` of its payload, as work would.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from penstock import Penstock
from penstock.jobs import JobInHand
from penstock.testing.history import Recorder

app = Penstock()
recorder = Recorder(Path(os.environ["HISTORY"]))


async def _work(queue: str, job: JobInHand[dict]) -> None:
    told = {"job": job.id, "lane": job.lane, "lease": job.lease_id, "wall_s": time.time()}
    with recorder.running(queue, **told, **job.payload):
        await asyncio.wait([asyncio.create_task(_never())], timeout=job.payload.get("hold_s", 0))


async def _never() -> None:
    await asyncio.Event().wait()


@app.task("noted", concurrency=5, retries=50)
async def noted(job: JobInHand[dict]) -> None:
    """Jobs without lanes."""
    await _work("noted", job)


@app.task("laned", concurrency=20, retries=50)
async def laned(job: JobInHand[dict]) -> None:
    """Jobs in lanes of the limiter `laned`."""
    await _work("laned", job)


@app.task("told", retries=50)
async def told(job: JobInHand[dict]) -> None:
    """Callbacks of groups."""
    group = job.payload["group"]
    counts = {name: group[name] for name in ("done", "failed", "cancelled", "quarantined")}
    with recorder.running("told", job=job.id, group=group["id"], **counts):
        pass
