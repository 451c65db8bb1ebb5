"""Routes of queues, limiters and lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import UNSET, UnsetType

from headrace.jobs.http.jobs import READ, WRITE
from headrace.jobs.model import Lane, Limiter, QueueStatus
from headrace.jobs.service import Jobs
from headrace.jobs.service.lanes import SLACK_S
from headrace.kernel.routes import PAGE_ROWS_MAX


class QueueChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a queue. Fields left out stay; null restores what its code declares."""

    paused: bool | UnsetType = UNSET
    importance: int | UnsetType | None = UNSET
    slots_min: int | UnsetType | None = UNSET
    slots_max: int | UnsetType | None = UNSET
    retries: int | UnsetType | None = UNSET
    decisions: dict[str, str | None] | UnsetType | None = UNSET
    """Target queue, or null, by decision."""


@get("/v1/queues", opt=READ)
async def list_queues(jobs: NamedDependency[Jobs]) -> list[QueueStatus]:
    """List every queue with its backlog."""
    return await jobs.queues.all()


@get("/v1/queues/{queue:str}", opt=READ)
async def get_queue(jobs: NamedDependency[Jobs], queue: FromPath[str]) -> QueueStatus:
    """Show a queue with its backlog."""
    return await jobs.queues.get(queue)


@put("/v1/queues/{queue:str}", opt=WRITE)
async def set_queue(
    jobs: NamedDependency[Jobs],
    queue: FromPath[str],
    data: JSONBody[QueueChange],
    create: FromQuery[bool] = False,  # noqa: FBT002 - a query parameter
) -> QueueStatus:
    """Pause or resume a queue and override its settings; `create` makes one without code."""
    given = msgspec.structs.asdict(data)
    changes = {name: value for name, value in given.items() if value is not UNSET}
    await jobs.queues.set(queue, create=create, **changes)
    return await jobs.queues.get(queue)


@delete("/v1/queues/{queue:str}", opt=WRITE)
async def remove_queue(jobs: NamedDependency[Jobs], queue: FromPath[str]) -> None:
    """Remove an empty queue that no code runs, such as one created by a typing error."""
    await jobs.queues.remove(queue)


class LaneLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limits of a lane; what is left out is unlimited."""

    starts_max: int | None = None
    window_s: float | None = None
    concurrency: int | None = None
    paused: bool = False
    weight: int = 1


class LimiterLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limits of a limiter; what is left out is unlimited."""

    starts_max: int | None = None
    window_s: float | None = None
    concurrency: int | None = None
    slack_s: float = SLACK_S


class StartsToSpend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Starts of a lane to consume for other work than jobs."""

    starts: int = 1
    wait_max_s: float = 0.0


class StartsSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the call until they may begin; null: refused, nothing was consumed."""

    wait_s: float | None


@get("/v1/limiters", opt=READ)
async def list_limiters(jobs: NamedDependency[Jobs]) -> Sequence[Limiter]:
    """List every limiter with its limits and queues, by name."""
    return await jobs.lanes.limiters()


@get("/v1/limiters/{limiter:str}", opt=READ)
async def get_limiter(jobs: NamedDependency[Jobs], limiter: FromPath[str]) -> Limiter:
    """Show a limiter: the limits of its lanes without limits of their own."""
    return await jobs.lanes.get_limiter(limiter)


@put("/v1/limiters/{limiter:str}", opt=WRITE)
async def set_limiter(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], data: JSONBody[LimiterLimits]
) -> Limiter:
    """Override the limits of a limiter, and so of its lanes without limits of their own."""
    await jobs.lanes.set_limiter(limiter, **msgspec.structs.asdict(data))
    return await jobs.lanes.get_limiter(limiter)


@post("/v1/limiters/{limiter:str}/reset", status_code=204, opt=WRITE)
async def reset_limiter(jobs: NamedDependency[Jobs], limiter: FromPath[str]) -> None:
    """Remove the override of a limiter; declared limits hold again."""
    await jobs.lanes.reset_limiter(limiter)


@delete("/v1/limiters/{limiter:str}", opt=WRITE)
async def remove_limiter(jobs: NamedDependency[Jobs], limiter: FromPath[str]) -> None:
    """Remove a limiter, with its lanes, that has no queue, no job and no declaration by code."""
    await jobs.lanes.remove_limiter(limiter)


@get("/v1/limiters/{limiter:str}/lanes", opt=READ)
async def list_lanes(
    jobs: NamedDependency[Jobs],
    limiter: FromPath[str],
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> Sequence[Lane]:
    """List lanes by name; the next page is `after` the last name."""
    return await jobs.lanes.list(limiter, after=after, lanes_max=limit)


@get("/v1/limiters/{limiter:str}/lanes/{lane:str}", opt=READ)
async def get_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> Lane:
    """Show a lane's limits and current counts."""
    return await jobs.lanes.get(limiter, lane)


@put("/v1/limiters/{limiter:str}/lanes/{lane:str}", opt=WRITE)
async def set_lane(
    jobs: NamedDependency[Jobs],
    limiter: FromPath[str],
    lane: FromPath[str],
    data: JSONBody[LaneLimits],
    *,
    create: FromQuery[bool] = False,
) -> Lane:
    """Set all limits of a lane; what is left out is unlimited. `create`: allow a new limiter."""
    await jobs.lanes.set(limiter, lane, create=create, **msgspec.structs.asdict(data))
    return await jobs.lanes.get(limiter, lane)


@delete("/v1/limiters/{limiter:str}/lanes/{lane:str}", opt=WRITE)
async def reset_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> None:
    """Remove a lane's own limits, pause and weight; it follows its limiter again."""
    await jobs.lanes.reset(limiter, lane)


@post("/v1/limiters/{limiter:str}/lanes/{lane:str}/pause", status_code=200, opt=WRITE)
async def pause_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> Lane:
    """Start no more jobs of a lane; running jobs continue, limits and weight stay."""
    await jobs.lanes.pause(limiter, lane)
    return await jobs.lanes.get(limiter, lane)


@post("/v1/limiters/{limiter:str}/lanes/{lane:str}/resume", status_code=200, opt=WRITE)
async def resume_lane(
    jobs: NamedDependency[Jobs], limiter: FromPath[str], lane: FromPath[str]
) -> Lane:
    """Start jobs of a lane again, within its limits."""
    await jobs.lanes.resume(limiter, lane)
    return await jobs.lanes.get(limiter, lane)


@post("/v1/limiters/{limiter:str}/lanes/{lane:str}/spend", status_code=200, opt=WRITE)
async def spend_lane(
    jobs: NamedDependency[Jobs],
    limiter: FromPath[str],
    lane: FromPath[str],
    data: JSONBody[StartsToSpend],
) -> StartsSpent:
    """Use up starts of a lane's rate for other work than jobs, now or within `wait_max_s`."""
    wait_s = await jobs.lanes.spend(limiter, lane, data.starts, wait_max_s=data.wait_max_s)
    return StartsSpent(wait_s=wait_s)
