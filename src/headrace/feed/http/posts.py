"""Routes of pages, live updates, read markers, posts and the index.

A live stream sends server-sent events. Each event has the posts since the previous one, and its id
is the position of the newest. A reconnecting client sends it as Last-Event-ID (browsers do so
automatically) and receives what it missed. New posts are read every `feed.live_every`, with one
page call per stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.response import ServerSentEvent
from litestar.response.sse import ServerSentEventMessage

from headrace.feed.errors import TooManyAtOnce
from headrace.feed.model import (
    AT_ONCE_MAX,
    PAGE_MAX,
    POSTS_PER_CALL_MAX,
    FeedVerified,
    Marker,
    NewPost,
    Page,
    People,
    Post,
    ShardState,
    Unread,
)
from headrace.feed.pages import LiveFeed, PostWhy
from headrace.feed.service import Feed
from headrace.kernel.errors import Unavailable
from headrace.kernel.routes import ENDLESS, FAST_PATH, FastRequest, FastResponse, ItemsMax

READ: Final = {"scope": "feed:read"}
WRITE: Final = {"scope": "feed:write"}
AUTHORS_MAX: Final = ItemsMax(
    AT_ONCE_MAX, lambda count: TooManyAtOnce("authors", count, AT_ONCE_MAX)
)
POSTS_MAX: Final = ItemsMax(
    POSTS_PER_CALL_MAX, lambda count: TooManyAtOnce("posts", count, POSTS_PER_CALL_MAX)
)


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """Number of entries that changed, without those already in the requested state."""

    changed: int


def link_of(path: str, *, limit: int, cursor: str, **filters: str | None) -> str:
    """The Link header of the next page."""
    query: dict[str, Any] = {"limit": limit, "cursor": cursor}
    query |= {name: value for name, value in filters.items() if value is not None}
    return f'<{path}?{urlencode(query)}>; rel="next"'


def with_link(
    request: Request[Any, Any, Any], answer: Page | People, *, limit: int, **filters: str | None
) -> Response[Any]:
    """A response with the Link header that matches its `next_cursor`."""
    if answer.next is None:
        return Response(answer)
    path = quote(request.url.path, safe="/:@~")
    link = link_of(path, limit=limit, cursor=answer.next, **filters)
    return Response(answer, headers={"link": link})


LIMIT: Final = 20
SAMPLE_MAX: Final = 10_000
RETRY_MS: Final = 2_000
"""Time after which a browser reconnects."""
HEARTBEAT_S: Final = 15.0
"""Interval of comments on an idle stream, so that proxies do not close it."""
LIFE_S: Final = 600.0
"""Length of a stream; its client reconnects, and its token is checked again."""
MEDIA_TYPE: Final = "text/event-stream"
_PARAMETERS: Final = frozenset({"limit", "cursor", "since"})
_LIMITS: Final = {str(number): number for number in range(1, PAGE_MAX + 1)}
_ENCODER: Final = msgspec.json.Encoder()


class ReadUpTo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position that was read up to: `newest` of a page, or the id of a live event."""

    position: str


async def _page_fast(feed: Feed, request: FastRequest) -> FastResponse | None:
    query = request.query
    limit = _LIMITS.get(query.get("limit", "20"))
    if limit is None or not query.keys() <= _PARAMETERS:
        return None
    since = query.get("since")
    page = await feed.page(request.name, limit, cursor=query.get("cursor"), since=since)
    body = _ENCODER.encode(page)
    if page.next is None:
        return FastResponse(body)
    path = f"/v1/feed/viewers/{request.name}"
    link = link_of(path, limit=limit, cursor=page.next, since=since)
    return FastResponse(body, 200, ((b"link", link.encode()),))


@get("/v1/feed/viewers/{viewer:str}", opt={**READ, FAST_PATH: _page_fast})
async def get_feed_page(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = LIMIT,
    cursor: FromQuery[str | None] = None,
    since: FromQuery[str | None] = None,
    kinds: FromQuery[str | None] = None,
    rank: FromQuery[str | None] = None,
) -> Response[Page]:
    """The newest posts of followed authors, without muted and blocked ones.

    `next_cursor` or the Link header leads to the next page; no post is repeated or omitted, even
    if posts are added or deleted meanwhile. `since=` (the `newest` of an earlier page) selects
    newer posts only, `kinds=photo,video` posts of these kinds. `rank=` names an order defined by
    the application. An unknown viewer has an empty feed.
    """
    page = await feed.page(viewer, limit, cursor=cursor, since=since, kinds=kinds, rank=rank)
    return with_link(request, page, limit=limit, since=since, kinds=kinds, rank=rank)


@get("/v1/feed/authors/{author:str}/posts", opt=READ)
async def list_author_posts(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    author: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = LIMIT,
    cursor: FromQuery[str | None] = None,
    kinds: FromQuery[str | None] = None,
) -> Response[Page]:
    """The posts of one author, newest first, independent of the viewer; `kinds=` filters."""
    page = await feed.pages.author_posts(author, limit, cursor=cursor, kinds=kinds)
    return with_link(request, page, limit=limit, kinds=kinds)


