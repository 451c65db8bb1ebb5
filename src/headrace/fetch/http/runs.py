"""Routes of runs, their reports, and the schemas and mappings that rows are validated with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.response import Stream

from headrace.fetch.http.requests import READ, WRITE, texts_for
from headrace.fetch.mappings import Mapping, NamedMapping
from headrace.fetch.model import Change, PhotoProblem, RowProblem, Run
from headrace.fetch.reports import POLICY
from headrace.fetch.schemas import CategorySchema, Schema
from headrace.fetch.service import Fetch
from headrace.kernel.routes import OTHER_TYPES, PAGE_ROWS_MAX

CSV: Final = "text/csv"


class RunsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Runs, newest first."""

    runs: list[Run]


class ChangesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of changes; continue with `after` = `next_after`, which is null at the end."""

    changes: list[Change]
    next_after: str | None


@get("/v1/fetch/runs", opt=READ)
async def list_fetch_runs(
    fetch: NamedDependency[Fetch],
    customer: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 50,
) -> RunsAnswer:
    """The newest runs, of one customer or of all."""
    return RunsAnswer(runs=await fetch.runs.newest(customer, runs_max=limit))


@get("/v1/fetch/runs/{run:int}/changes", opt=READ)
async def list_fetch_run_changes(
    fetch: NamedDependency[Fetch],
    run: FromPath[int],
    *,
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> ChangesAnswer:
    """New, changed and gone items by id; changed ones with the fields that differ."""
    found = await fetch.runs.changes(run, after=after, rows_max=limit)
    return ChangesAnswer(changes=found, next_after=found[-1].item if len(found) == limit else None)


@get("/v1/fetch/runs/{run:int}", opt=READ)
async def get_fetch_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Counts of rows, items and photos by outcome."""
    return await fetch.runs.get(run)


@post("/v1/fetch/runs/{run:int}/confirm", opt=WRITE, status_code=202)
async def confirm_fetch_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Apply a run that was held because its file looks truncated or wrong."""
    return await fetch.runs.confirm(run)


@post("/v1/fetch/runs/{run:int}/discard", opt=WRITE, status_code=200)
async def discard_fetch_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Discard a held run; nothing of it is applied."""
    return await fetch.runs.discard(run)


@post("/v1/fetch/runs/{run:int}/undo", opt=WRITE, status_code=202)
async def undo_fetch_run(fetch: NamedDependency[Fetch], run: FromPath[int]) -> Run:
    """Restore the items to their state before a catalogue; return the run that does so.

    Added items are unpublished. Changed and removed items are published as before, as new
    versions. Items uploaded since stay as they are.
    """
    return await fetch.runs.undo(run)


class ProblemAnswer(RowProblem, frozen=True, kw_only=True):
    """A row's problem with its position, for paging."""

    position: int


class PhotoProblemAnswer(PhotoProblem, frozen=True, kw_only=True):
    """A photo's problem with its position, for paging."""

    position: int


class ProblemsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of each; continue with `after` and `photos_after` set to the last positions."""

    problems: list[ProblemAnswer]
    photos: list[PhotoProblemAnswer]


@get(
    "/v1/fetch/runs/{run:int}/errors",
    opt={**READ, OTHER_TYPES: (CSV,)},
    responses={200: ResponseSpec(ProblemsAnswer, description="A page, or everything as CSV.")},
)
async def list_fetch_run_errors(
    request: Request[Any, Any, Any],
    fetch: NamedDependency[Fetch],
    run: FromPath[int],
    *,
    after: Annotated[int, QueryParameter(ge=0)] = 0,
    photos_after: Annotated[int, QueryParameter(ge=0)] = 0,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    lang: FromQuery[str | None] = None,
    format: FromQuery[Literal["json", "csv"] | None] = None,  # noqa: A002 - the parameter's name
) -> Response[Any]:
    """Problems of rows, and photos that failed or were refused.

    The first 1,000 problems of rows are kept, in row order.

    `problems` lists faults of rows, including links refused without a request; `photos` lists
    requested photos without a result. With `format=csv` or `Accept: text/csv` the response is one
    stream: row, line, item, field, code, text, link. `lang` or Accept-Language selects the
    language of `text`.
    """
    texts = texts_for(request, lang)
    accept = request.headers.get("accept", "")
    if format == "csv" or (format is None and accept.lower().startswith("text/csv")):
        await fetch.runs.get(run)
        headers = {
            "content-disposition": f'attachment; filename="run-{run}-errors.csv"',
            "x-content-type-options": "nosniff",
        }
        stream = _encoded(fetch.reports.csv(run, lang=texts.lang))
        return Stream(stream, media_type=CSV, headers=headers)
    found = await fetch.reports.problems(run, after=after, rows_max=limit, lang=texts.lang)
    photos = await fetch.reports.photo_problems(
        run, after=photos_after, rows_max=limit, lang=texts.lang
    )
    answer = ProblemsAnswer(
        problems=[
            ProblemAnswer(position=position, **msgspec.structs.asdict(problem))
            for position, problem in found
        ],
        photos=[
            PhotoProblemAnswer(position=position, **msgspec.structs.asdict(photo))
            for position, photo in photos
        ],
    )
    return Response(
        answer, headers={"content-language": texts.lang, "vary": "accept, accept-language"}
    )


async def _encoded(parts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    async for part in parts:
        yield part.encode()


@get(
    "/v1/fetch/runs/{run:int}/report",
    opt=READ,
    media_type="text/html",
    response_headers=[
        ResponseHeader(name="content-security-policy", value=POLICY),
        ResponseHeader(name="x-content-type-options", value="nosniff"),
        ResponseHeader(name="referrer-policy", value="no-referrer"),
        ResponseHeader(name="cache-control", value="private, no-store"),
    ],
)
async def get_fetch_run_report(
    request: Request[Any, Any, Any],
    fetch: NamedDependency[Fetch],
    run: FromPath[int],
    lang: FromQuery[str | None] = None,
) -> bytes:
    """Counts and problems of a run for people: one HTML page without scripts or links."""
    texts = texts_for(request, lang)
    return (await fetch.reports.page(run, lang=texts.lang)).encode()


class SchemasAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every schema."""

    schemas: list[CategorySchema]


class MappingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every mapping."""

    mappings: list[NamedMapping]


def _name(path: str) -> str:
    """The category in the rest of a path: a category may contain slashes."""
    return path.removeprefix("/")


@get("/v1/fetch/schemas", opt=READ)
async def list_fetch_schemas(fetch: NamedDependency[Fetch]) -> SchemasAnswer:
    """Schemas by category; `default` applies to categories without one."""
    return SchemasAnswer(schemas=await fetch.schemas.all())


@get("/v1/fetch/schemas/{category:path}", opt=READ)
async def get_fetch_schema(
    fetch: NamedDependency[Fetch], category: FromPath[str]
) -> CategorySchema:
    """The fields that rows of a category must have."""
    return await fetch.schemas.get(_name(category))


@put("/v1/fetch/schemas/{category:path}", opt=WRITE)
async def set_fetch_schema(
    fetch: NamedDependency[Fetch], category: FromPath[str], data: JSONBody[Schema]
) -> CategorySchema:
    """Set the fields that rows of a category must have, from the next run on."""
    return await fetch.schemas.set(_name(category), data)


@delete("/v1/fetch/schemas/{category:path}", opt=WRITE)
async def remove_fetch_schema(fetch: NamedDependency[Fetch], category: FromPath[str]) -> None:
    """Delete a schema; the default one applies from the next run on."""
    await fetch.schemas.remove(_name(category))


@get("/v1/fetch/mappings", opt=READ)
async def list_fetch_mappings(fetch: NamedDependency[Fetch]) -> MappingsAnswer:
    """Mappings of column names, by the mapping's name."""
    return MappingsAnswer(mappings=await fetch.mappings.all())


@get("/v1/fetch/mappings/{name:str}", opt=READ)
async def get_fetch_mapping(fetch: NamedDependency[Fetch], name: FromPath[str]) -> NamedMapping:
    """The mapping of a file's column names."""
    return await fetch.mappings.get(name)


@put("/v1/fetch/mappings/{name:str}", opt=WRITE)
async def set_fetch_mapping(
    fetch: NamedDependency[Fetch], name: FromPath[str], data: JSONBody[Mapping]
) -> NamedMapping:
    """Set a mapping of column names; uploads and sources refer to it by `mapping`."""
    return await fetch.mappings.set(name, data)


@delete("/v1/fetch/mappings/{name:str}", opt=WRITE)
async def remove_fetch_mapping(fetch: NamedDependency[Fetch], name: FromPath[str]) -> None:
    """Delete a mapping; sources that use it then fail."""
    await fetch.mappings.remove(name)
