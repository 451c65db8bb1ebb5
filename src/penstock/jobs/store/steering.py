"""What a person does to single jobs."""

from __future__ import annotations

from penstock.engines.postgres import Runner
from penstock.jobs.store.sql import SQL


async def cancel_job(runner: Runner, job_id: int) -> bool:
    """Whether the job was waiting and is cancelled now."""
    return bool(await runner.value(SQL.cancel_job, job=job_id))


async def retry_ended(runner: Runner, job_id: int) -> bool:
    """Whether the job was among the ended and is ready now. Raises: ConstraintViolated."""
    return bool(await runner.value(SQL.retry_ended, job=job_id))
