"""Routes of jobs: queues and their jobs, jobs by id, lanes of limiters. Parse, call one verb, answer."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from penstock.jobs.errors import JobUnknown
from penstock.jobs.model import Job, Lane, NewJob, QueueStatus, Why
from penstock.jobs.service import Jobs

_READ: Final = {"scope": "jobs:read"}
_WRITE: Final = {"scope": "jobs:write"}


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


class QueueChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be changed of a queue."""

    paused: bool


class LaneLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limits of a lane; what is left out is without limit."""

    starts_max: int | None = None
    window_s: float | None = None
    concurrency: int | None = None
    paused: bool = False
    weight: int = 1


@post(
    "/v1/queues/{queue:str}/jobs",
    operation_id="enqueueJobs",
    summary="Enqueue one job or many",
    status_code=202,
    opt=_WRITE,
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


@get("/v1/jobs/{job_id:str}", operation_id="getJob", summary="Show a job", opt=_READ)
async def get_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> Job:
    """Show a job in whatever state; `gone` if it ended and was not kept."""
    return await jobs.job(_job_id(job_id))


@get(
    "/v1/jobs/{job_id:str}/why",
    operation_id="whyJob",
    summary="Say why a job is where it is",
    opt=_READ,
)
async def why_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> Why:
    """Say why a job is where it is."""
    return await jobs.why(_job_id(job_id))


@delete(
    "/v1/jobs/{job_id:str}", operation_id="cancelJob", summary="Cancel a waiting job", opt=_WRITE
)
async def cancel_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> None:
    """Cancel a job that is scheduled or ready."""
    await jobs.cancel(_job_id(job_id))


@get("/v1/queues", operation_id="listQueues", summary="List the queues", opt=_READ)
async def list_queues(jobs: NamedDependency[Jobs]) -> list[QueueStatus]:
    """List every queue with its backlog."""
    return await jobs.queues()


@get("/v1/queues/{queue:str}", operation_id="getQueue", summary="Show a queue", opt=_READ)
async def get_queue(jobs: NamedDependency[Jobs], queue: FromPath[str]) -> QueueStatus:
    """Show a queue with its backlog."""
    return await jobs.queue(queue)


@put("/v1/queues/{queue:str}", operation_id="setQueue", summary="Pause or resume", opt=_WRITE)
async def set_queue(
    jobs: NamedDependency[Jobs], queue: FromPath[str], data: JSONBody[QueueChange]
) -> QueueStatus:
    """Pause or resume a queue; jobs in hand go on."""
    if data.paused:
        await jobs.pause_queue(queue)
    else:
        await jobs.resume_queue(queue)
    return await jobs.queue(queue)


@get(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}",
    operation_id="getLane",
    summary="Show a lane",
    opt=_READ,
)
async def get_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> Lane:
    """Show a lane's limits and what it is doing."""
    return await jobs.get_lane(limiter, lane)


@put(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}",
    operation_id="setLane",
    summary="Set a lane's limits",
    opt=_WRITE,
)
async def put_lane(
    jobs: NamedDependency[Jobs],
    limiter: FromPath[str],
    lane: FromPath[str],
    data: JSONBody[LaneLimits],
) -> Lane:
    """Set all limits of a lane, live; what is left out is without limit."""
    await jobs.set_lane(limiter, lane, **msgspec.structs.asdict(data))
    return await jobs.get_lane(limiter, lane)


def _job_id(text: str) -> int:
    """An id as it is written in paths: digits alone, not all that `int` takes. Raises: JobUnknown."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None:
        raise JobUnknown(text)
    return int(text)


ROUTES: Final[list[Any]] = [
    enqueue_jobs,
    get_job,
    why_job,
    cancel_job,
    list_queues,
    get_queue,
    set_queue,
    get_lane,
    put_lane,
]
