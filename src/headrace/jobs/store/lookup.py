"""Jobs by id, in lists, and why they wait; a job is read from wherever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.engines.postgres import Row, Runner
from headrace.jobs.model import Job, JobState
from headrace.jobs.store.sql import SQL


async def find_job(runner: Runner, job_id: int) -> Job | None:
    """The job wherever it is, if it still is."""
    row = await runner.one(SQL.find_job, job=job_id)
    row = row or await runner.one(SQL.find_leased_job, job=job_id)
    return job_from_row(row) if row is not None else None


async def newest_job_id(runner: Runner) -> int:
    """The greatest id given so far."""
    return int(await runner.value(SQL.newest_job))


async def why_waiting(runner: Runner, job_id: int, *, count_max: int) -> Row | None:
    """Fields that bear on a due job; None where it moved on."""
    return await runner.one(SQL.why_waiting, job=job_id, count_max=count_max)


async def retries_of(runner: Runner, queue: str) -> int:
    """How often a failed job of a stored queue runs again."""
    return int(await runner.value(SQL.retries_of, queue=queue))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """Which jobs are looked for. None: whatever it is."""

    states: tuple[str, ...]
    queue_id: int | None = None
    lane: str | None = None
    q: str | None = None
    older_than_s: float | None = None
    ids: tuple[int, ...] | None = None


async def list_jobs(runner: Runner, sought: Sought, **page: int) -> list[Row]:
    """Jobs that fit and lie before id `before`: up to `jobs_max` of each place, out of `window` rows of it.

    A row without a state tells where the search of a place was cut off.
    """
    return await runner.all(SQL.list_jobs, **_asked(sought), **page)


async def list_ids(runner: Runner, sought: Sought, **page: int) -> list[Row]:
    """The same with ids and states alone."""
    return await runner.all(SQL.list_ids, **_asked(sought), **page)


def _asked(sought: Sought) -> dict[str, Any]:
    return {
        "queue": sought.queue_id,
        "states": list(sought.states),
        "lane": sought.lane,
        "q": sought.q,
        "older_than_s": sought.older_than_s,
        "ids": None if sought.ids is None else list(sought.ids),
    }


async def drop_failed(runner: Runner, *, kept_s: float, jobs_max: int) -> int:
    """Forget ended jobs that were kept long enough; how many."""
    return await runner.run(SQL.drop_failed, kept_s=kept_s, jobs_max=jobs_max)


def listed_job(row: Row) -> Job:
    """A job out of a row of `list_jobs`."""
    return _job(row, row["queue_name"])


def job_from_row(row: Row) -> Job:
    """A job out of a row of `find_job` or its kin, with its payload."""
    payload = msgspec.json.decode(row["payload"])
    job = _job(row, row["queue"])
    return msgspec.structs.replace(job, traceback=row["traceback"], payload=payload)


def _job(row: Row, queue: str) -> Job:
    return Job(
        id=row["id"],
        state=JobState(row["state"]),
        queue=queue,
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
    )
