"""The application of the storm.

`recorded_app` with batches, handlers that raise or die, and fenced effects.
"""

from __future__ import annotations

import os
import signal
import threading

from recorded_app import app, recorder, told_effects, write_effects

from headrace.jobs import Batch, JobContext


class Raised(Exception):
    """What handlers of this application raise when their payload says so."""


@app.task("batched", batch=10, retries=50, keep_done="1h")
def batched(batch: Batch[dict]) -> None:
    """Jobs in batches; some of them raise at first, and one kills its process at every run."""
    told = {"job": [job.id for job in batch], "lease": batch.lease_id}
    with recorder.running("batched", **told):
        if any(job.payload.get("dies") for job in batch):
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(sum(job.payload.get("hold_s", 0) for job in batch))
        if any(job.attempt <= job.payload.get("raises", 0) for job in batch):
            raise Raised("this run fails")


@app.task("fails", retries=1)
async def fails(job: JobContext[dict]) -> None:
    """Never ends well."""
    with recorder.running("fails", job=job.id, lease=job.lease_id):
        raise Raised("every run fails")


@app.task("fenced", retries=50, keep_done="1h")
async def fenced(job: JobContext[dict]) -> None:
    """Writes a row that commits only while the lease is held."""
    with recorder.running("fenced", job=job.id, lease=job.lease_id), told_effects([job]):
        async with app.engines.postgres.transaction() as tx:
            await write_effects(tx, [job])
