"""Live streams: each new post once and in order, also after a broken connection."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from feed_surfaces import client_of

from headrace.feed import NewPost


@pytest.fixture
def feed(make_feed, registry):
    """A service with a short period of live checks."""
    feed = make_feed(live_every_s=0.02)
    feed.register(registry)
    return feed


class Stream:
    """The events of one connection."""

    def __init__(self, answer) -> None:
        self.last_id = None
        self._lines = answer.aiter_lines()

    async def block(self):
        """The fields of the next event. Raises: EOFError at the end of the stream."""
        fields = {}
        async with asyncio.timeout(60):
            async for line in self._lines:
                if not line:
                    self.last_id = fields.get("id", self.last_id)
                    return fields
                name, _, value = line.partition(":")
                fields[name or "comment"] = value.strip()
        raise EOFError

    async def posts(self):
        """The posts of the next event that has any."""
        while "data" not in (fields := await self.block()):
            pass
        assert fields["event"] == "posts"
        return [post["id"] for post in json.loads(fields["data"])["posts"]]


@asynccontextmanager
async def watching(client, viewer, *, last_id=None, query=""):
    """A stream after its first event."""
    headers = {} if last_id is None else {"last-event-id": last_id}
    path = f"/v1/feed/viewers/{viewer}/live{query}"
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        stream = Stream(answer)
        first = await stream.block()
        assert first["retry"] == "2000"
        assert stream.last_id == first["id"]
        yield stream


async def test_a_subscriber_receives_each_visible_post(engines, feed):
    await feed.follow(7, [100, "ann"])
    async with client_of(engines, feed) as client, watching(client, 7) as stream:
        await feed.post("ann", "p1")
        assert await stream.posts() == ["p1"]
        await feed.posts.add([NewPost(author=100, id="p2"), NewPost(author=5, id="hidden")])
        assert await stream.posts() == ["p2"]
        await feed.follows.mute(7, 100)
        await feed.post(100, "muted")
        await feed.post("ann", "p3")
        assert await stream.posts() == ["p3"]


async def test_a_new_connection_continues_after_the_last_event(engines, feed):
    await feed.follow(7, 100)
    async with client_of(engines, feed) as client:
        async with watching(client, 7) as stream:
            await feed.post(100, "p1")
            assert await stream.posts() == ["p1"]
        await feed.post(100, "p2")
        await feed.post(100, "p3")
        async with watching(client, 7, last_id=stream.last_id) as again:
            assert await again.posts() == ["p3", "p2"]
            await feed.post(100, "p4")
            assert await again.posts() == ["p4"]
        newest = (await feed.page(7)).newest
        await feed.post(100, "p5")
        async with watching(client, 7, query=f"?since={newest}") as since:
            assert await since.posts() == ["p5"]


async def test_a_stream_ends_after_its_lifetime_so_that_tokens_are_checked(
    engines, feed, monkeypatch
):
    monkeypatch.setattr("headrace.feed.http.posts.LIFE_S", 0.1)
    await feed.follow(7, 100)
    async with client_of(engines, feed) as client:
        async with watching(client, 7) as stream:
            with pytest.raises(EOFError):
                await stream.posts()
        await feed.post(100, "p1")
        async with watching(client, 7, query=f"?since={stream.last_id}") as again:
            assert await again.posts() == ["p1"]
        head = await client.head("/v1/feed/viewers/7/live")
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.slow
async def test_a_stopping_server_ends_its_streams_at_once(engines, feed):
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    await feed.follow(7, 100)
    async with client_of(engines, feed, stop=stop) as client, watching(client, 7) as stream:
        began_s = loop.time()
        stop.set()
        with pytest.raises((EOFError, httpx.RemoteProtocolError)):
            await stream.posts()
    assert loop.time() - began_s < 4.5, "a stop waits 5 s for open requests"
