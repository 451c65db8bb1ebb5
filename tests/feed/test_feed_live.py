"""New posts while one watches: told once, in order, also after the connection broke.

A stop ends the streams.
"""

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
    """A service that looks often."""
    feed = make_feed(live_every_s=0.02)
    feed.register(registry)
    return feed


class Stream:
    """The events of one connection."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.last_id = None
        self._lines = answer.aiter_lines()

    async def block(self):
        """The next block of lines, as a dict of fields."""
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
        """The posts of the next event that has some."""
        while True:
            fields = await self.block()
            if "data" in fields:
                assert fields["event"] == "posts"
                return [post["id"] for post in json.loads(fields["data"])["posts"]]


@asynccontextmanager
async def watching(client, viewer, *, last_id=None, query=""):
    """A stream whose reader has been told that it began."""
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


async def test_what_is_posted_while_one_watches_is_told(engines, feed):
    await feed.follow(7, [100, "ann"])
    await feed.post(100, "old")
    async with client_of(engines, feed) as client, watching(client, 7) as stream:
        await feed.post("ann", "p1")
        assert await stream.posts() == ["p1"]
        await feed.posts.add([NewPost(author=100, id="p2"), NewPost(author=5, id="nobody")])
        assert await stream.posts() == ["p2"]
        await feed.follows.mute(7, 100)
        await feed.post(100, "unheard")
        await feed.post("ann", "p3")
        assert await stream.posts() == ["p3"]


async def test_a_feed_without_posts_can_be_watched(engines, feed):
    await feed.follow("bob", 100)
    async with client_of(engines, feed) as client, watching(client, "bob") as stream:
        await feed.post(100, "p1")
        assert await stream.posts() == ["p1"]


async def test_a_reader_that_comes_again_gets_what_it_missed_and_nothing_twice(engines, feed):
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


async def test_a_stream_has_an_end_so_that_tokens_are_looked_at_again(engines, feed, monkeypatch):
    monkeypatch.setattr("headrace.feed.http.posts.LIFE_S", 0.1)
    await feed.follow(7, 100)
    async with client_of(engines, feed) as client:
        async with watching(client, 7) as stream:
            with pytest.raises(EOFError):
                await stream.posts()
        await feed.post(100, "p1")
        async with watching(client, 7, query=f"?since={stream.last_id}") as again:
            assert await again.posts() == ["p1"]


async def test_who_may_not_watch_is_told_before_the_stream(engines, feed):
    async with client_of(engines, feed) as client:
        for path, headers, told in (
            ("b%20b", {}, "422 feed.invalid_id"),
            ("7", {"last-event-id": "bm9uZQ"}, "400 cursor.invalid"),
        ):
            answer = await client.get(f"/v1/feed/viewers/{path}/live", headers=headers)
            assert f"{answer.status_code} {answer.json()['code']}" == told
        head = await client.head("/v1/feed/viewers/7/live")
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.slow
async def test_a_server_that_stops_ends_the_streams_at_once(engines, feed):
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    await feed.follow(7, 100)
    async with client_of(engines, feed, stop=stop) as client, watching(client, 7) as stream:
        began_s = loop.time()
        stop.set()
        with pytest.raises((EOFError, httpx.RemoteProtocolError)):
            await stream.posts()
    # Requests under way have 5 s; a stream would take them all.
    assert loop.time() - began_s < 4.5
