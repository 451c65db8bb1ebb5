"""Routes of results, for those who poll."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from headrace.fetch.http.scopes import READ
from headrace.fetch.model import Result
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX


class ResultsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of results; keep `next_after` and ask again with it."""

    results: list[Result]
    next_after: int


@get(
    "/v1/fetch/results",
    operation_id="listFetchResults",
    summary="List results in the order of their commits",
    opt=READ,
)
async def list_results(
    fetch: NamedDependency[Fetch],
    after: Annotated[int, QueryParameter(ge=0)] = 0,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    customer: FromQuery[str | None] = None,
) -> ResultsAnswer:
    """What to publish, edit and unpublish; nothing is missed by asking on from `next_after`."""
    found = await fetch.results(after=after, results_max=limit, customer=customer)
    return ResultsAnswer(results=found, next_after=found[-1].seq if found else after)


class NewestResultsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of results, newest first; ask on with `before` set to `next_before`, which is null at the end."""

    results: list[Result]
    next_before: int | None


@get(
    "/v1/fetch/results/newest",
    operation_id="listNewestFetchResults",
    summary="List the newest results",
    opt=READ,
)
async def list_newest_results(
    fetch: NamedDependency[Fetch],
    before: Annotated[int | None, QueryParameter(ge=1)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    customer: FromQuery[str | None] = None,
) -> NewestResultsAnswer:
    """What was published last, for people who look; whoever polls asks for results in the order of their commits."""
    found = await fetch.newest_results(before=before, results_max=limit, customer=customer)
    following = found[-1].seq if len(found) == limit else None
    return NewestResultsAnswer(results=found, next_before=following)


ROUTES: Final[list[Any]] = [list_results, list_newest_results]
