"""Routes of limiters and their lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.jobs.http.scopes import READ, WRITE
from headrace.jobs.model import Lane, Limiter
from headrace.jobs.service import Jobs
from headrace.jobs.service.lanes import SLACK_S
from headrace.kernel.routes import PAGE_ROWS_MAX


class LaneLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limits of a lane; what is left out is without limit."""

    starts_max: int | None = None
    window_s: float | None = None
    concurrency: int | None = None
    paused: bool = False
    weight: int = 1


class LimiterLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limits of a limiter; what is left out is without limit."""

    starts_max: int | None = None
    window_s: float | None = None
    concurrency: int | None = None
    slack_s: float = SLACK_S


class StartsToSpend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Starts to take out of a lane for what is no job."""

    starts: int = 1
    wait_max_s: float = 0.0


class StartsSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the call until they may begin; null: refused, nothing was taken."""

    wait_s: float | None


@get("/v1/limiters", operation_id="listLimiters", summary="List limiters", opt=READ)
async def list_limiters(jobs: NamedDependency[Jobs]) -> Sequence[Limiter]:
    """List every limiter with its limits and the queues that it spans, by name."""
    return await jobs.lanes.limiters()


@get("/v1/limiters/{limiter:str}", operation_id="getLimiter", summary="Show a limiter", opt=READ)
async def get_limiter(jobs: NamedDependency[Jobs], limiter: FromPath[str]) -> Limiter:
    """Show the limits of the lanes of a limiter that have none of their own."""
    return await jobs.lanes.get_limiter(limiter)


@put(
    "/v1/limiters/{limiter:str}",
    operation_id="setLimiter",
    summary="Set a limiter's limits",
    opt=WRITE,
)
async def put_limiter(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], data: JSONBody[LimiterLimits]
) -> Limiter:
    """Set all limits of the lanes that have none of their own, live; what code declares no longer counts."""
    await jobs.lanes.set_limiter(limiter, **msgspec.structs.asdict(data))
    return await jobs.lanes.get_limiter(limiter)


@delete(
    "/v1/limiters/{limiter:str}",
    operation_id="resetLimiter",
    summary="Give a limiter back to its code",
    opt=WRITE,
)
async def reset_limiter(jobs: NamedDependency[Jobs], limiter: FromPath[str]) -> None:
    """Forget the limits that were set; those that code declares hold again, or none."""
    await jobs.lanes.reset_limiter(limiter)


@get(
    "/v1/limiters/{limiter:str}/lanes",
    operation_id="listLanes",
    summary="List lanes of a limiter",
    opt=READ,
)
async def list_lanes(
    jobs: NamedDependency[Jobs],
    limiter: FromPath[str],
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> Sequence[Lane]:
    """List lanes by name; the next page is `after` the last name."""
    return await jobs.lanes.list(limiter, after=after, lanes_max=limit)


@get(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}",
    operation_id="getLane",
    summary="Show a lane",
    opt=READ,
)
async def get_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> Lane:
    """Show a lane's limits and what it is doing."""
    return await jobs.lanes.get(limiter, lane)


@put(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}",
    operation_id="setLane",
    summary="Set a lane's limits",
    opt=WRITE,
)
async def put_lane(
    jobs: NamedDependency[Jobs],
    limiter: FromPath[str],
    lane: FromPath[str],
    data: JSONBody[LaneLimits],
    *,
    create: FromQuery[bool] = False,
) -> Lane:
    """Set all limits of a lane, live; what is left out is without limit. `create`: of a limiter nobody knows yet."""
    await jobs.lanes.set(limiter, lane, create=create, **msgspec.structs.asdict(data))
    return await jobs.lanes.get(limiter, lane)


@delete(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}",
    operation_id="resetLane",
    summary="Let a lane follow its limiter",
    opt=WRITE,
)
async def reset_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> None:
    """Forget a lane's own limits, pause and weight; its limiter's limits count again."""
    await jobs.lanes.reset(limiter, lane)


@post(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}/pause",
    operation_id="pauseLane",
    summary="Pause a lane",
    status_code=200,
    opt=WRITE,
)
async def pause_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> Lane:
    """Hand out no more jobs of a lane, whose limits and weight stay; those in hand go on."""
    await jobs.lanes.pause(limiter, lane)
    return await jobs.lanes.get(limiter, lane)


@post(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}/resume",
    operation_id="resumeLane",
    summary="Let a lane go on",
    status_code=200,
    opt=WRITE,
)
async def resume_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> Lane:
    """Hand out the jobs of a lane again, within the limits that it has."""
    await jobs.lanes.resume(limiter, lane)
    return await jobs.lanes.get(limiter, lane)


@post(
    "/v1/limiters/{limiter:str}/lanes/{lane:str}/spend",
    operation_id="spendLane",
    summary="Take starts out of a lane",
    status_code=200,
    opt=WRITE,
)
async def spend_lane(
    jobs: NamedDependency[Jobs],
    limiter: FromPath[str],
    lane: FromPath[str],
    data: JSONBody[StartsToSpend],
) -> StartsSpent:
    """Take starts out of a lane for what is no job, now or within `wait_max_s`."""
    wait_s = await jobs.lanes.spend(limiter, lane, data.starts, wait_max_s=data.wait_max_s)
    return StartsSpent(wait_s=wait_s)


ROUTES: Final[list[Any]] = [
    list_limiters,
    get_limiter,
    put_limiter,
    reset_limiter,
    list_lanes,
    get_lane,
    put_lane,
    reset_lane,
    pause_lane,
    resume_lane,
    spend_lane,
]
