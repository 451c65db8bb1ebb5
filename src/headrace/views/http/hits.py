"""Routes that count: one hit, many, the pixel.

Pages may call them with a publishable key: `navigator.sendBeacon(url, text)` sends `text/plain`, which needs no question
to the server beforehand, and is read as JSON here.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.kernel.routes import FAST_PATH, FastRequest, FastResponse, ItemsMax
from headrace.views.errors import TooManyHits
from headrace.views.http.scopes import (
    HIT,
    event_of,
    is_from_page,
    is_whole,
    require_weight,
    require_whole,
)
from headrace.views.model import (
    CLASSES,
    HITS_PER_CALL_MAX,
    Hit,
    Total,
    Traffic,
    traffic_of_user_agent,
)
from headrace.views.service import Views

PIXEL: Final = b64decode("R0lGODlhAQABAIAAAP///wAAACH5BAEAAAAALAAAAAABAAEAAAICRAEAOw==")
"""A GIF of one transparent pixel, 43 bytes."""
_PARAMETERS: Final = frozenset({"n", "viewer", "event", "class", "k"})
DIGITS_MAX: Final = 7
"""Of a weight."""
_ENCODER: Final = msgspec.json.Encoder()


class NewHit(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"traffic": "class"},
):
    """A hit: `n` views at once, the `viewer` for the number of viewers a day, an `event` that counts once in 24 hours."""

    id: str
    n: int = 1
    viewer: str | None = None
    event: str | None = None
    traffic: Traffic | None = None
    """human, bot, owner or staff; left out: as the User-Agent has it."""


async def _hit_fast(views: Views, asked: FastRequest) -> FastResponse | None:
    query = asked.query
    n, traffic = query.get("n", "1"), query.get("class")
    if not query.keys() <= _PARAMETERS or traffic not in (None, *CLASSES):
        return None
    if not is_whole(n) or len(n) > DIGITS_MAX:
        return None
    total = await views.hit(
        asked.name,
        n=require_weight(int(n), from_page=asked.is_from_page),
        viewer=query.get("viewer"),
        event=event_of(query.get("event"), from_page=asked.is_from_page),
        traffic=traffic_of(traffic, asked.user_agent),
    )
    return FastResponse(_ENCODER.encode(total))


@post(
    "/v1/views/items/{id:str}",
    operation_id="hitItem",
    summary="Count a view",
    status_code=200,
    opt={**HIT, FAST_PATH: _hit_fast},
)
async def hit_item(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
    *,
    n: FromQuery[int] = 1,
    viewer: FromQuery[str | None] = None,
    event: FromQuery[str | None] = None,
    traffic: Annotated[Traffic | None, QueryParameter(name="class")] = None,
) -> Total:
    """Count a view of an item, or `n`, and say its total."""
    require_whole(request.query_params.get("n"))
    from_page = is_from_page(request)
    return await views.hit(
        id,
        n=require_weight(n, from_page=from_page),
        viewer=viewer,
        event=event_of(event, from_page=from_page),
        traffic=traffic_of(traffic, request.headers.get("user-agent")),
    )


@post(
    "/v1/views",
    operation_id="hitItems",
    summary="Count many views",
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
    """Count up to 1,000 hits, each an id or more, and say the totals in their order.

    Hits of one call are counted together for each shard; when one shard cannot be reached the call fails, and what
    the others counted stays counted: give hits an `event` where a call is to be repeated.
    """
    from_page, by_rule = is_from_page(request), request.headers.get("user-agent")
    return await views.hits([_hit_of(one, from_page=from_page, user_agent=by_rule) for one in data])


@get(
    "/v1/views/items/{id:str}/pixel",
    operation_id="getPixel",
    summary="Count a view by an image",
    media_type="image/gif",
    opt=HIT,
)
async def get_pixel(
    request: Request[Any, Any, Any],
    views: NamedDependency[Views],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
    *,
    viewer: FromQuery[str | None] = None,
    event: FromQuery[str | None] = None,
    traffic: Annotated[Traffic | None, QueryParameter(name="class")] = None,
) -> Response[bytes]:
    """Count a view of an item and answer with an image of one pixel, which nobody may keep. HEAD counts nothing."""
    if not request.scope.get("is_head"):
        counted = traffic_of(traffic, request.headers.get("user-agent"))
        known = event_of(event, from_page=is_from_page(request))
        await views.hit(id, viewer=viewer, event=known, traffic=counted)
    return Response(PIXEL, media_type="image/gif", headers={"cache-control": "no-store"})


def traffic_of(said: str | None, user_agent: str | None) -> Traffic:
    """The class that a caller says, else the one of its User-Agent."""
    return traffic_of_user_agent(user_agent) if said is None else Traffic(said)


def _hit_of(given: NewHit | str, *, from_page: bool, user_agent: str | None) -> Hit:
    new = NewHit(id=given) if isinstance(given, str) else given
    return Hit(
        id=new.id,
        n=require_weight(new.n, from_page=from_page),
        viewer=new.viewer,
        event=event_of(new.event, from_page=from_page),
        traffic=traffic_of(new.traffic, user_agent),
    )


ROUTES: Final[list[Any]] = [hit_item, hit_items, get_pixel]
