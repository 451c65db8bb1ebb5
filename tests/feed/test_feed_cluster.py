"""The feed on a cluster: pages equal the oracle while hash slots move and primaries are killed."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from feed_world import History
from tests.kit.waiting import wait_true

from headrace.engines.valkey import SLOTS, hash_slot
from headrace.feed.valkey_store import hash_tags
from headrace.feed.worker import Sweeper

SHARDS = 4


@pytest.fixture
def engines(cluster_engines):
    """All engines, Valkey a cluster."""
    return cluster_engines


@pytest.fixture
def feed(make_feed, registry):
    """The service, with shards on all primaries."""
    feed = make_feed(shards=SHARDS)
    feed.register(registry)
    return feed


@pytest.fixture
async def history(feed):
    """A history with some writes."""
    history = History(feed, 20261122)
    for _ in range(25):
        await history.step()
    return history


def start_of(feed, shard):
    """The prefix of all keys of a shard."""
    return feed.valkey._starts[shard]


def owners_of(cluster, feed):
    """The primary of each shard."""
    return [cluster.owner_of(start_of(feed, shard)) for shard in range(SHARDS)]


async def is_slow(feed, shard):
    """Whether pages of a viewer of a shard come from PostgreSQL."""
    viewer = 1_000 * SHARDS + shard
    assert feed.valkey.shard_of(viewer) == shard
    return (await feed.page(viewer, 1)).is_slow


async def wait_quick(feed):
    """Wait until pages come from the index."""

    async def is_quick():
        slow = [await is_slow(feed, shard) for shard in range(SHARDS)]
        return not any(slow) and not feed.index.applier.has_deferred

    await wait_true(is_quick, what="pages come from the index")


@asynccontextmanager
async def lived(history):
    """Write and compare pages while the block lasts."""
    stop = asyncio.Event()

    async def live():
        while not stop.is_set():
            await history.step()
            await history.check(4)
            await asyncio.sleep(0)

    living = asyncio.create_task(live())
    try:
        yield
    finally:
        stop.set()
        await living


async def require_same(feed, history):
    """Pages equal the oracle, and the index equals PostgreSQL."""
    await history.check(40)
    assert (await feed.index.verify()).differences == []


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 64])
def test_each_part_of_the_hash_slots_has_one_shard(shards):
    slots = [hash_slot(f"x:{{{tag}}}:p:1") for tag in hash_tags(shards)]
    assert [slot * shards // SLOTS for slot in slots] == list(range(shards))


@pytest.mark.slow
async def test_pages_are_right_with_shards_on_several_primaries(cluster, feed, history):
    assert len({one.port for one in owners_of(cluster, feed)}) == 3
    for _ in range(20):
        await history.step()
        await history.check(8)
    assert not (await feed.page(1)).is_slow
    await feed.valkey.trim_posts(b"0")
    await Sweeper(feed).run_once(older_s=0)
    await require_same(feed, history)
    assert [state.state for state in await feed.index.stats()] == ["ready"] * SHARDS
    assert await feed.valkey.drop() > SHARDS
    assert {state.state for state in await feed.index.stats()} == {"missing"}
    assert await feed.index.rebuild_now(clean=True) > 0
    await require_same(feed, history)


@pytest.mark.slow
async def test_pages_are_right_while_a_shard_moves(cluster, feed, history):
    key = start_of(feed, 0)
    owner = cluster.owner_of(key)
    other = next(one for one in cluster.primaries if one is not owner)
    async with lived(history):
        for to in (other, owner):
            await asyncio.to_thread(cluster.move, key, to=to)
        await wait_quick(feed)
    await require_same(feed, history)


@pytest.mark.slow
@pytest.mark.parametrize("is_emptied", [False, True], ids=["with its data", "empty"])
async def test_pages_are_right_while_a_primary_is_killed_and_returns(
    cluster, feed, history, is_emptied
):
    owners = owners_of(cluster, feed)
    gone = owners[1]
    async with lived(history):
        gone.kill()
        try:
            await wait_true(lambda: is_slow(feed, 1), what="pages come from PostgreSQL")
            others = [shard for shard, owner in enumerate(owners) if owner is not gone]
            assert others
            assert not any([await is_slow(feed, shard) for shard in others])
            if is_emptied:
                gone.empty()
        finally:
            await asyncio.to_thread(gone.start)
            await asyncio.to_thread(cluster.wait_serving)
        await wait_quick(feed)
    await require_same(feed, history)


@pytest.mark.soak
async def test_pages_are_right_after_a_replica_is_promoted(replicated, feed, history):
    cluster, replica = replicated
    gone = cluster.primaries[0]
    shard = owners_of(cluster, feed).index(gone)
    async with lived(history):
        gone.kill()
        await wait_true(replica.is_serving, what="it is promoted")
        await wait_true(lambda: is_slow(feed, shard), what="pages come from PostgreSQL")
        await wait_quick(feed)
        gone.start()
        await wait_quick(feed)
    await require_same(feed, history)


@pytest.mark.soak
async def test_pages_are_right_while_hosts_of_a_cluster_fail(spread, feed, history):
    """A shard moves under load; a primary is killed and another cut off; both return."""
    async with lived(history):
        key = start_of(feed, 0)
        owner = spread.owner_of(key)
        to = next(one for one in spread.primaries if one is not owner)
        await asyncio.to_thread(spread.move, key, to=to)
        await wait_quick(feed)
        for cut, gone in enumerate(spread.primaries[:2]):
            replica = spread.replica_of(gone)
            if cut:
                gone.host.cut()
            else:
                gone.kill()
            await wait_true(lambda replica=replica: spread.leads(replica), what="it is promoted")
            await wait_quick(feed)
            if cut:
                gone.host.restore()
            else:
                await asyncio.to_thread(gone.start)
            await wait_true(spread.is_whole, what="it returned as a replica")
            await wait_quick(feed)
    await require_same(feed, history)


@pytest.mark.soak
async def test_pages_are_right_while_a_primary_of_sentinels_is_cut_off(watched, feed, history):
    async with lived(history):
        gone = watched.primary()
        gone.host.cut()
        await asyncio.to_thread(watched.wait_primary, other_than=gone)
        await wait_quick(feed)
        gone.host.restore()
        await wait_true(watched.is_whole, what="it returned as a replica")
        await wait_quick(feed)
    await require_same(feed, history)


@pytest.mark.soak
async def test_pages_are_right_through_a_storm(own_primaries, feed, history):
    keys = [start_of(feed, shard) for shard in range(SHARDS)]
    async with lived(history):
        for _ in range(20):
            await asyncio.to_thread(own_primaries.harm, history.random, keys)
            if history.random.random() < 0.3:
                await wait_quick(feed)
        await wait_quick(feed)
    await require_same(feed, history)
