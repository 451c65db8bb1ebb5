"""Jobs by id and by how they ended; a job is read from wherever it is."""

from __future__ import annotations

import msgspec

from penstock.engines.postgres import Row, Runner
from penstock.jobs.model import Job, JobState
from penstock.jobs.store.sql import SQL


async def find_job(runner: Runner, job_id: int) -> Job | None:
    """The job wherever it is, if it still is."""
    row = await runner.one(SQL.find_job, job=job_id)
    row = row or await runner.one(SQL.find_leased_job, job=job_id)
    return job_from_row(row) if row is not None else None


async def newest_job_id(runner: Runner) -> int:
    """The greatest id given so far."""
    return int(await runner.value(SQL.newest_job))


async def why_waiting(runner: Runner, queue: str, lane: str | None) -> Row | None:
    """Fields that bear on a waiting job; None where the queue is gone."""
    return await runner.one(SQL.why_waiting, queue=queue, lane=lane)


async def ended_jobs(
    runner: Runner, *, queue: str | None, state: str | None, before: int | None, jobs_max: int
) -> list[Job]:
    """Ended jobs, newest id first."""
    rows = await runner.all(
        SQL.ended_jobs, queue=queue, state=state, before=before, jobs_max=jobs_max
    )
    return [job_from_row(row) for row in rows]


async def drop_failed(runner: Runner, *, kept_s: float, jobs_max: int) -> int:
    """Forget ended jobs that were kept long enough; how many."""
    return await runner.run(SQL.drop_failed, kept_s=kept_s, jobs_max=jobs_max)


def job_from_row(row: Row) -> Job:
    """A job out of a row of `find_job` or its kin."""
    return Job(
        id=row["id"],
        state=JobState(row["state"]),
        queue=row["queue"],
        priority=row["priority"],
        run_at=row["run_at"],
        attempt=row["attempt"],
        losses=row["losses"],
        lane=row["lane"],
        unique=row["unique_key"],
        group_id=row["group_id"],
        host=row["host"],
        lease_id=row["lease_id"],
        ended_at=row["ended_at"],
        error=row["error"],
        traceback=row["traceback"],
        payload=msgspec.json.decode(row["payload"]),
    )
