"""The route that tells a viewer of new posts while he watches: server-sent events.

Each event has the posts that came since the one before and its id is the place of the newest, so a reader whose connection
broke sends it back as Last-Event-ID (browsers do so by themselves) and gets what it missed. Posts are looked for every
`feed.live_every`, one page call a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery
from litestar.response import ServerSentEvent
from litestar.response.sse import ServerSentEventMessage

from headrace.feed.http.scopes import READ
from headrace.feed.service import Feed, Watch
from headrace.feed.shown import PostShown, post_shown
from headrace.kernel.errors import Unavailable
from headrace.kernel.routes import ENDLESS

RETRY_MS: Final = 2_000
"""After so long a browser comes again."""
BEAT_S: Final = 15.0
"""A comment is sent so often while nothing happens, so that nobody in between takes the connection for dead."""
LIFE_S: Final = 600.0
"""A stream ends after so long; its reader comes again, and his token is looked at again."""
MEDIA_TYPE: Final = "text/event-stream"
_ENCODER: Final = msgspec.json.Encoder()


class NewPosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The data of an event: new posts, newest first. `is_cut`: there were more, so read the page instead."""

    posts: list[PostShown]
    is_cut: bool = False


@get(
    "/v1/feed/viewers/{viewer:str}/live",
    operation_id="watchFeed",
    summary="Be told of new posts",
    media_type=MEDIA_TYPE,
    opt=READ,
)
async def get_live(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    since: FromQuery[str | None] = None,
) -> Response[Any]:
    """Server-sent events, `posts` with a list of those that are new, from now on, or from Last-Event-ID or `since=` on.

    Deletions are not told; the page knows them.
    """
    watch = await feed.watch(viewer, since=request.headers.get("last-event-id") or since)
    if request.scope.get("is_head"):
        return Response(b"", media_type=MEDIA_TYPE)
    request.scope[ENDLESS] = True  # type: ignore[typeddict-unknown-key]
    answer: Response[Any] = ServerSentEvent(events_of(watch, every_s=feed.config.live_every_s))
    return answer


async def events_of(watch: Watch, *, every_s: float) -> AsyncIterator[ServerSentEventMessage]:
    """What is sent, until the reader goes or LIFE_S are over."""
    yield ServerSentEventMessage(data=None, retry=RETRY_MS, id=watch.place, comment="from now on")
    loop = asyncio.get_running_loop()
    beat_s, ends_s = loop.time() + BEAT_S, loop.time() + LIFE_S
    while loop.time() < ends_s:
        await asyncio.sleep(every_s)
        try:
            found = await watch.look()
        except Unavailable:
            # Engines that are away for a while are no reason to send every reader away at once.
            found = None
        if found is not None and found.posts:
            told = NewPosts(posts=[post_shown(post) for post in found.posts], is_cut=found.is_cut)
            text = _ENCODER.encode(told).decode()
            yield ServerSentEventMessage(data=text, event="posts", id=watch.place)
            beat_s = loop.time() + BEAT_S
        elif loop.time() >= beat_s:
            yield ServerSentEventMessage(data=None, comment="still here")
            beat_s = loop.time() + BEAT_S


ROUTES: Final[list[Any]] = [get_live]
