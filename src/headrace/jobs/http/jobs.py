"""Routes of jobs: enqueue, lists, single jobs, bulk actions and takes."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from litestar import Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.jobs.errors import InvalidFilter, InvalidTake, JobUnknown, LeaseLost
from headrace.jobs.model import (
    JOBS_PER_CALL_MAX,
    BulkCounts,
    Job,
    JobFilter,
    JobToAdd,
    NewJob,
    Taken,
    TakenOutcome,
    Why,
)
from headrace.jobs.service import Jobs
from headrace.jobs.validation import is_row_id, too_many_jobs
from headrace.kernel.config import moment_of, parse_as, parse_duration_s
from headrace.kernel.routes import PAGE_ROWS_MAX, Idempotency, ItemsMax
from headrace.kernel.signing import Key, read_cursor, sign_cursor

READ: Final = {"scope": "jobs:read"}
WRITE: Final = {"scope": "jobs:write"}


def parse_job_id(text: str) -> int:
    """Parse a job id in a path: digits only. Raises: JobUnknown."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None:
        raise JobUnknown(text)
    return int(text)


def parse_lease_id(text: str) -> int:
    """Parse a lease id in a path. Raises: LeaseLost."""
    if re.fullmatch(r"[0-9]{1,19}", text) is None:
        raise LeaseLost(text)
    return int(text)


LISTING: Final = "jobs"


class JobsListed(msgspec.Struct, frozen=True, kw_only=True):
    """A page of jobs without payloads and tracebacks. No `next_cursor`: it is the last page."""

    jobs: list[Job]
    next_cursor: str | None


class JobAdded(msgspec.Struct, frozen=True, kw_only=True):
    """The id of the job that was enqueued, which is also that of its workflow."""

    id: int


class JobsAdded(msgspec.Struct, frozen=True, kw_only=True):
    """Ids in the order of the jobs sent."""

    ids: list[int]


