"""Pages of random histories are what an oracle of plain dictionaries says.

Ties, deletions, mutes, trims, any cursor.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from feed_world import History

from headrace.feed.model import FINE_MS, TICKS

FEW = {"authors": 12, "most": 6}
MANY = {"authors": 400, "viewers": 3, "most": 300, "moments": 60}
DENSE = {"authors": 400, "viewers": 3, "most": 300, "moments": 8, "days": 0.02, "burst": 150}

CROWDED = {"authors": 700, "viewers": 2, "most": 700, "moments": 2_000, "burst": 600}


async def trimmed(history, feed):
    """Raise floor and fine to some moments of the history."""
    scores = sorted(score for score, _ in history.world.posts.values())
    if not scores:
        return
    marks = sorted(
        score // TICKS // FINE_MS * FINE_MS * TICKS
        for score in (history.random.choice(scores), history.random.choice(scores))
    )
    for shard in range(feed.valkey.shards):
        await feed.valkey.trim(shard, floor=marks[0], fine=marks[1], buckets_max=100_000)
        if history.random.random() < 0.5:
            await feed.valkey.trim_posts(b"0")


async def lived(history, feed, *, steps, pages, loses=0.0, trims=0.0):
    """A history with pages in between; how many pages were compared."""
    checked = 0
    for _ in range(steps):
        await history.step()
        if history.random.random() < loses:
            await feed.valkey.drop()
        if history.random.random() < trims:
            await trimmed(history, feed)
        checked += await history.check(pages)
    return checked


@pytest.mark.slow
@pytest.mark.parametrize("size", [FEW, MANY, DENSE], ids=["few", "many", "dense"])
@pytest.mark.parametrize("shards", [1, 3])
async def test_pages_are_right(make_feed, size, shards):
    feed = make_feed(shards=shards, follows_max=10_000)
    history = History(feed, seed=shards, **size)
    assert await lived(history, feed, steps=60, pages=10) == 600
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("size", [FEW, MANY, DENSE], ids=["few", "many", "dense"])
async def test_pages_are_right_through_trims(make_feed, size):
    feed = make_feed(shards=2, follows_max=10_000)
    history = History(feed, seed=7, **size)
    await lived(history, feed, steps=60, pages=8, trims=0.1)
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("days", [0.0003, 0.01, 0.3], ids=["in seconds", "in minutes", "in hours"])
@pytest.mark.parametrize("age_days", [0, 30], ids=["today", "a month ago"])
async def test_pages_of_crowded_moments_are_right_through_trims(make_feed, days, age_days):
    """Buckets split, today's by the clock, older ones by author; then `fine` moves past them."""
    feed = make_feed(follows_max=10_000)
    until = datetime.now(UTC) - timedelta(days=age_days)
    history = History(feed, seed=13, days=days, until=until, **CROWDED)
    for number in range(4):
        await history.follow()
        await history.post(history.burst)
        if number:
            await trimmed(history, feed)
        await lived(history, feed, steps=4, pages=15)
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
async def test_pages_are_right_while_the_index_is_lost_and_made(make_feed):
    feed = make_feed(shards=2)
    history = History(feed, seed=11, **FEW)
    for _ in range(4):
        await lived(history, feed, steps=10, pages=6)
        await feed.valkey.drop()
        assert (await feed.page(1)).is_slow
        await asyncio.gather(lived(history, feed, steps=10, pages=6), feed.index.rebuild_now())
        assert (await feed.index.verify()).is_equal
        assert not (await feed.page(1)).is_slow


@pytest.mark.slow
async def test_writers_side_by_side_leave_one_truth(make_feed):
    """Their changes meet the index in any order."""
    feeds = [make_feed(shards=2) for _ in range(3)]
    histories = [History(feed, seed=number, **FEW) for number, feed in enumerate(feeds)]
    for number, history in enumerate(histories):
        history.made = number * 1_000_000
    for _ in range(30):
        writes = []
        for history in histories:
            viewer, author = history.random.choice([1, 2]), history.random.choice([1, 2, 3])
            history.made += 1
            writes += [
                history.feed.post(author, f"p{history.made}"),
                history.random.choice([history.feed.follow, history.feed.unfollow])(viewer, author),
                history.random.choice([history.feed.follows.mute, history.feed.follows.unmute])(
                    viewer, author
                ),
            ]
        await asyncio.gather(*writes)
    verified = await feeds[0].index.verify()
    assert verified.is_equal
    assert verified.posts == 90


@pytest.mark.soak
async def test_a_hundred_thousand_pages_are_right(make_feed, sql):
    checked, seed = 0, 1_000
    while checked < 100_000:
        seed += 1
        await sql(
            "TRUNCATE headrace.feed_post, headrace.feed_follow, headrace.feed_mute_block,"
            " headrace.feed_version, headrace.feed_outbox"
        )
        feed = make_feed(shards=2, follows_max=10_000)
        await feed.index.rebuild_now(clean=True)
        history = History(feed, seed=seed, **(FEW, MANY, DENSE)[seed % 3])
        checked += await lived(history, feed, steps=100, pages=40, loses=0.002, trims=0.03)
        assert (await feed.index.verify()).is_equal, seed
