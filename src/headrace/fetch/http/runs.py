"""Routes of runs."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.fetch.http.scopes import READ, WRITE
from headrace.fetch.model import Change, Run
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX


class RunsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Runs, newest first."""

    runs: list[Run]


class ChangesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of changes; ask on with `after` set to `next_after`, which is null at the end."""

    changes: list[Change]
    next_after: str | None


@get("/v1/fetch/runs", operation_id="listFetchRuns", summary="List runs", opt=READ)
async def list_runs(
    fetch: NamedDependency[Fetch],
    customer: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 50,
) -> RunsAnswer:
    """The newest runs, of one customer or of all."""
    return RunsAnswer(runs=await fetch.runs(customer, runs_max=limit))


@get(
    "/v1/fetch/runs/{run:int}/changes",
    operation_id="listFetchRunChanges",
    summary="List what a run changes, or would",
    opt=READ,
)
async def list_changes(
    fetch: NamedDependency[Fetch],
    run: FromPath[int],
    *,
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> ChangesAnswer:
    """New, changed and gone items in the order of their ids, changed ones with the fields that differ."""
    found = await fetch.changes(run, after=after, rows_max=limit)
    return ChangesAnswer(changes=found, next_after=found[-1].item if len(found) == limit else None)


@get(
    "/v1/fetch/runs/{run:int}",
    operation_id="getFetchRun",
    summary="Show how far a run is",
    opt=READ,
)
async def get_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Counts of rows, items and photos by outcome."""
    return await fetch.run(run)


@post(
    "/v1/fetch/runs/{run:int}/confirm",
    operation_id="confirmFetchRun",
    summary="Apply a held run",
    opt=WRITE,
    status_code=202,
)
async def confirm_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Apply a run that was held because its file looks like an accident."""
    return await fetch.confirm_run(run)


@post(
    "/v1/fetch/runs/{run:int}/discard",
    operation_id="discardFetchRun",
    summary="Do not apply a held run",
    opt=WRITE,
    status_code=200,
)
async def discard_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """End a held run for good; nothing of it is applied, and the next catalogue is compared as ever."""
    return await fetch.discard_run(run)


@post(
    "/v1/fetch/runs/{run:int}/undo",
    operation_id="undoFetchRun",
    summary="Undo an applied run",
    opt=WRITE,
    status_code=202,
)
async def undo_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Put the items back to their state before a catalogue; the answer is the run that does so.

    Added items are unpublished, changed and removed ones are published as they were, as new versions. Items
    sent by themselves since stay as they were sent.
    """
    return await fetch.undo_run(run)


ROUTES: Final[list[Any]] = [list_runs, get_run, list_changes, confirm_run, discard_run, undo_run]
