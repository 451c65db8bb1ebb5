"""An author of many posts is put into the index and proved in parts.

Nothing is missing meanwhile, and no change gets lost.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from headrace.feed.model import SCORE_MAX, TICKS, Change, Kind
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
    """A feed with one author of many posts, three a millisecond, and his follower."""
    await feed.follow(7, 1)
    await sql(FILL)
    await feed.index.rebuild_now(clean=True)
    return feed


async def newest(feed):
    page = await feed.page(7, 200)
    assert not page.is_slow
    return [post.id for post in page.posts]


def test_parts_reach_over_all_and_split_no_score():
    scores = [1] * POSTS_AT_ONCE + [2] * 10 + list(range(3, 2 * POSTS_AT_ONCE))
    items = [f"p{n}" for n in range(len(scores))]
    parts = list(parts_of(Change(Kind.POSTS, 1, 1, items[::-1], scores[::-1])))
    assert len(parts) == 4
    assert (parts[0].first, parts[-1].last) == (0, SCORE_MAX)
    for before, after in pairwise(parts):
        assert after.first == before.last + 1
    for part in parts:
        assert all(part.first <= score <= part.last for score, _ in part.posts)
    assert sorted(post for part in parts for _, post in part.posts) == sorted(items)
    one = Change(Kind.POSTS, 1, 1, ["a"], [5])
    assert list(parts_of(one)) == [Part(0, SCORE_MAX, [(5, "a")])]


@pytest.mark.slow
async def test_many_posts_of_one_author_are_put_and_proved(many, engines):
    verified = await many.index.verify()
    assert (verified.is_equal, verified.posts) == (True, MANY)
    assert await newest(many) == [f"p{n:09}" for n in range(MANY, MANY - 200, -1)]
    key = f"{engines.valkey.prefix}:{{f:0}}:p:1"
    await engines.valkey.command("ZREMRANGEBYRANK", key, 5_500, 5_600)
    await engines.valkey.command("ZADD", key, 2**52, "stray")
    [differs] = (await many.index.verify()).differences
    assert (differs.missing, differs.extra) == (101 + LEVELS, 1), "no bucket knows of the stray"
    await many.index.rebuild_now()
    assert (await many.index.verify()).is_equal


@pytest.mark.slow
async def test_writes_in_between_parts_are_not_lost(many):
    async def write():
        for number in range(60):
            await many.post(1, f"new{number}")
            assert (await newest(many))[0] == f"new{number}"
            await many.delete([f"p{number * 200 + 1:09}", f"new{number - 1}"])
            assert f"new{number - 1}" not in await newest(many)

    async def rebuild():
        for _ in range(6):
            await many.index.rebuild_now()

    await asyncio.gather(write(), rebuild())
    verified = await many.index.verify()
    assert (verified.is_equal, verified.posts) == (True, MANY - 60 + 1)


@pytest.mark.slow
async def test_whoever_finds_a_part_missing_puts_the_whole(many, engines):
    """As where a process died between two parts.

    No change is the next one, and no page lacks anything.
    """
    start = f"{engines.valkey.prefix}:{{f:0}}:"
    before = await newest(many)
    await engines.valkey.command("ZADD", f"{start}p:1", 0, "")
    words = ["headrace_feed_put_posts_part_v1", 2, f"{start}p:1", f"{start}m"]
    upto = 1_772_000_000_000 * TICKS
    assert await engines.valkey.command("FCALL", *words, 1, 1, 0, upto, 0) == [b"ok", 0, 0]
    assert await newest(many) == before
    change = Change(Kind.POSTS, 1, 2, ["new"], [upto])
    assert (await many.valkey.change(0, change))[0] == "gap"
    late = [*words, 1, 1, upto + 1, SCORE_MAX, 1]
    await engines.valkey.command("ZADD", f"{start}p:1", 0, "")
    assert (await engines.valkey.command("FCALL", *late))[0] == b"old"
    await engines.valkey.command("ZADD", f"{start}p:1", -0.5, "")
    await many.post(1, "new")
    assert await newest(many) == ["new", *before[:-1]]
    assert (await many.index.verify()).is_equal
