"""HTTP API of views. Each route parses, calls one public method and answers.

Single hits and reads of totals also have a fast path (`kernel.routes`), which answers plain
requests without Litestar. Both paths call the same methods and encode the same values. Pages may
call the routes that count with a publishable key: `navigator.sendBeacon(url, text)` sends
`text/plain`, which needs no preflight request and is parsed as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64decode
from datetime import date, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.kernel.config import moment_of, parse_as, parse_duration_s
from headrace.kernel.routes import (
    FAST_PATH,
    OTHER_TYPES,
    FastRequest,
    FastResponse,
    ItemsMax,
    routes_in,
)
from headrace.views.errors import InvalidHit, InvalidSpan, TooManyHits
from headrace.views.exports import FORMATS, IDS_MAX, ROWS_MAX, encoded
from headrace.views.model import (
    CLASSES,
    HITS_PER_CALL_MAX,
    TOP_MAX,
    VIEWS_OF_HIT_MAX,
    ChangePage,
    DayViewers,
    Deleted,
    ExportPage,
    ExportRow,
    Hit,
    Mark,
    Reclassify,
    SeriesPoint,
    ShardLag,
    TopEntry,
    Total,
    Traffic,
    Verified,
)
from headrace.views.service import Views

HIT: Final = {"scope": "views:hit", "for_pages": True}
"""A publishable key (`?k=`) is sufficient."""
READ: Final = {"scope": "views:read"}
_EXPORT: Final = {**READ, OTHER_TYPES: (FORMATS["csv"], FORMATS["parquet"])}
WRITE: Final = {"scope": "views:write"}
PIXEL: Final = b64decode("R0lGODlhAQABAIAAAP///wAAACH5BAEAAAAALAAAAAABAAEAAAICRAEAOw==")
"""A GIF of one transparent pixel, 43 bytes."""
WEIGHT_DIGITS_MAX: Final = 7
_ENCODER: Final = msgspec.json.Encoder()
_CACHED: Final = (b"cache-control", b"private, no-cache")
"""Clients may store a response and must revalidate it, which the ETag makes cheap."""


class NewHit(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"traffic": "class"},
):
    """A hit: `n` views, a `viewer` to count per day, an `event` that counts once in 24 hours."""

    id: str
    n: int = 1
    viewer: str | None = None
    event: str | None = None
    traffic: Traffic | None = None
    """human, bot, owner or staff; by default derived from the User-Agent."""
    counters: tuple[str, ...] = ()
    """Names of `views.counters` that count 1 each."""


class NewMark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mark: without `from_at` it begins now, without `to_at` it has not ended."""

    name: str
    from_at: datetime | None = None
    to_at: datetime | None = None


class Unmarked(msgspec.Struct, frozen=True, kw_only=True):
    """The number of deleted marks."""

    deleted: int


class ReclassifyJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that moves the views."""

    job: int


async def _hit_fast(views: Views, request: FastRequest) -> FastResponse | None:
    query = request.query
    n, traffic = query.get("n", "1"), query.get("class")
    if traffic not in (None, *CLASSES):
        return None
    if not is_whole(n) or len(n) > WEIGHT_DIGITS_MAX:
        return None
    total = await views.hit(
        request.name,
        n=require_weight(int(n), from_page=request.is_from_page),
        viewer=query.get("viewer"),
        event=event_of(query.get("event"), from_page=request.is_from_page),
        traffic=traffic_of(views, traffic, request.user_agent),
        counters=counters_of(query.get("counters")),
    )
    return FastResponse(_ENCODER.encode(total))


@post("/v1/views/items/{id:str}", status_code=200, opt={**HIT, FAST_PATH: _hit_fast})
async def hit_item(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - the name in the path
    *,
    n: FromQuery[int] = 1,
    viewer: FromQuery[str | None] = None,
    event: FromQuery[str | None] = None,
    traffic: Annotated[Traffic | None, QueryParameter(name="class")] = None,
    counters: FromQuery[str | None] = None,
) -> Total:
    """Count one view of an item, or `n` views, and return its total.

    `counters=photo,phone` adds 1 to each of these; with `n=0` to them alone.
    """
    require_whole(request.query_params.get("n"))
    from_page = is_from_page(request)
    return await views.hit(
        id,
        n=require_weight(n, from_page=from_page),
        viewer=viewer,
        event=event_of(event, from_page=from_page),
        traffic=traffic_of(views, traffic, request.headers.get("user-agent")),
        counters=counters_of(counters),
    )


@post(
    "/v1/views",
    status_code=200,
    opt={
        **HIT,
        "items_max": ItemsMax(
            HITS_PER_CALL_MAX, lambda count: TooManyHits(count, HITS_PER_CALL_MAX)
        ),
    },
)
async def hit_items(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    data: JSONBody[list[NewHit | str]],
) -> list[Total]:
    """Count up to 1,000 hits, each an id or an object, and return the totals in their order.

    The hits of one shard are counted together. If a shard is unreachable the call fails, and hits
    of other shards stay counted. Use an `event` in hits of a call that may be repeated.
    """
    from_page, user_agent = is_from_page(request), request.headers.get("user-agent")
    hits = [_hit_of(views, one, from_page=from_page, user_agent=user_agent) for one in data]
    return await views.hits(hits)


@get("/v1/views/items/{id:str}/pixel", media_type="image/gif", opt=HIT)
async def get_pixel(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - the name in the path
    *,
    viewer: FromQuery[str | None] = None,
    event: FromQuery[str | None] = None,
    traffic: Annotated[Traffic | None, QueryParameter(name="class")] = None,
) -> Response[bytes]:
    """Count a view of an item and return an uncacheable image of one pixel. HEAD does not count."""
    if not request.scope.get("is_head"):
        counted = traffic_of(views, traffic, request.headers.get("user-agent"))
        event_id = event_of(event, from_page=is_from_page(request))
        await views.hit(id, viewer=viewer, event=event_id, traffic=counted)
    return Response(PIXEL, media_type="image/gif", headers={"cache-control": "no-store"})


async def _totals_fast(views: Views, request: FastRequest) -> FastResponse | None:
    query = request.query
    if "ids" not in query:
        return None
    ids, fields = query["ids"].split(","), query.get("fields", "total")
    return await _answer_totals(views, ids, fields, request.if_none_match)


async def _answer_totals(
    views: Views, ids: list[str], fields: str, if_none_match: str | None
) -> FastResponse:
    """The totals, or 304 if the client has them."""
    body = _ENCODER.encode(await views.totals(ids, fields=fields.split(",")))
    etag = etag_of(body)
    headers = ((b"etag", etag.encode()), _CACHED)
    if matches_etag(etag, if_none_match):
        return FastResponse(b"", 304, headers)
    return FastResponse(body, 200, headers)


@get("/v1/views", media_type="application/json", opt={**READ, FAST_PATH: _totals_fast})
async def get_totals(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    ids: FromQuery[list[str]],
    fields: FromQuery[str] = "total",
) -> Response[list[Total]]:
    """Read the totals of up to 1,000 items in order: `ids=a,b,c` or `ids=a&ids=b`.

    `fields` selects from `total,today,unique,classes,counters`. If-None-Match with the ETag of an
    unchanged answer returns 304. `total` is null while it is unavailable. `stale` means that the
    most recent hits may be missing.
    """
    names = [name for part in ids for name in part.split(",")]
    found = await _answer_totals(views, names, fields, request.headers.get("if-none-match"))
    answer: Response[Any] = Response(
        found.body,
        status_code=found.status,
        media_type="application/json",
        headers={name.decode(): value.decode() for name, value in found.headers},
    )
    return answer


def _span(from_at: str | None, to_at: str | None) -> dict[str, datetime | None]:
    return {
        "from_at": moment_of("from", from_at, InvalidSpan),
        "to_at": moment_of("to", to_at, InvalidSpan),
    }


@get("/v1/views/items/{id:str}/series", opt=READ)
async def get_series(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - the name in the path
    *,
    by: FromQuery[Literal["hour", "day", "month"]] = "day",
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
) -> list[SeriesPoint]:
    """Views of an item by hour, day or month from `from` to before `to`, oldest first.

    Times without views are omitted. Days begin at midnight in the deployment's time zone. By
    default `to` is now, and `from` is 2 days before (hours), the beginning of the day 30 days
    before (days) or of the month 11 months before. Old hours exist as days only.
    """
    return await views.analytics.series(id, by, **_span(from_at, to_at))


@get("/v1/views/items/{id:str}/marks", opt=READ)
async def get_marks(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - the name in the path
    *,
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
) -> list[Mark]:
    """Marks of an item that overlap a span, oldest first; by default the last 30 days."""
    return await views.analytics.marks(id, **_span(from_at, to_at))


@post("/v1/views/items/{id:str}/marks", status_code=200, opt=WRITE)
async def mark_item(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - the name in the path
    data: JSONBody[NewMark],
) -> Mark:
    """Mark a span of an item's time; by default it begins now and has no end. Safe to repeat."""
    return await views.corrections.mark(id, data.name, from_at=data.from_at, to_at=data.to_at)


