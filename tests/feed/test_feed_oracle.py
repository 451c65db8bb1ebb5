"""Pages of random histories equal an oracle of plain dictionaries.

Equal times, deletions, mutes, trims, crowded buckets, and any cursor.
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


async def trim(history, feed):
    """Raise floor and fine to some moments of the history."""
    scores = sorted(score for score, _ in history.world.posts.values())
    if not scores:
        return
    marks = sorted(
        score // TICKS // FINE_MS * FINE_MS * TICKS for score in history.random.choices(scores, k=2)
    )
    for shard in range(feed.valkey.shards):
        await feed.valkey.trim(shard, floor=marks[0], fine=marks[1], buckets_max=100_000)
        if history.random.random() < 0.5:
            await feed.valkey.trim_posts(b"0")


async def run_history(history, feed, *, steps, pages, loses=0.0, trims=0.0):
    """Write and compare pages in turn. Return the number of compared pages."""
    checked = 0
    for _ in range(steps):
        await history.step()
        if history.random.random() < loses:
            await feed.valkey.drop()
        if history.random.random() < trims:
            await trim(history, feed)
        checked += await history.check(pages)
    return checked


@pytest.mark.slow
@pytest.mark.parametrize("size", [FEW, MANY, DENSE], ids=["few", "many", "dense"])
@pytest.mark.parametrize(("shards", "trims"), [(1, 0.0), (3, 0.1)], ids=["whole", "trimmed"])
async def test_pages_equal_the_oracle(make_feed, size, shards, trims):
    feed = make_feed(shards=shards, follows_max=10_000)
    history = History(feed, seed=shards, **size)
    assert await run_history(history, feed, steps=50, pages=8, trims=trims) == 400
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("days", [0.0003, 0.3], ids=["in seconds", "in hours"])
@pytest.mark.parametrize("age_days", [0, 30], ids=["today", "a month ago"])
async def test_pages_of_crowded_moments_equal_the_oracle_through_trims(make_feed, days, age_days):
    """Buckets of today are split by time, older ones by author; then `fine` passes them."""
    feed = make_feed(follows_max=10_000)
    until = datetime.now(UTC) - timedelta(days=age_days)
    history = History(feed, seed=13, days=days, until=until, **CROWDED)
    for number in range(4):
        await history.follow()
        await history.post(history.burst)
        if number:
            await trim(history, feed)
        await run_history(history, feed, steps=3, pages=15)
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
async def test_concurrent_writers_leave_the_index_equal_to_postgres(make_feed):
    feeds = [make_feed(shards=2) for _ in range(3)]
    draw = History(feeds[0], seed=5).random
    for number in range(30):
        writes = []
        for place, feed in enumerate(feeds):
            viewer, author = draw.choice([1, 2]), draw.choice([1, 2, 3])
            writes += [
                feed.post(author, f"p{place}-{number}"),
                draw.choice([feed.follow, feed.unfollow])(viewer, author),
                draw.choice([feed.follows.mute, feed.follows.unmute])(viewer, author),
            ]
        await asyncio.gather(*writes)
    verified = await feeds[0].index.verify()
    assert (verified.is_equal, verified.posts) == (True, 90)


@pytest.mark.soak
async def test_a_hundred_thousand_pages_equal_the_oracle(make_feed, sql):
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
        checked += await run_history(history, feed, steps=100, pages=40, loses=0.002, trims=0.03)
        assert (await feed.index.verify()).is_equal, seed
