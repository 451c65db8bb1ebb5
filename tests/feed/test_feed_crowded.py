"""The cost of a page where many posts have near or equal times: few reads of authors."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from feed_world import ids
from valkey.asyncio import Valkey

from headrace.feed import NewPost
from headrace.feed.model import TICKS, Position

AUTHORS, POSTS, TIED = 3_000, 6_000, 3_000
BEGAN_MS = 1_772_000_000_000
READS_MAX = 320
"""A bucket has up to 256 authors; some are read twice."""
pytestmark = pytest.mark.slow


def insert(posts, author, ms):
    """A statement that inserts posts: their number, and SQL of author and time of post n."""
    return f"""
WITH made AS (
    INSERT INTO headrace.feed_post (id, author, score, state, visible_at)
    SELECT 'p' || lpad(n::text, 9, '0'), {author}, ({ms}) * {TICKS}, 0, now()
    FROM generate_series(1, {posts}) n RETURNING author
)
INSERT INTO headrace.feed_version SELECT DISTINCT 1, author, 1 FROM made
"""


@pytest.fixture
def reads_of(engines, running_engines):
    """Count the range reads of this test's keys while a block lasts."""

    @asynccontextmanager
    async def reads():
        found, start = [], f"ZRANGE {engines.valkey.prefix}:"
        client = Valkey.from_url(running_engines.endpoints.valkey_url)
        try:
            async with client.monitor() as monitor:
                yield found
                last = f"ECHO {engines.valkey.prefix}"
                await engines.valkey.command(*last.split())
                while (words := (await monitor.next_command())["command"]) != last:
                    if words.startswith(start):
                        found.append(words)
        finally:
            await client.aclose()

    return reads


def posts_before(number):
    """Ids of a page of 20 below a post."""
    return [f"p{n:09}" for n in range(number - 1, number - 21, -1)]


async def bucket_keys(engines, pattern):
    return await engines.valkey.command("KEYS", f"{engines.valkey.prefix}:{{f:0}}:b:{pattern}")


@pytest.mark.parametrize("is_old", [True, False], ids=["a month ago", "today"])
async def test_a_page_reads_few_authors_of_a_crowded_minute(feed, sql, reads_of, is_old):
    [now] = await sql("SELECT (extract(epoch FROM now()) * 1000)::bigint - 3600000 AS ms")
    began_ms = now["ms"] - (30 * 86_400_000 if is_old else 0)
    await feed.follow(7, range(1, AUTHORS + 1))
    await sql(insert(POSTS, f"1 + n % {AUTHORS}", f"{began_ms} + n * 10"))
    await feed.index.rebuild_now(clean=True)
    for number in (POSTS, POSTS // 2, 2_345):
        position = Position((began_ms + number * 10) * TICKS, f"p{number:09}")
        async with reads_of() as reads:
            found = await feed.valkey.page(7, limit=20, before=position, after=None)
        assert [post.id for post in found.posts] == posts_before(number)
        assert 0 < len(reads) <= READS_MAX
    assert (await feed.index.verify(sample=20)).is_equal


@pytest.mark.parametrize("is_one_call", [True, False], ids=["one call", "a call each"])
async def test_new_posts_split_their_buckets(feed, engines, reads_of, is_one_call):
    await feed.follow(7, range(1, 601))
    posts = [NewPost(author=author, id=f"p{author:09}") for author in range(1, 601)]
    for call in [posts] if is_one_call else [[post] for post in posts]:
        await feed.posts.add(call)
    async with reads_of() as reads:
        assert await ids(feed, 7) == posts_before(601)
    assert 0 < len(reads) <= READS_MAX
    if is_one_call:
        keys = await bucket_keys(engines, "-*")
        noted = sum([await engines.valkey.command("SCARD", key) for key in keys])
        assert noted <= 2 * len(posts), "between the levels only the mark is kept"
    assert (await feed.index.verify()).is_equal


async def test_a_page_skips_newer_posts_of_its_first_moment(feed, sql, reads_of):
    await feed.follow(7, 1)
    await sql(insert(TIED, 1, BEGAN_MS))
    await feed.index.rebuild_now(clean=True)
    async with reads_of() as reads:
        position = Position(BEGAN_MS * TICKS, "p000000500")
        found = await feed.valkey.page(7, limit=20, before=position, after=None)
    assert [post.id for post in found.posts] == posts_before(500)
    assert 0 < len(reads) <= 20


async def test_a_bucket_of_one_moment_is_not_split(feed, sql, engines):
    """No finer bucket would separate its authors."""
    await sql(insert(POSTS, f"1 + n % {AUTHORS}", BEGAN_MS))
    await feed.index.rebuild_now(clean=True)
    levels = {
        int(key.decode().split(":b:")[1].split(":")[0]) for key in await bucket_keys(engines, "*")
    }
    assert levels == {2, 3, 4, 5, 6}
    assert (await feed.index.verify(sample=20)).is_equal