@get("/v1/feed/viewers/{viewer:str}/unread", opt=READ)
async def count_unread(
    feed: NamedDependency[Feed], viewer: FromPath[str], kinds: FromQuery[str | None] = None
) -> Unread:
    """Number of posts newer than the read marker, counted to 100; all posts without a marker."""
    return await feed.pages.unread(viewer, kinds=kinds)


@get("/v1/feed/viewers/{viewer:str}/marker", opt=READ)
async def get_read_marker(feed: NamedDependency[Feed], viewer: FromPath[str]) -> Marker:
    """The read marker of a viewer; all null: no marker."""
    return await feed.pages.marker(viewer)


@put("/v1/feed/viewers/{viewer:str}/marker", opt=WRITE)
async def set_read_marker(
    feed: NamedDependency[Feed], viewer: FromPath[str], data: JSONBody[ReadUpTo]
) -> Marker:
    """Move the read marker forward, never back: with several devices the furthest one counts."""
    return await feed.pages.set_marker(viewer, data.position)


@get("/v1/feed/viewers/{viewer:str}/live", media_type=MEDIA_TYPE, opt=READ)
async def watch_feed(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    *,
    since: FromQuery[str | None] = None,
    kinds: FromQuery[str | None] = None,
) -> Response[Any]:
    """Send `posts` events with new posts, starting now, or after Last-Event-ID or `since=`.

    `kinds=` selects posts of these kinds. Deletions are not sent; pages reflect them.
    """
    since = request.headers.get("last-event-id") or since
    live = await feed.pages.watch(viewer, since=since, kinds=kinds)
    if request.scope.get("is_head"):
        return Response(b"", media_type=MEDIA_TYPE)
    request.scope[ENDLESS] = True  # type: ignore[typeddict-unknown-key]
    answer: Response[Any] = ServerSentEvent(events_of(live, every_s=feed.config.live_every_s))
    return answer


async def events_of(live: LiveFeed, *, every_s: float) -> AsyncIterator[ServerSentEventMessage]:
    """The events of a stream, until the client disconnects or LIFE_S ends."""
    yield ServerSentEventMessage(data=None, retry=RETRY_MS, id=live.position, comment="connected")
    loop = asyncio.get_running_loop()
    heartbeat_at_s, ends_s = loop.time() + HEARTBEAT_S, loop.time() + LIFE_S
    while loop.time() < ends_s:
        await asyncio.sleep(every_s)
        try:
            found = await live.poll()
        except Unavailable:
            # A short outage of an engine does not disconnect all clients.
            found = None
        if found is not None and found.posts:
            text = _ENCODER.encode(found).decode()
            yield ServerSentEventMessage(data=text, event="posts", id=live.position)
            heartbeat_at_s = loop.time() + HEARTBEAT_S
        elif loop.time() >= heartbeat_at_s:
            yield ServerSentEventMessage(data=None, comment="heartbeat")
            heartbeat_at_s = loop.time() + HEARTBEAT_S


@post("/v1/feed/posts", opt={**WRITE, "items_max": POSTS_MAX})
async def add_posts(
    feed: NamedDependency[Feed], data: JSONBody[NewPost | list[NewPost]]
) -> list[Post]:
    """Add one post or up to 1,000, all or none; once answered, all followers' feeds have them.

    An existing post stays unchanged, so a call may be repeated. `at` may be in the past (imports),
    or in the future: then the post becomes visible at that moment.
    """
    return await feed.posts.add(data if isinstance(data, list) else [data])


@get("/v1/feed/posts/{id:str}", opt=READ)
async def get_feed_post(
    feed: NamedDependency[Feed],
    id: FromPath[str],  # noqa: A002 - the name in the path
) -> Post:
    """A stored post, also before its scheduled time."""
    return await feed.posts.find(id)


@delete("/v1/feed/posts/{id:str}", opt=WRITE)
async def delete_post(
    feed: NamedDependency[Feed],
    id: FromPath[str],  # noqa: A002 - the name in the path
) -> None:
    """Delete a post: pages omit it at once, and handlers of deletions run. Safe to repeat."""
    await feed.delete(id)


class RebuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that rebuilds the index."""

    job: int


@post("/v1/feed/rebuild", status_code=202, opt=WRITE)
async def rebuild_feed(feed: NamedDependency[Feed]) -> RebuildJob:
    """Enqueue a rebuild of the index in Valkey. Pages are served meanwhile."""
    return RebuildJob(job=await feed.index.rebuild())


@get("/v1/feed/verify", opt=READ)
async def verify_feed(
    feed: NamedDependency[Feed],
    sample: Annotated[int, QueryParameter(ge=1, le=SAMPLE_MAX)] = 1_000,
) -> FeedVerified:
    """Compare a sample of viewers and authors with PostgreSQL; empty `differences`: all match."""
    return await feed.index.verify(sample=sample)


@get("/v1/feed/stats", opt=READ)
async def get_feed_stats(feed: NamedDependency[Feed]) -> list[ShardState]:
    """State, oldest and newest post of each shard."""
    return await feed.index.stats()


@get("/v1/feed/viewers/{viewer:str}/why", opt=READ)
async def get_feed_why(
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    post_id: Annotated[str, QueryParameter(name="post", max_length=1_000)],
) -> PostWhy:
    """Whether the viewer's pages show the post, and all reasons: follow, mute, block, time."""
    return await feed.pages.why(viewer, post_id)