@delete("/v1/views/items/{id:str}/marks/{name:str}", status_code=200, opt=WRITE)
async def unmark_item(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - the name in the path
    name: FromPath[str],
    *,
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
) -> Unmarked:
    """Delete the marks of a name, or only the one that begins at `from`."""
    begin_at = moment_of("from", from_at, InvalidSpan)
    return Unmarked(deleted=await views.corrections.unmark(id, name, from_at=begin_at))


@get("/v1/views/viewers", opt=READ)
async def get_viewers(
    views: NamedDependency[Views],
    ids: FromQuery[list[str]],
    *,
    by: FromQuery[Literal["day", "week", "month", "all"]] = "day",
    from_day: Annotated[date | None, QueryParameter(name="from")] = None,
    to_day: Annotated[date | None, QueryParameter(name="to")] = None,
) -> list[DayViewers]:
    """Estimated different viewers of items together: `ids=a,b,c`, by day, week, month or `all`.

    A viewer of several items or days counts once per period. The default span is today and the 30
    days before it; items times days are at most 3,660.
    """
    names = [name for part in ids for name in part.split(",")]
    return await views.analytics.viewers(names, by, from_day=from_day, to_day=to_day)


@get("/v1/views/export", opt=_EXPORT, media_type="application/json")
async def export_series(
    views: NamedDependency[Views],
    *,
    by: FromQuery[Literal["hour", "day", "month"]] = "day",
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=IDS_MAX)] = 100,
    form: Annotated[Literal["json", "csv", "parquet"], QueryParameter(name="format")] = "json",
) -> Response[ExportPage]:
    """Series of the `limit` items after id `after`; `format` is json, csv or parquet.

    The field `after` (csv and parquet: the header `x-headrace-after`) continues; without it the
    page is the last one.
    """
    span = _span(from_at, to_at)
    page = await views.exports.series(by, **span, after=after, ids_max=limit)
    return await _exported(page, page.rows, page.after, form)


@get("/v1/views/changes", opt=_EXPORT, media_type="application/json")
async def get_changes(
    views: NamedDependency[Views],
    *,
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=ROWS_MAX)] = ROWS_MAX,
    form: Annotated[Literal["json", "csv", "parquet"], QueryParameter(name="format")] = "json",
) -> Response[ChangePage]:
    """Changes after position `after`; `format` is json, csv or parquet.

    Store the new `position` (csv and parquet: the header `x-headrace-after`) with the rows, and
    pass it as `after`. An empty page means that all were read. `after=now` returns the current
    position.
    """
    page = await views.exports.changes(after, rows_max=limit)
    return await _exported(page, page.changes, page.position, form)


async def _exported(
    page: Any, rows: list[ExportRow], after: str | None, form: str
) -> Response[Any]:
    headers = {"cache-control": "no-store", **({"x-headrace-after": after} if after else {})}
    body = _ENCODER.encode(page)
    if form != "json":
        body = await asyncio.to_thread(encoded, rows, form)
    return Response(body, media_type=FORMATS[form], headers=headers)


