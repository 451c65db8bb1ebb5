"""What a page costs where many posts are close together.

Few commands, however many authors or posts there are.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from valkey.asyncio import Valkey

from headrace.feed import NewPost
from headrace.feed.model import TICKS, Position

AUTHORS, EACH, TIED = 3_000, 2, 3_000
MINUTE_MS = 60_000
BEGAN_MS = 1_772_000_000_000
READS_MAX = 320
"""A bucket has up to 256 authors; some are read twice."""
CROWD = f"""
WITH made AS (
    INSERT INTO headrace.feed_post (id, author, score, state, visible_at)
    SELECT 'p' || lpad(n::text, 9, '0'), 1 + n % {AUTHORS},
           ({{began_ms}} + n * 10) * {TICKS}, 0, now()
    FROM generate_series(1, {AUTHORS * EACH}) n RETURNING author
)
INSERT INTO headrace.feed_version SELECT DISTINCT 1, author, 1 FROM made
"""
TIE = f"""
WITH made AS (
    INSERT INTO headrace.feed_post (id, author, score, state, visible_at)
    SELECT 'p' || lpad(n::text, 9, '0'), 1, {BEGAN_MS * TICKS}, 0, now()
    FROM generate_series(1, {TIED}) n RETURNING author
)
INSERT INTO headrace.feed_version SELECT DISTINCT 1, author, 1 FROM made
"""


@asynccontextmanager
async def reads_of(engines, url):
    """Count the range reads on this test's keys while the block lasts."""
    found = []
    client = Valkey.from_url(url)
    try:
        async with client.monitor() as monitor:
            yield found
            await engines.valkey.command("ECHO", engines.valkey.prefix)
            while (words := (await monitor.next_command())["command"]) != (
                f"ECHO {engines.valkey.prefix}"
            ):
                if words.startswith(f"ZRANGE {engines.valkey.prefix}:"):
                    found.append(words)
    finally:
        await client.aclose()


def posts_before(number):
    """Ids of a page of 20 below a post."""
    return [f"p{n:09}" for n in range(number - 1, number - 21, -1)]


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [True, False], ids=["a month ago", "today"])
async def test_a_page_reads_few_of_the_authors_of_a_crowded_minute(
    feed, sql, engines, running_engines, is_old
):
    [now] = await sql("SELECT (extract(epoch FROM now()) * 1000)::bigint - 3600000 AS ms")
    began_ms = now["ms"] - (30 * 86_400_000 if is_old else 0)
    await feed.follow(7, range(1, AUTHORS + 1))
    await sql(CROWD.format(began_ms=began_ms))
    await feed.index.rebuild_now(clean=True)
    for number in (AUTHORS * EACH, AUTHORS * EACH // 2, 2_345):
        position = Position((began_ms + number * 10) * TICKS, f"p{number:09}")
        async with reads_of(engines, running_engines.endpoints.valkey_url) as reads:
            found = await feed.valkey.page(0, 7, limit=20, before=position, after=None)
        assert [post.id for post in found.posts] == posts_before(number)
        assert 0 < len(reads) <= READS_MAX
    assert (await feed.index.verify(sample=20)).is_equal


@pytest.mark.slow
async def test_posts_that_come_now_split_their_buckets(feed, engines, running_engines):
    await feed.follow(7, range(1, 601))
    for author in range(1, 601):
        await feed.post(author, f"p{author:09}")
    async with reads_of(engines, running_engines.endpoints.valkey_url) as reads:
        assert [post.id for post in (await feed.page(7)).posts] == posts_before(601)
    assert 0 < len(reads) <= READS_MAX
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
async def test_a_page_skips_the_newer_ones_of_many_posts_of_one_moment(
    feed, sql, engines, running_engines
):
    await feed.follow(7, 1)
    await sql(TIE)
    await feed.index.rebuild_now(clean=True)
    async with reads_of(engines, running_engines.endpoints.valkey_url) as reads:
        position = Position(BEGAN_MS * TICKS, "p000000500")
        found = await feed.valkey.page(0, 7, limit=20, before=position, after=None)
    assert [post.id for post in found.posts] == posts_before(500)
    assert 0 < len(reads) <= 20


@pytest.mark.slow
async def test_posts_of_one_call_do_not_weigh_more(feed, engines):
    """They all are in one bucket after another; of those in between only the mark is kept."""
    await feed.follow(7, range(1, 601))
    made = [NewPost(author=author, id=f"p{author:09}") for author in range(1, 601)]
    await feed.posts.add(made)
    assert [post.id for post in (await feed.page(7)).posts] == posts_before(601)
    start = f"{engines.valkey.prefix}:{{f:0}}:"
    noted = 0
    for key in await engines.valkey.command("KEYS", f"{start}b:-*"):
        noted += await engines.valkey.command("SCARD", key)
    assert noted <= 2 * len(made)
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
async def test_authors_of_one_moment_are_not_noted_in_ever_finer_buckets(feed, sql, engines):
    """No bucket is so fine that it would tell them apart."""
    await sql(CROWD.format(began_ms=BEGAN_MS).replace("(1772000000000 + n * 10)", str(BEGAN_MS)))
    await feed.index.rebuild_now(clean=True)
    start = f"{engines.valkey.prefix}:{{f:0}}:"
    keys = await engines.valkey.command("KEYS", f"{start}b:*")
    levels = {int(key.decode().removeprefix(f"{start}b:").split(":")[0]) for key in keys}
    assert levels == {2, 3, 4, 5, 6}
    assert (await feed.index.verify(sample=20)).is_equal
