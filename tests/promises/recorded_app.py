"""An application that writes a history of what its handlers did, into the folder HISTORY.

Each handler notes its start first of all; then it takes `hold_s` of its payload, as work would, or
waits until the file `go` lies beside the history.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kit.history import Recorder
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.engines.postgres import Tx
from headrace.engines.sql import compile_query
from headrace.jobs import Batch, JobContext

app = Headrace()
HISTORY = Path(os.environ["HISTORY"])
recorder = Recorder(HISTORY)
ADD_EFFECT = compile_query("add_effect", "-- One effect.\nINSERT INTO effect VALUES (:job, :lease)")


async def _work(queue: str, job: JobContext[dict]) -> None:
    told = {"job": job.id, "lane": job.lane, "lease": job.lease_id, "wall_s": time.time()}
    with recorder.running(queue, **told, **job.payload):
        await asyncio.wait([asyncio.create_task(_never())], timeout=job.payload.get("hold_s", 0))


async def _never() -> None:
    await asyncio.Event().wait()


@app.task("noted", concurrency=5, retries=50)
async def noted(job: JobContext[dict]) -> None:
    """Jobs without lanes."""
    await _work("noted", job)


@app.task("laned", concurrency=20, retries=50)
async def laned(job: JobContext[dict]) -> None:
    """Jobs in lanes of the limiter `laned`."""
    await _work("laned", job)


@app.task("told", retries=50)
async def told(job: JobContext[dict]) -> None:
    """Callbacks of groups."""
    group = job.payload["group"]
    counts = {name: group[name] for name in ("done", "failed", "cancelled", "quarantined")}
    with recorder.running("told", job=job.id, group=group["id"], **counts):
        pass


@app.task("gated", batch=5, retries=50)
async def gated(batch: Batch[dict]) -> None:
    """Wait for `go`, then write a row for each job, which commits only while the lease is held."""
    told = {"job": [job.id for job in batch], "lease": batch.lease_id}
    with recorder.running("gated", **told):
        await wait_go()
        with told_effects(batch):
            async with app.engines.postgres.transaction() as tx:
                await write_effects(tx, batch)


@app.task("locking", retries=50)
async def locking(job: JobContext[dict]) -> None:
    """The same with the lease locked first: the transaction stays open until `go`."""
    with recorder.running("locking", job=job.id, lease=job.lease_id), told_effects([job]):
        async with app.engines.postgres.transaction() as tx:
            await app.jobs.lock_lease(tx, job.lease_id)
            recorder.note("locked", "locking", job=job.id)
            await wait_go()
            await write_effects(tx, [job])


async def wait_go() -> None:
    """Until the test makes the file."""
    await wait_true((HISTORY.parent / "go").exists, deadline_s=120)


async def write_effects(tx: Tx, jobs: Sequence[JobContext[dict]]) -> None:
    """A row for each job, which goes with the lease of all."""
    for job in jobs:
        await tx.run(ADD_EFFECT, job=job.id, lease=job.lease_id)
    await app.jobs.lock_lease(tx, jobs[0].lease_id)


@contextmanager
def told_effects(jobs: Sequence[JobContext[dict]]) -> Iterator[None]:
    """Note of each job that its effect is tried, and whether it was committed or refused."""
    with ExitStack() as stack:
        tried = [
            stack.enter_context(recorder.asking("effect", job=job.id, lease=job.lease_id))
            for job in jobs
        ]
        yield
        for asked in tried:
            asked.ok()
