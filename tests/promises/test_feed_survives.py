"""Valkey loses the feed's index or its end: pages are right all the time, and the index returns.

`test_storms` kills writers between the engines, the sweep and both engines.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.kit.stock_valkey import OwnValkey
from tests.kit.storm.room_feed import AUTHORS, VIEWERS, open_feed
from tests.kit.waiting import wait_true

from headrace.feed.worker import Sweeper

pytestmark = pytest.mark.slow
UNDONE = {1: {"a2", "b1", "c1"}, 2: {"b1", "c1"}, 3: {"a2", "c1"}, 4: set()}
"""The posts of each viewer after a deletion, an unfollow, a block and the end of all follows."""


@pytest.fixture
def server(tmp_path_factory):
    """A Valkey of this test; a short path, because sockets are in it."""
    folder = tmp_path_factory.mktemp("v")
    server = OwnValkey(folder / "v", folder / "link")
    server.start()
    yield server
    server.end()


def _empty(server):
    assert server.command("FLUSHALL") == b"OK"


def _kill(server):
    server.kill()
    server.start()


def _cut(server):
    """As a power cut: the end of the append-only file is lost."""
    server.kill()
    server.cut_tail(lost_bytes=3_000)
    server.start()


class Load:
    """Writers and readers of a feed."""

    def __init__(self, feed):
        self.feed, self.chance, self.stop = feed, random.Random(1), asyncio.Event()
        self.made = self.pages = 0

    async def write(self):
        verb = self.chance.choices(["post", "delete", "follow", "unfollow"], [6, 2, 4, 2])[0]
        viewer, author = self.chance.choice(VIEWERS), self.chance.choice(AUTHORS)
        if verb == "post":
            self.made += 1
            await self.feed.post(author, f"p{self.made}")
        elif verb == "delete":
            await self.feed.delete(f"p{self.chance.randint(1, self.made + 1)}")
        else:
            await getattr(self.feed.follows, verb)(viewer, author)

    async def read(self):
        page = await self.feed.page(self.chance.choice(VIEWERS), 20)
        times = [post.at for post in page.posts]
        assert times == sorted(times, reverse=True)
        self.pages += 1

    async def repeat(self, step):
        while not self.stop.is_set():
            await step()
            await asyncio.sleep(0)


async def test_a_valkey_emptied_killed_and_cut_under_load_is_refilled(
    server, database_url, tmp_path
):
    """Every page is answered. After each fault they come from the index again."""
    feed, engines = open_feed(database_url, server.url, "test", tmp_path)
    load, sweeper = Load(feed), Sweeper(feed)
    for _ in range(150):
        await load.write()

    async def is_fast():
        return not (await feed.page(1)).is_slow

    steps = [load.repeat(step) for step in (load.write, load.write, load.read, load.read)]
    running = [asyncio.create_task(step) for step in (*steps, sweeper.run(load.stop))]
    try:
        for harm in (_empty, _kill, _cut, _empty):
            before = load.pages
            await asyncio.to_thread(harm, server)
            feed.index.require_ready()
            await wait_true(is_fast, what="pages come from the index")
            await wait_true(lambda b=before: load.pages > b + 20, what="pages are answered")
    finally:
        load.stop.set()
        await asyncio.gather(*running)
    await sweeper.run_once(older_s=0)
    verified = await feed.index.verify()
    assert verified.is_equal, verified.differences
    await engines.close()


@pytest.mark.parametrize("harm", ["away", "tail"])
async def test_a_restarted_valkey_shows_nothing_that_was_undone(
    server, database_url, tmp_path, harm
):
    """Changes made while it was down, or in the lost end of its file, are on every page.

    No flusher runs: readers rebuild the index.
    """
    opened = [open_feed(database_url, server.url, "test", tmp_path) for _ in range(3)]
    feed, other, third = (one for one, _ in opened)
    for author, post in ((11, "a1"), (11, "a2"), (12, "b1"), (13, "c1")):
        await feed.post(author, post)
    for viewer in UNDONE:
        await feed.follow(viewer, [11, 12, 13])
    for one, viewer in [*((feed, viewer) for viewer in UNDONE), (other, 1)]:
        page = await one.page(viewer)
        assert (page.is_slow, {post.id for post in page.posts}) == (False, {"a1", "a2", "b1", "c1"})
    kept = server.file_bytes()
    if harm == "away":
        await asyncio.to_thread(server.kill)
    assert await feed.delete("a1") == 1
    assert await feed.unfollow(2, 11) == 1
    assert await feed.follows.block(12, 3) == 1
    assert await feed.follows.unfollow_all(4) == 3
    if harm == "tail":
        await wait_true(lambda: server.file_bytes() > kept, what="the changes are in the file")
        await asyncio.to_thread(server.kill)
        server.cut_tail(at=kept)
    await asyncio.to_thread(server.start)

    async def are_fast():
        pairs = [(reader, viewer) for reader in (feed, other, third) for viewer in UNDONE]
        pages = [(viewer, await reader.page(viewer)) for reader, viewer in pairs]
        assert all({post.id for post in page.posts} == UNDONE[viewer] for viewer, page in pages)
        return not any(page.is_slow for _, page in pages)

    await wait_true(are_fast, what="pages come from the index", deadline_s=20)
    verified = await feed.index.verify()
    assert verified.is_equal, verified.differences
    for _, engines in opened:
        await engines.close()
