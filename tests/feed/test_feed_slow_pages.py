"""Few pages are read from PostgreSQL at once; some wait, others fail, and other calls continue."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from feed_surfaces import client_of
from feed_world import ids
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import free_port

from headrace.engines.multiplex import Multiplexer
from headrace.engines.valkey import ValkeyConfig
from headrace.feed.errors import SlowPagesBusy

READERS, AT_ONCE, WAITING = 40, 3, 12
BLOCKED = (
    "SELECT count(*) FROM pg_locks"
    " WHERE relation = 'headrace.feed_follow'::regclass AND NOT granted"
)


@pytest.fixture
async def slow_feed(feed, make_feed, engines):
    """The service of a process that cannot reach Valkey; viewer 7 has one post."""
    await feed.follow(7, [100])
    await feed.post(100, "p1")
    line = Multiplexer(f"valkey://127.0.0.1:{free_port()}", ValkeyConfig())
    slow_feed = make_feed(engines=replace(engines, multiplexer=line), slow_pages_max=AT_ONCE)
    await slow_feed.index.ready()
    yield slow_feed
    await line.close()


@pytest.fixture
def locked(postgres):
    """Hold a lock that all slow pages wait for; the block gets a count of the waiting ones."""

    @asynccontextmanager
    async def lock():
        holder = await postgres.connect_unpooled()
        async with holder.transaction():
            await holder.execute("LOCK TABLE headrace.feed_follow IN ACCESS EXCLUSIVE MODE")
            yield lambda: holder.fetchval(BLOCKED)
        await holder.close()

    return lock


async def test_readers_without_valkey_leave_connections_to_other_calls(
    feed, slow_feed, engines, locked
):
    async with client_of(engines, slow_feed) as client:
        async with locked():
            reading = [client.get("/v1/feed/viewers/7") for _ in range(READERS)]
            readers = {asyncio.create_task(each) for each in reading}
            refused = set()
            while len(refused) < READERS - AT_ONCE - WAITING:
                done, readers = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
                refused |= done
            for answer in [each.result() for each in refused]:
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] == "feed.slow_pages_busy"
            assert readers, "the pages that are read or wait"
            assert (await feed.posts.find("p1")).id == "p1"
            assert (await client.get("/v1/feed/viewers/7/marker")).status_code == 200
            assert not (await feed.page(7)).is_slow
            with pytest.raises(SlowPagesBusy, match="slow_pages_max"):
                await asyncio.gather(*[slow_feed.page(7) for _ in range(READERS)])
        answers = [answer.status_code for answer in await asyncio.gather(*readers)]
        assert set(answers) <= {200, 503}
        page = (await client.get("/v1/feed/viewers/7")).json()
        assert ([post["id"] for post in page["posts"]], page["is_slow"]) == (["p1"], True)


async def test_a_cancelled_reader_frees_its_place(slow_feed, locked):
    async with locked() as blocked:
        reading = [slow_feed.page(7) for _ in range(AT_ONCE + WAITING)]
        readers = [asyncio.create_task(each) for each in reading]

        async def all_read():
            return await blocked() == AT_ONCE

        await wait_true(all_read, what="the pages are read")
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
    pages = await asyncio.gather(*[ids(slow_feed, 7) for _ in range(AT_ONCE + WAITING)])
    assert pages == [["p1"]] * (AT_ONCE + WAITING)
