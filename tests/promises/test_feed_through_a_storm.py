"""Writers, the sweep and both engines are killed again and again under load.

Pages are the truth, during it and after it.

Of all that was answered nothing is missing on the next page of somebody who follows everybody, and
nothing that was deleted is there again; a process that alone could not reach Valkey may be late,
and then says so in its log.
"""

from __future__ import annotations

import asyncio

import pytest
from feed_storm import STEADY, feed_storm
from tests.kit.waiting import wait_true
from written_feed import VIEWERS

from headrace.engines.sql import compile_query

PARTS = (
    *("crash", "writer", "crash", "flusher", "backend"),
    *("writer", "crash", "valkey", "writer", "crash"),
    *("flusher", "backend", "crash", "writer", "postgres"),
)
"""A hundred kills.

35 between commit and index, 27 of writers, 13 of the sweep, 6 of Valkey, 13 and 6 of PostgreSQL.
"""
WRITES, PAGES = 25, 4
TRUTH = compile_query(
    "truth",
    "-- A viewer's whole feed.\n"
    "SELECT p.id FROM headrace.feed_follow f JOIN headrace.feed_post p ON p.author = f.author"
    " WHERE f.viewer = :viewer AND f.is_shown AND p.state = 0 ORDER BY p.score DESC, p.id DESC",
)
POSTS = compile_query("posts", "-- Posts.\nSELECT id FROM headrace.feed_post")


@pytest.mark.soak
async def test_a_hundred_kills_leave_pages_that_are_the_truth(tmp_path):
    await _through(tmp_path, kills=100)


@pytest.mark.soak
async def test_each_kind_of_kill_leaves_pages_that_are_the_truth(tmp_path):
    await _through(tmp_path, kills=len(PARTS))


async def _through(folder, *, kills):
    async with feed_storm(folder) as storm:
        stop = asyncio.Event()
        readers = [asyncio.create_task(storm.read(stop)) for _ in range(2)]
        try:
            for number in range(kills):
                await _loaded(storm, readers)
                await getattr(storm, f"kill_{PARTS[number % len(PARTS)]}")()
            await _loaded(storm, readers)
        finally:
            stop.set()
            await asyncio.gather(*readers)
        await storm.settle()
        print(
            f"{kills} kills, {storm.answered()} writes were answered, {storm.pages} pages told,"
            f" {storm.late} late, {storm.refused} refused"
        )
        verified = await storm.feed.index.verify()
        assert verified.is_equal, verified.differences
        for viewer in (*VIEWERS, STEADY):
            rows = await storm.postgres.all(TRUTH, viewer=viewer)
            assert await _feed_of(storm.feed, viewer) == [row["id"] for row in rows]
        await _require_told(storm)
        assert not storm.late or "feed_change_deferred" in (folder / "writers.log").read_text()


async def _loaded(storm, readers):
    """Wait until more writes were answered, and more pages."""
    writes, pages = storm.answered(), storm.pages

    def has_more():
        for reader in readers:
            if reader.done():
                reader.result()
        return storm.answered() >= writes + WRITES and storm.pages >= pages + PAGES

    await wait_true(has_more, what="writes and pages go on")


async def _feed_of(feed, viewer):
    found, cursor = [], None
    while True:
        page = await feed.page(viewer, 200, cursor=cursor)
        assert not page.is_slow, "from the index"
        found += [post.id for post in page.posts]
        cursor = page.next
        if cursor is None:
            return found


async def _require_told(storm):
    """What was answered is in the truth."""
    stored = {row["id"] for row in await storm.postgres.all(POSTS)}
    posted = {post for told in storm.told for post in told.posted}
    deleting = set().union(*[told.deleting for told in storm.told])
    deleted = {post for told in storm.told for post in told.deleted}
    assert posted - deleting <= stored
    assert not deleted & stored
