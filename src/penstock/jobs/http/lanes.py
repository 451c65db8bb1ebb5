"""Routes of limiters and their lanes."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from penstock.jobs.http.scopes import READ, WRITE
from penstock.jobs.model import Lane
from penstock.jobs.service import Jobs


class LaneLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All limits of a lane; what is left out is without limit."""

    starts_max: int | None = None
    window_s: float | None = None
    concurrency: int | None = None
    paused: bool = False
    weight: int = 1


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
    return await jobs.get_lane(limiter, lane)


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
) -> Lane:
    """Set all limits of a lane, live; what is left out is without limit."""
    await jobs.set_lane(limiter, lane, **msgspec.structs.asdict(data))
    return await jobs.get_lane(limiter, lane)


ROUTES: Final[list[Any]] = [get_lane, put_lane]
