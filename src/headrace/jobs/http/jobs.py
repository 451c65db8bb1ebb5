"""Routes of jobs: enqueue, look, list, cancel, retry."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.jobs.http.scopes import READ, WRITE, parse_job_id
from headrace.jobs.intake import too_many_jobs
from headrace.jobs.model import JOBS_PER_CALL_MAX, Job, NewJob, Why
from headrace.jobs.service import Jobs
from headrace.kernel.routes import PAGE_ROWS_MAX, Idempotency, ItemsMax
from headrace.kernel.signing import Key, read_cursor, sign_cursor

LISTING: Final = "jobs"


class JobToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to enqueue: `at` is a moment with time zone, `after_s` a delay; priority 0 first to 9."""

    payload: Any = None
    at: datetime | None = None
    after_s: float | None = None
    priority: int = 5
    unique: str | None = None
    lane: str | None = None
    spread_s: float | None = None
    version: int = 1


class JobsListed(msgspec.Struct, frozen=True, kw_only=True):
    """A page of jobs without payloads and tracebacks; no `next_cursor`: that was all."""

    jobs: list[Job]
    next_cursor: str | None


class JobsAdded(msgspec.Struct, frozen=True, kw_only=True):
    """Ids in the order of the jobs sent."""

    ids: list[int]


@post(
    "/v1/queues/{queue:str}/jobs",
    operation_id="enqueueJobs",
    summary="Enqueue one job or many",
    status_code=202,
    opt={**WRITE, "idempotent": True, "items_max": ItemsMax(JOBS_PER_CALL_MAX, too_many_jobs)},
)
async def enqueue_jobs(
    jobs: NamedDependency[Jobs],
    idempotency: NamedDependency[Idempotency],
    queue: FromPath[str],
    data: JSONBody[JobToAdd | list[JobToAdd]],
) -> JobsAdded:
    """Enqueue one job or a list of up to 10,000, all or none."""
    given = data if isinstance(data, list) else [data]
    new = [NewJob(queue=queue, **msgspec.structs.asdict(job)) for job in given]
    if not new:
        await jobs.queue(queue)

    async def enqueue(tx: Any) -> JobsAdded:
        return JobsAdded(ids=await jobs.enqueue_many(new, tx=tx))

    return await idempotency.run(enqueue)


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


@get("/v1/jobs", operation_id="listJobs", summary="List jobs", opt=READ)
async def list_jobs(
    *,
    jobs: NamedDependency[Jobs],
    cursor_key: NamedDependency[Key],
    request: Request[Any, Any, Any],
    queue: FromQuery[str | None] = None,
    in_state: Annotated[str | None, QueryParameter(name="state")] = None,
    lane: FromQuery[str | None] = None,
    q: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> Response[JobsListed]:
    """List jobs of a queue, state and lane, newest id first; `q` is looked for in errors of ended jobs.

    Go on with `next_cursor`, also where a page is short: a search that costs too much is cut off.
    """
    asked = {"queue": queue, "state": in_state, "lane": lane, "q": q}
    before = None if cursor is None else read_cursor(cursor_key, LISTING, asked, cursor)
    page = await jobs.find(**asked, before=before, jobs_max=limit)
    if page.next_before is None:
        return Response(JobsListed(jobs=page.jobs, next_cursor=None))
    following = sign_cursor(cursor_key, LISTING, asked, page.next_before)
    told = {name: value for name, value in asked.items() if value is not None}
    query = urlencode({**told, "limit": limit, "cursor": following})
    return Response(
        JobsListed(jobs=page.jobs, next_cursor=following),
        headers={"link": f'<{request.url.path}?{query}>; rel="next"'},
    )


@delete(
    "/v1/jobs/{job_id:str}", operation_id="cancelJob", summary="Cancel a waiting job", opt=WRITE
)
async def cancel_job(
    jobs: NamedDependency[Jobs], job_id: FromPath[str], *, keep: FromQuery[bool] = True
) -> None:
    """Cancel a job that is scheduled or ready; with `keep=false` remove it for good, also one that ended."""
    if keep:
        await jobs.cancel(parse_job_id(job_id))
    else:
        await jobs.delete(parse_job_id(job_id))


@post(
    "/v1/jobs/{job_id:str}/retry",
    operation_id="retryJob",
    summary="Give a failed job another life",
    status_code=204,
    opt=WRITE,
)
async def retry_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> None:
    """Make a job ready again that ended failed, cancelled or quarantined."""
    await jobs.retry(parse_job_id(job_id))


ROUTES: Final[list[Any]] = [enqueue_jobs, list_jobs, get_job, why_job, cancel_job, retry_job]