@get("/v1/views/top", opt=READ)
async def get_top(
    views: NamedDependency[Views],
    window: FromQuery[str] = "24h",
    limit: Annotated[int, QueryParameter(ge=1, le=TOP_MAX)] = 20,
    traffic: Annotated[Traffic, QueryParameter(name="class")] = Traffic.HUMAN,
) -> list[TopEntry]:
    """The items with the most views of a class within `window` (`24h`, `7d`), most first."""
    window_s = parse_as(parse_duration_s, "window", window, InvalidSpan)
    return await views.analytics.top(window_s, limit, traffic=traffic)


@delete("/v1/views/items/{id:str}", status_code=200, opt=WRITE)
async def delete_item(
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - the name in the path
) -> Deleted:
    """Delete totals and series of an item, and drop its hits for 30 days."""
    return await views.delete(id)


@post("/v1/views/reclassify", status_code=202, opt=WRITE)
async def reclassify_views(
    views: NamedDependency[Views], data: JSONBody[Reclassify]
) -> ReclassifyJob:
    """Enqueue the move of an item's views of whole hours to another class. Safe to repeat."""
    job = await views.corrections.reclassify(
        data.id, from_at=data.from_at, to_at=data.to_at, source=data.source, target=data.target
    )
    return ReclassifyJob(job=job)


@get("/v1/views/verify", opt=READ)
async def verify_views(views: NamedDependency[Views]) -> Verified:
    """Compare every total with the sum of its hours. Empty `differences` means that all match."""
    return await views.analytics.verify()


@get("/v1/views/lag", opt=READ)
async def get_views_lag(views: NamedDependency[Views]) -> list[ShardLag]:
    """Entries of each shard that are counted in Valkey and not yet in PostgreSQL."""
    return await views.analytics.lag()


def is_from_page(request: Any) -> bool:
    """Whether the request has a publishable key."""
    return bool(getattr(request.scope.get("auth"), "is_publishable", False))


def event_of(event: str | None, *, from_page: bool) -> str | None:
    """The stored event id. A prefix keeps events of pages apart from those of servers."""
    return f"page:{event}" if from_page and event else event


def counters_of(text: str | None) -> tuple[str, ...]:
    """Names of counters in a parameter."""
    return tuple(text.split(",")) if text else ()


def is_whole(text: str) -> bool:
    """Whether a text has decimal digits only; Python and JSON also accept `1e3`."""
    return text.isascii() and text.isdecimal()


def require_whole(n: str | None) -> None:
    """Validate the text of a weight. Raises: InvalidHit."""
    if n is not None and not is_whole(n):
        raise InvalidHit("n", n, f"a whole number from 1 to {VIEWS_OF_HIT_MAX}")


def require_weight(n: int, *, from_page: bool) -> int:
    """Validate a weight: pages may only count 1 per hit. Raises: InvalidHit."""
    if from_page and n not in (0, 1):
        raise InvalidHit("n", n, "1 with a publishable key: other weights require a secret token")
    return n


def traffic_of(views: Views, given: str | None, user_agent: str | None) -> Traffic:
    """The given class, by default the class of the User-Agent."""
    return views.bots.traffic_of(user_agent) if given is None else Traffic(given)


def etag_of(body: bytes) -> str:
    """The ETag of a response body."""
    return f'"{hashlib.blake2b(body, digest_size=9).hexdigest()}"'


def matches_etag(etag: str, if_none_match: str | None) -> bool:
    """Whether If-None-Match has `etag`, weak or strong (RFC 9110, section 13.1.2)."""
    return if_none_match is not None and (etag in if_none_match or if_none_match.strip() == "*")


def _hit_of(views: Views, given: NewHit | str, *, from_page: bool, user_agent: str | None) -> Hit:
    new = NewHit(id=given) if isinstance(given, str) else given
    return Hit(
        id=new.id,
        n=require_weight(new.n, from_page=from_page),
        viewer=new.viewer,
        event=event_of(new.event, from_page=from_page),
        traffic=traffic_of(views, new.traffic, user_agent),
        counters=new.counters,
    )


ROUTES: Final[list[Any]] = routes_in(globals())
