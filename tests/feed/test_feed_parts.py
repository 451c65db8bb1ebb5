"""An author of many posts is indexed and verified in parts, while pages and writes continue."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from feed_world import ids

from headrace.feed.model import SCORE_MAX, TICKS, Change, ChangeKind
from headrace.feed.valkey_store import POSTS_AT_ONCE, Part, parts_of

MANY, TIED, LEVELS = 12_000, 3, 7
FILL = f"""
WITH made AS (
    INSERT INTO headrace.feed_post (id, author, score, state, visible_at)
    SELECT 'p' || lpad(n::text, 9, '0'), 1, (1772000000000 + n / {TIED}) * {TICKS}, 0, now()
    FROM generate_series(1, {MANY}) n RETURNING author
)
INSERT INTO headrace.feed_version SELECT DISTINCT 1, author, 1 FROM made
"""


@pytest.fixture
async def many(feed, sql):
    """A feed with one author of many posts, three a millisecond, and one follower."""
    await feed.follow(7, 1)
    await sql(FILL)
    await feed.index.rebuild_now(clean=True)
    return feed


def test_parts_cover_all_scores_and_split_none():
    scores = [1] * POSTS_AT_ONCE + [2] * 10 + list(range(3, 2 * POSTS_AT_ONCE))
    items = [f"p{n}" for n in range(len(scores))]
    parts = list(parts_of(Change(ChangeKind.POSTS, 1, 1, items[::-1], scores[::-1])))
    assert len(parts) == 4
    assert (parts[0].first, parts[-1].last) == (0, SCORE_MAX)
    assert all(after.first == before.last + 1 for before, after in pairwise(parts))
    assert all(part.first <= score <= part.last for part in parts for score, _ in part.posts)
    assert sorted(post for part in parts for _, post in part.posts) == sorted(items)
    one = Change(ChangeKind.POSTS, 1, 1, ["a"], [5])
    assert list(parts_of(one)) == [Part(0, SCORE_MAX, [(5, "a")])]
    none = Change(ChangeKind.POSTS, 1, 1, [], [])
    assert list(parts_of(none)) == [Part(0, SCORE_MAX, [])]


@pytest.mark.slow
async def test_many_posts_of_one_author_are_indexed_and_verified(many, engines):
    verified = await many.index.verify()
    assert (verified.is_equal, verified.posts) == (True, MANY)
    newest = [f"p{n:09}" for n in range(MANY, MANY - 200, -1)]
    assert await ids(many, 7, limit=200) == newest
    key = f"{engines.valkey.prefix}:{{f:0}}:p:1"
    await engines.valkey.command("ZREMRANGEBYRANK", key, 5_500, 5_600)
    await engines.valkey.command("ZADD", key, 2**52, "stray")
    [differs] = (await many.index.verify()).differences
    assert (differs.missing, differs.extra) == (101 + LEVELS, 1), "no bucket has the stray post"
    await many.index.rebuild_now()
    assert (await many.index.verify()).is_equal


@pytest.mark.slow
async def test_writes_between_parts_are_not_lost(many):
    async def write():
        for number in range(40):
            await many.post(1, f"new{number}")
            page = await many.page(7, 200)
            assert (page.posts[0].id, page.is_slow) == (f"new{number}", False)
            await many.delete([f"p{number * 200 + 1:09}", f"new{number - 1}"])
            assert f"new{number - 1}" not in await ids(many, 7, limit=200)

    async def rebuild():
        for _ in range(4):
            await many.index.rebuild_now()

    await asyncio.gather(write(), rebuild())
    verified = await many.index.verify()
    assert (verified.is_equal, verified.posts) == (True, MANY - 40 + 1)


@pytest.mark.slow
async def test_after_a_crash_between_two_parts_the_next_writer_puts_all(many, engines):
    """Meanwhile no change is accepted as the next one, and no page lacks a post."""
    start = f"{engines.valkey.prefix}:{{f:0}}:"
    before = await ids(many, 7, limit=200)
    await engines.valkey.command("ZADD", f"{start}p:1", 0, "")
    words = ["FCALL", "headrace_feed_put_posts_v1", 2, f"{start}p:1", f"{start}m", 1, 1]
    upto = 1_772_000_000_000 * TICKS
    assert await engines.valkey.command(*words, 0, upto, 0) == [b"ok", 0, 0]
    assert await ids(many, 7, limit=200) == before
    change = Change(ChangeKind.POSTS, 1, 2, ["new"], [upto])
    assert (await many.valkey.change(0, change))[0] == "gap"
    await engines.valkey.command("ZADD", f"{start}p:1", 0, "")
    assert (await engines.valkey.command(*words, upto + 1, SCORE_MAX, 1))[0] == b"old"
    await engines.valkey.command("ZADD", f"{start}p:1", -0.5, "")
    await many.post(1, "new")
    assert await ids(many, 7, limit=200) == ["new", *before[:-1]]
    assert (await many.index.verify()).is_equal
