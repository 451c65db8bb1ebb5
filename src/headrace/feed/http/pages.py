"""Routes that tell: a viewer's page, an author's posts, what is unread, the read marker."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import Request, Response, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.feed.http.scopes import READ, WRITE
from headrace.feed.http.shown import link_of, with_link
from headrace.feed.model import PAGE_MAX, Marker, Unread
from headrace.feed.service import Feed
from headrace.feed.shown import PageShown, page_shown
from headrace.kernel.routes import FAST_PATH, FastRequest, FastResponse

LIMIT: Final = 20
_PARAMETERS: Final = frozenset({"limit", "cursor", "since"})
_LIMITS: Final = {str(number): number for number in range(1, PAGE_MAX + 1)}
_ENCODER: Final = msgspec.json.Encoder()


class ReadUpTo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place up to which all is read: `newest` of a page, or a post's `id` of an event."""

    place: str


async def _page_fast(feed: Feed, asked: FastRequest) -> FastResponse | None:
    query = asked.query
    limit = _LIMITS.get(query.get("limit", "20"))
    if limit is None or not query.keys() <= _PARAMETERS:
        return None
    since = query.get("since")
    page = await feed.page(asked.name, limit, cursor=query.get("cursor"), since=since)
    body = _ENCODER.encode(page_shown(page))
    if page.next is None:
        return FastResponse(body)
    path = f"/v1/feed/viewers/{asked.name}"
    link = link_of(path, limit=limit, cursor=page.next, since=since)
    return FastResponse(body, 200, ((b"link", link.encode()),))


@get(
    "/v1/feed/viewers/{viewer:str}",
    operation_id="getFeedPage",
    summary="Read a page of a feed",
    opt={**READ, FAST_PATH: _page_fast},
)
async def get_page(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = LIMIT,
    cursor: FromQuery[str | None] = None,
    since: FromQuery[str | None] = None,
) -> Response[PageShown]:
    """The newest posts of those whom a viewer follows, without muted and blocked ones.

    Go on with `next_cursor`, or with Link: nothing is shown twice and nothing left out, whatever is posted and deleted
    meanwhile. `since=` (the `newest` of an earlier page) tells only what is newer. A viewer whom nobody knows has an
    empty feed.
    """
    page = await feed.page(viewer, limit, cursor=cursor, since=since)
    return with_link(request, page_shown(page), limit=limit, since=since)


@get(
    "/v1/feed/authors/{author:str}/posts",
    operation_id="listAuthorPosts",
    summary="Read an author's posts",
    opt=READ,
)
async def list_author_posts(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    author: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = LIMIT,
    cursor: FromQuery[str | None] = None,
) -> Response[PageShown]:
    """The posts of one author, newest first, whoever asks."""
    page = await feed.author_posts(author, limit, cursor=cursor)
    return with_link(request, page_shown(page), limit=limit)


@get(
    "/v1/feed/viewers/{viewer:str}/unread",
    operation_id="countUnread",
    summary="Count what is new",
    opt=READ,
)
async def count_unread(feed: NamedDependency[Feed], viewer: FromPath[str]) -> Unread:
    """How many posts are newer than the read marker, up to 100; without a marker: all of them."""
    return await feed.unread(viewer)


@get(
    "/v1/feed/viewers/{viewer:str}/marker",
    operation_id="getReadMarker",
    summary="Show up to where was read",
    opt=READ,
)
async def get_marker(feed: NamedDependency[Feed], viewer: FromPath[str]) -> Marker:
    """Up to where a viewer has read; all null: nothing yet."""
    return await feed.marker(viewer)


@put(
    "/v1/feed/viewers/{viewer:str}/marker",
    operation_id="setReadMarker",
    summary="Note up to where was read",
    opt=WRITE,
)
async def set_marker(
    feed: NamedDependency[Feed], viewer: FromPath[str], data: JSONBody[ReadUpTo]
) -> Marker:
    """Note a place up to which all is read. It never goes back: of several devices the furthest counts."""
    return await feed.set_marker(viewer, data.place)


ROUTES: Final[list[Any]] = [get_page, list_author_posts, count_unread, get_marker, set_marker]