@post(
    "/v1/queues/{queue:str}/jobs",
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
        await jobs.queues.get(queue)

    async def enqueue(tx: Any) -> JobsAdded:
        return JobsAdded(ids=await jobs.enqueue_many(new, tx=tx))

    return await idempotency.run(enqueue)


@get("/v1/jobs/{job_id:str}", opt=READ)
async def get_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> Job:
    """Show a job in any state; `gone` if it ended and was not kept."""
    return await jobs.job(parse_job_id(job_id))


@get("/v1/jobs/{job_id:str}/why", opt=READ)
async def why_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> Why:
    """Explain why a job is in its state."""
    return await jobs.why(parse_job_id(job_id))


@get("/v1/jobs", opt=READ)
async def list_jobs(
    *,
    jobs: NamedDependency[Jobs],
    cursor_key: NamedDependency[Key],
    request: Request[Any, Any, Any],
    queue: FromQuery[str | None] = None,
    in_state: Annotated[str | None, QueryParameter(name="state")] = None,
    lane: FromQuery[str | None] = None,
    q: FromQuery[str | None] = None,
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> Response[JobsListed]:
    """List jobs by queue, state and lane, newest first; `q` searches the errors of ended jobs.

    `from` and `to` bound the time of the end; of unfinished jobs, when they are due.
    Continue with `next_cursor` even after a short page: expensive searches are cut off.
    """
    times = {"from": from_at, "to": to_at}
    criteria = {"queue": queue, "state": in_state, "lane": lane, "q": q, **times}
    before = None if cursor is None else read_cursor(cursor_key, LISTING, criteria, cursor)
    page = await jobs.find(
        queue=queue,
        state=in_state,
        lane=lane,
        q=q,
        from_at=moment_of("from", from_at, InvalidFilter),
        to_at=moment_of("to", to_at, InvalidFilter),
        cursor=before,
        jobs_max=limit,
    )
    if page.next_cursor is None:
        return Response(JobsListed(jobs=page.jobs, next_cursor=None))
    following = sign_cursor(cursor_key, LISTING, criteria, page.next_cursor)
    given = {name: value for name, value in criteria.items() if value is not None}
    query = urlencode({**given, "limit": limit, "cursor": following})
    return Response(
        JobsListed(jobs=page.jobs, next_cursor=following),
        headers={"link": f'<{request.url.path}?{query}>; rel="next"'},
    )


@delete("/v1/jobs/{job_id:str}", opt=WRITE)
async def cancel_job(
    jobs: NamedDependency[Jobs],
    job_id: FromPath[str],
    *,
    keep: FromQuery[bool] = True,
    running: FromQuery[bool] = False,
) -> None:
    """Cancel a waiting job, with `running=true` request the end of a running one.

    With `keep=false` delete a waiting or ended one.
    """
    if keep:
        await jobs.cancel(parse_job_id(job_id), running=running)
    else:
        await jobs.delete(parse_job_id(job_id))


class JobEdited(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a waiting job; what is left out stays."""

    payload: Any = msgspec.UNSET
    priority: int | None = None
    at: datetime | None = None
    after_s: float | None = None


@patch("/v1/jobs/{job_id:str}", status_code=204, opt=WRITE)
async def edit_job(
    jobs: NamedDependency[Jobs], job_id: FromPath[str], data: JSONBody[JobEdited]
) -> None:
    """Change payload, priority or due time of a waiting job."""
    await jobs.edit(parse_job_id(job_id), **msgspec.structs.asdict(data))


@post("/v1/jobs/{job_id:str}/retry", status_code=204, opt=WRITE)
async def retry_job(jobs: NamedDependency[Jobs], job_id: FromPath[str]) -> None:
    """Make a failed, cancelled or quarantined job ready again."""
    await jobs.retry(parse_job_id(job_id))


BULK_LISTING: Final = "jobs.bulk"


class BulkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`retry`, `cancel` or `delete` matching jobs; `dry_run` only counts them."""

    action: str
    filter: JobFilter
    dry_run: bool = False
    cursor: str | None = None
    """The `next_cursor` of the previous response."""


class BulkResponse(BulkCounts, frozen=True, kw_only=True):
    """The result of a step. If `more`, send the request again with `cursor` = `next_cursor`."""

    next_cursor: str | None


@post("/v1/jobs/bulk", status_code=200, opt=WRITE)
async def bulk_jobs(
    jobs: NamedDependency[Jobs], cursor_key: NamedDependency[Key], data: JSONBody[BulkRequest]
) -> BulkResponse:
    """Apply one bounded step of an action to matching jobs, newest first."""
    query = {
        "action": data.action,
        "dry_run": data.dry_run,
        **msgspec.structs.asdict(data.filter),
    }
    before = None
    if data.cursor is not None:
        before = read_cursor(cursor_key, BULK_LISTING, query, data.cursor)
    done = await jobs.bulk(data.action, data.filter, dry_run=data.dry_run, cursor=before)
    counts = msgspec.structs.asdict(done)
    before, following = counts.pop("next_cursor"), None
    if before is not None:
        following = sign_cursor(cursor_key, BULK_LISTING, query, before)
    return BulkResponse(next_cursor=following, **counts)


class Acked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcomes of jobs by id. `rest` applies to jobs not named; without it they stay leased."""

    outcomes: dict[int, TakenOutcome] = {}
    rest: TakenOutcome | None = None


class Extended(msgspec.Struct, frozen=True, kw_only=True):
    """The new end of the lease."""

    lease_id: int
    expires_at: datetime


@post("/v1/queues/{queue:str}/take", status_code=200, opt=WRITE)
async def take_jobs(
    jobs: NamedDependency[Jobs],
    queue: FromPath[str],
    *,
    n: FromQuery[int] = 1,
    lease: FromQuery[str] = "5m",
    wait: FromQuery[str] = "0s",
) -> Taken:
    """Take up to `n` due jobs for `lease`; wait up to `wait`, at most 30 s, for the first."""
    lease_s = parse_as(parse_duration_s, "lease", lease, InvalidTake)
    wait_s = parse_as(parse_duration_s, "wait", wait, InvalidTake)
    return await jobs.takes.take(queue, n, lease_s=lease_s, wait_s=wait_s)


@post("/v1/leases/{lease_id:str}/ack", status_code=204, opt={**WRITE, "large_body": True})
async def ack_lease(
    jobs: NamedDependency[Jobs], lease_id: FromPath[str], data: JSONBody[Acked]
) -> None:
    """Record outcomes of jobs of a lease. Safe to repeat until the lease has no other jobs.

    Another outcome for a settled job is refused.
    """
    number = parse_lease_id(lease_id)
    if not is_row_id(number):
        raise LeaseLost(lease_id)
    if not data.outcomes and data.rest is None:
        raise InvalidTake(
            'no outcome is given: send `outcomes` by id, or `rest` such as {"outcome": "done"}'
        )
    await jobs.takes.ack(number, data.outcomes, rest=data.rest)


@post("/v1/leases/{lease_id:str}/extend", status_code=200, opt=WRITE)
async def extend_lease(
    jobs: NamedDependency[Jobs], lease_id: FromPath[str], lease: FromQuery[str] = "5m"
) -> Extended:
    """Extend a lease to `lease` from now."""
    number = parse_lease_id(lease_id)
    expires_at = await jobs.takes.extend(
        number, parse_as(parse_duration_s, "lease", lease, InvalidTake)
    )
    return Extended(lease_id=number, expires_at=expires_at)
