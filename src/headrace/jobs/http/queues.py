"""Routes of queues."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import UNSET, UnsetType

from headrace.jobs.http.scopes import READ, WRITE
from headrace.jobs.model import QueueStatus
from headrace.jobs.service import Jobs


class QueueChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to change of a queue; what is left out stays, null is what its code declares."""

    paused: bool | UnsetType = UNSET
    importance: int | UnsetType | None = UNSET
    slots_min: int | UnsetType | None = UNSET
    slots_max: int | UnsetType | None = UNSET
    retries: int | UnsetType | None = UNSET


@get("/v1/queues", operation_id="listQueues", summary="List the queues", opt=READ)
async def list_queues(jobs: NamedDependency[Jobs]) -> list[QueueStatus]:
    """List every queue with its backlog."""
    return await jobs.queues()


@get("/v1/queues/{queue:str}", operation_id="getQueue", summary="Show a queue", opt=READ)
async def get_queue(jobs: NamedDependency[Jobs], queue: FromPath[str]) -> QueueStatus:
    """Show a queue with its backlog."""
    return await jobs.queue(queue)


@put("/v1/queues/{queue:str}", operation_id="setQueue", summary="Change a queue", opt=WRITE)
async def set_queue(
    jobs: NamedDependency[Jobs],
    queue: FromPath[str],
    data: JSONBody[QueueChange],
    create: FromQuery[bool] = False,  # noqa: FBT002 - a query parameter
) -> QueueStatus:
    """Pause or resume a queue and set what wins over its code; `create`: make one without code if need be."""
    asked = msgspec.structs.asdict(data)
    changes = {name: value for name, value in asked.items() if value is not UNSET}
    await jobs.set_queue(queue, create=create, **changes)
    return await jobs.queue(queue)


ROUTES: Final[list[Any]] = [list_queues, get_queue, set_queue]
