"""Routes that tell: totals, series, top lists."""

from __future__ import annotations

import hashlib
from datetime import date, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.kernel.config import parse_duration_s
from headrace.kernel.routes import FAST_PATH, FastRequest, FastResponse
from headrace.views.errors import InvalidSpan
from headrace.views.http.scopes import READ
from headrace.views.model import TOP_MAX, DayViewers, SeriesPoint, TopEntry, Total, Traffic
from headrace.views.service import Views

_PARAMETERS: Final = frozenset({"ids", "fields"})
_ENCODER: Final = msgspec.json.Encoder()
_KEPT: Final = {"cache-control": "private, no-cache"}
"""A copy may be kept, and is to be asked about each time, which the ETag makes cheap."""
_KEPT_PAIRS: Final = tuple((name.encode(), value.encode()) for name, value in _KEPT.items())


async def _totals_fast(views: Views, asked: FastRequest) -> FastResponse | None:
    query = asked.query
    if "ids" not in query or not query.keys() <= _PARAMETERS:
        return None
    fields = tuple(query.get("fields", "total").split(","))
    body = _ENCODER.encode(await views.totals(query["ids"].split(","), fields=fields))
    etag = etag_of(body)
    headers = ((b"etag", etag.encode()), *_KEPT_PAIRS)
    if is_known(etag, asked.if_none_match):
        return FastResponse(b"", 304, headers)
    return FastResponse(body, 200, headers)


@get(
    "/v1/views",
    operation_id="getTotals",
    summary="Read totals",
    media_type="application/json",
    opt={**READ, FAST_PATH: _totals_fast},
)
async def get_totals(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    ids: FromQuery[list[str]],
    fields: FromQuery[str] = "total",
) -> Response[list[Total]]:
    """Read the totals of up to 1,000 items, `ids=a,b,c` or `ids=a&ids=b`, in order; `fields=total,today,unique,classes`.

    The ETag is that of the answer: with If-None-Match a list that did not change is answered 304. `total` is null
    where it cannot be told now, and `stale` says that hits of the last moments may be missing.
    """
    names = [name for part in ids for name in part.split(",")]
    body = _ENCODER.encode(await views.totals(names, fields=fields.split(",")))
    etag = etag_of(body)
    headers = {"etag": etag, **_KEPT}
    is_same = is_known(etag, request.headers.get("if-none-match"))
    answer: Response[Any] = Response(
        b"" if is_same else body,
        status_code=304 if is_same else 200,
        media_type="application/json",
        headers=headers,
    )
    return answer


@get(
    "/v1/views/items/{id:str}/series",
    operation_id="getSeries",
    summary="Views by hour or day",
    opt=READ,
)
async def get_series(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
    *,
    by: FromQuery[Literal["hour", "day"]] = "day",
    from_at: Annotated[datetime | None, QueryParameter(name="from")] = None,
    to_at: Annotated[datetime | None, QueryParameter(name="to")] = None,
) -> list[SeriesPoint]:
    """Views of an item by hour or day from `from` until before `to` (RFC 3339), oldest first; without views: left out.

    Days begin at midnight in the deployment's time zone. Left out, `to` is now and `from` 2 days before (by hour) or the
    beginning of the day 30 days before.
    """
    return await views.series(id, by, from_at=from_at, to_at=to_at)


@get(
    "/v1/views/items/{id:str}/viewers",
    operation_id="getViewers",
    summary="Viewers by day",
    opt=READ,
)
async def get_viewers(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
    *,
    from_day: Annotated[date | None, QueryParameter(name="from")] = None,
    to_day: Annotated[date | None, QueryParameter(name="to")] = None,
) -> list[DayViewers]:
    """About how many viewers an item had on each day from `from` until before `to` (dates), oldest first; without any: left out.

    Days are those of the deployment's time zone. Left out, the span is today and the 30 days before it.
    """
    return await views.viewers(id, from_day=from_day, to_day=to_day)


@get("/v1/views/top", operation_id="getTop", summary="The most viewed items", opt=READ)
async def get_top(
    views: NamedDependency[Views],
    window: FromQuery[str] = "24h",
    limit: Annotated[int, QueryParameter(ge=1, le=TOP_MAX)] = 20,
    traffic: Annotated[Traffic, QueryParameter(name="class")] = Traffic.HUMAN,
) -> list[TopEntry]:
    """The items with the most views, by people or another class, within `window` (`24h`, `7d`), most first."""
    try:
        window_s = parse_duration_s(window)
    except ValueError as error:
        raise InvalidSpan(f"window: expected {error}, got {window[:40]!r}") from error
    return await views.top(window_s, limit, traffic=traffic)


def etag_of(body: bytes) -> str:
    """The ETag of an answer."""
    return f'"{hashlib.blake2b(body, digest_size=9).hexdigest()}"'


def is_known(etag: str, if_none_match: str | None) -> bool:
    """Whether If-None-Match names `etag`, weak or strong, alone or among others (RFC 9110, section 13.1.2)."""
    return if_none_match is not None and (etag in if_none_match or if_none_match.strip() == "*")


ROUTES: Final[list[Any]] = [get_totals, get_series, get_viewers, get_top]
