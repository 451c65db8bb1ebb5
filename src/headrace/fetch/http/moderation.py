"""Routes for moderators: held items, and photos that look alike."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.fetch.duplicates import NearDuplicate
from headrace.fetch.http.requests import READ, WRITE
from headrace.fetch.publish_check import HeldItem
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX


class HeldAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of held items; continue with `after_customer` and `after_item` of the last one."""

    items: list[HeldItem]


class DuplicatesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of pairs, newest first; continue with `cursor` = `next_cursor`, null at the end."""

    duplicates: list[NearDuplicate]
    next_cursor: str | None


@get("/v1/fetch/held", opt=READ)
async def list_held_fetch_items(
    fetch: NamedDependency[Fetch],
    customer: FromQuery[str | None] = None,
    *,
    after_customer: FromQuery[str] = "",
    after_item: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> HeldAnswer:
    """Items that a `before_publish` handler holds back, with the reasons."""
    after = (after_customer, after_item)
    return HeldAnswer(items=await fetch.held.list(customer, after=after, rows_max=limit))


@post("/v1/fetch/customers/{customer:str}/held/release", opt=WRITE, status_code=200)
async def release_held_fetch_item(
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    item: Annotated[str, QueryParameter(name="id", max_length=400)],
) -> None:
    """Publish a held item as it is."""
    await fetch.held.release(customer, item)


@get("/v1/fetch/duplicates", opt=READ)
async def list_fetch_duplicates(
    fetch: NamedDependency[Fetch],
    customer: FromQuery[str | None] = None,
    *,
    across: FromQuery[bool | None] = None,
    reviewed: FromQuery[bool] = False,
    cursor: Annotated[int | None, QueryParameter(ge=1)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> DuplicatesAnswer:
    """Pairs of photos that look alike: `distance` of their hashes' 64 bits differ, at most 7.

    `across`: only pairs of two customers (true) or of one (false). `reviewed`: the pairs that a
    moderator has marked, instead of the others.
    """
    found = await fetch.duplicates.list(
        customer, across=across, reviewed=reviewed, cursor=cursor, rows_max=limit
    )
    following = str(found[-1].id) if len(found) == limit else None
    return DuplicatesAnswer(duplicates=found, next_cursor=following)


@post("/v1/fetch/duplicates/{pair:int}/review", opt=WRITE, status_code=200)
async def review_fetch_duplicate(fetch: NamedDependency[Fetch], pair: FromPath[int]) -> None:
    """Mark a pair as reviewed; both photos stay as they are."""
    await fetch.duplicates.review(pair)
