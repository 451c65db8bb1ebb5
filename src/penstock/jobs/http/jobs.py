"""Routes of jobs: enqueue, look, cancel."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from penstock.jobs.http.scopes import READ, WRITE, parse_job_id
from penstock.jobs.model import Job, NewJob, Why
from penstock.jobs.service import Jobs


class JobToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to enqueue: `at` is a moment with time zone, `after_s` a delay; priority 0 first to 9."""

    payload: Any = None
    at: datetime | None = None
    after_s: float | None = None
    priority: int = 5
    unique: str | None = None
    lane: str | None = None


class JobsAdded(msgspec.Struct, frozen=True, kw_only=True):
    """Ids in the order of the jobs sent."""

    ids: list[int]


@post(
    "/v1/queues/{queue:str}/jobs",
    operation_id="enqueueJobs",
    summary="Enqueue one job or many",
    status_code=202,
    opt=WRITE,
)
async def enqueue_jobs(
    jobs: NamedDependency[Jobs], queue: FromPath[str], data: JSONBody[JobToAdd | list[JobToAdd]]
) -> JobsAdded:
    """Enqueue one job or a list of up to 10,000, all or none."""
    given = data if isinstance(data, list) else [data]
    new = [NewJob(queue=queue, **msgspec.structs.asdict(job)) for job in given]
    if not new:
        await jobs.queue(queue)
    return JobsAdded(ids=await jobs.enqueue_many(new))


@get("/v1/jobs/{job_id:str}", operation_id="getJob", summary="Show a job", opt=READ)
async def get_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> Job:
    """Show a job in whatever state; `gone` if it ended and was not kept."""
    return await jobs.job(parse_job_id(job_id))


@get(
    "/v1/jobs/{job_id:str}/why",
    operation_id="whyJob",
    summary="Say why a job is where it is",
    opt=READ,
)
async def why_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> Why:
    """Say why a job is where it is."""
    return await jobs.why(parse_job_id(job_id))


@delete(
    "/v1/jobs/{job_id:str}", operation_id="cancelJob", summary="Cancel a waiting job", opt=WRITE
)
async def cancel_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> None:
    """Cancel a job that is scheduled or ready."""
    await jobs.cancel(parse_job_id(job_id))


ROUTES: Final[list[Any]] = [enqueue_jobs, get_job, why_job, cancel_job]
