"""Routes that say what was wrong with the rows and photos of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, Response, get
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, QueryParameter
from litestar.response import Stream

from headrace.fetch.http.languages import texts_for
from headrace.fetch.http.scopes import READ
from headrace.fetch.model import PhotoProblem, RowProblem
from headrace.fetch.reports import POLICY
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX

CSV: Final = "text/csv"


class ProblemAnswer(RowProblem, frozen=True, kw_only=True):
    """A row's problem with its position, for paging."""

    position: int


class PhotoProblemAnswer(PhotoProblem, frozen=True, kw_only=True):
    """A photo's problem with its position, for paging."""

    position: int


class ProblemsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of each; ask on with `after` and `photos_after` set to the last positions."""

    problems: list[ProblemAnswer]
    photos: list[PhotoProblemAnswer]


@get(
    "/v1/fetch/runs/{run:int}/errors",
    operation_id="listFetchRunErrors",
    summary="List the problems of a run's rows and photos",
    opt=READ,
    responses={200: ResponseSpec(ProblemsAnswer, description="A page, or all of it as CSV.")},
)
async def list_errors(
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
    """Problems in the order of the rows, of which the first 1,000 are kept, and photos without a copy.

    `problems` has faults of rows, links refused at the door among them; `photos` those that failed or
    were refused when they were asked for. With `format=csv` or `Accept: text/csv` all of it in one
    stream: row, line, item, field, code, text, link. `lang` or Accept-Language: the language of `text`.
    """
    texts = texts_for(request, lang)
    accept = request.headers.get("accept", "")
    if format == "csv" or (format is None and accept.lower().startswith("text/csv")):
        await fetch.run(run)
        headers = {
            "content-disposition": f'attachment; filename="run-{run}-errors.csv"',
            "x-content-type-options": "nosniff",
        }
        stream = _encoded(fetch.reports.csv(run, lang=texts.lang))
        return Stream(stream, media_type=CSV, headers=headers)
    found = await fetch.problems(run, after=after, rows_max=limit, lang=texts.lang)
    photos = await fetch.photo_problems(run, after=photos_after, rows_max=limit, lang=texts.lang)
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
    operation_id="getFetchRunReport",
    summary="Show a run's problems as a page",
    opt=READ,
    media_type="text/html",
    response_headers=[
        ResponseHeader(name="content-security-policy", value=POLICY),
        ResponseHeader(name="x-content-type-options", value="nosniff"),
        ResponseHeader(name="referrer-policy", value="no-referrer"),
        ResponseHeader(name="cache-control", value="private, no-store"),
    ],
)
async def get_report(
    request: Request[Any, Any, Any],
    fetch: NamedDependency[Fetch],
    run: FromPath[int],
    lang: FromQuery[str | None] = None,
) -> bytes:
    """The counts of a run and what to mend, for a person: one page without scripts or links."""
    texts = texts_for(request, lang)
    return (await fetch.reports.page(run, lang=texts.lang)).encode()


ROUTES: Final[list[Any]] = [list_errors, get_report]
