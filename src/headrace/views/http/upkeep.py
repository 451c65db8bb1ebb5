"""Routes that remove, move and check."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.views.http.scopes import READ, WRITE
from headrace.views.model import Deleted, Reclassify, ShardLag, Verified
from headrace.views.service import Views


class ReclassifyJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that moves the views."""

    job: int


@delete(
    "/v1/views/items/{id:str}",
    operation_id="deleteItem",
    summary="Remove all views of an item",
    status_code=200,
    opt=WRITE,
)
async def delete_item(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
) -> Deleted:
    """Remove totals and series of an item; for 30 days nothing is counted for it."""
    return await views.delete(id)


@post(
    "/v1/views/reclassify",
    operation_id="reclassifyViews",
    summary="Move views between classes",
    status_code=202,
    opt=WRITE,
)
async def reclassify(views: NamedDependency[Views], data: JSONBody[Reclassify]) -> ReclassifyJob:
    """Move the views of an item in whole hours from one class to another, as a job. Asked twice, it is done once."""
    job = await views.reclassify(
        data.id, from_at=data.from_at, to_at=data.to_at, source=data.source, target=data.target
    )
    return ReclassifyJob(job=job)


@get("/v1/views/verify", operation_id="verifyViews", summary="Check the totals", opt=READ)
async def verify(views: NamedDependency[Views]) -> Verified:
    """Compare every total with the sum of its hours; `differences` is empty if all is well."""
    return await views.verify()


@get("/v1/views/lag", operation_id="getViewsLag", summary="Show how far the flush is", opt=READ)
async def get_lag(views: NamedDependency[Views]) -> list[ShardLag]:
    """For each shard what is counted and not yet in PostgreSQL."""
    return await views.lag()


ROUTES: Final[list[Any]] = [delete_item, reclassify, verify, get_lag]
