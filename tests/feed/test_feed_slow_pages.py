"""Pages from PostgreSQL are read a few at once.

The others wait or are refused, and all else goes on.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from feed_surfaces import client_of
from tests.kit.whole_nodes import free_port

from headrace.engines.multiplex import Multiplexer
from headrace.engines.valkey import ValkeyConfig
from headrace.feed import Feed, FeedConfig
from headrace.feed.errors import SlowPagesBusy
from headrace.kernel.signing import derive_key

READERS, AT_ONCE, WAITING = 40, 3, 12
BLOCKED = (
    "SELECT count(*) FROM pg_locks"
    " WHERE relation = 'headrace.feed_follow'::regclass AND NOT granted"
)


@pytest.fixture
async def without_valkey(engines, jobs):
    """The service of a process whose Valkey is away."""
    line = Multiplexer(f"valkey://127.0.0.1:{free_port()}", ValkeyConfig())
    key = derive_key("a secret of the tests, 32 characters", "cursor")
    config = FeedConfig(slow_pages_max=AT_ONCE)
    yield Feed(replace(engines, multiplexer=line), jobs, config, make_key=lambda: key)
    await line.close()


async def test_readers_without_valkey_leave_connections_to_all_others(
    feed, without_valkey, engines, postgres
):
    await feed.follow(7, [100])
    await feed.post(100, "p1")
    await without_valkey.index.ready()
    holder = await postgres.connect_unpooled()
    async with client_of(engines, without_valkey) as client:
        async with holder.transaction():
            await holder.execute("LOCK TABLE headrace.feed_follow IN ACCESS EXCLUSIVE MODE")
            readers = {
                asyncio.create_task(client.get("/v1/feed/viewers/7")) for _ in range(READERS)
            }
            refused = set()
            while len(refused) < READERS - AT_ONCE - WAITING:
                done, readers = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
                refused |= done
            for answer in [each.result() for each in refused]:
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "2"
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] == "feed.slow_pages_busy"
            assert readers, "those who wait or are read"
            assert (await feed.posts.find("p1")).id == "p1"
            assert (await client.get("/v1/feed/viewers/7/marker")).status_code == 200
            assert not (await feed.page(7)).is_slow
            with pytest.raises(SlowPagesBusy, match="slow_pages_max"):
                await asyncio.gather(*[without_valkey.page(7) for _ in range(READERS)])
        answers = [answer.status_code for answer in await asyncio.gather(*readers)]
        assert set(answers) <= {200, 503}
        page = (await client.get("/v1/feed/viewers/7")).json()
        assert ([post["id"] for post in page["posts"]], page["is_slow"]) == (["p1"], True)
    await holder.close()


async def test_a_reader_that_goes_away_leaves_its_turn_to_others(feed, without_valkey, postgres):
    await feed.follow(7, [100])
    await feed.post(100, "p1")
    await without_valkey.index.ready()
    holder = await postgres.connect_unpooled()
    async with holder.transaction():
        await holder.execute("LOCK TABLE headrace.feed_follow IN ACCESS EXCLUSIVE MODE")
        readers = [asyncio.create_task(without_valkey.page(7)) for _ in range(AT_ONCE + WAITING)]
        while await holder.fetchval(BLOCKED) < AT_ONCE:
            pass
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
    await holder.close()
    pages = await asyncio.gather(*[without_valkey.page(7) for _ in range(AT_ONCE + WAITING)])
    assert all([post.id for post in page.posts] == ["p1"] for page in pages)
