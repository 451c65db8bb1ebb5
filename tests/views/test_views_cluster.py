"""Views on a cluster.

A hit is counted once, whatever moves, is killed or comes back empty meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.valkey import ValkeyDown
from headrace.views import ViewsConfig
from headrace.views.model import shard_of

SHARDS = ViewsConfig().shards
PAUSE_S = 0.01
"""So long a caller that was refused waits."""
IDS = [f"ad:{number}" for number in range(40)]


@pytest.fixture
def engines(cluster_engines):
    """All engines, Valkey a cluster."""
    return cluster_engines


class Crowd:
    """Hits from many callers at once, and what is known of each."""

    def __init__(self, make_views, sql):
        self.make_views, self._sql = make_views, sql
        self.views = make_views()
        self.counted, self.unknown = Counter(), Counter()
        self._stop = asyncio.Event()
        self._callers = [asyncio.create_task(self._call(number)) for number in range(8)]

    async def _call(self, number):
        draw = random.Random(number)
        while not self._stop.is_set():
            ids = draw.sample(IDS, draw.randint(1, 6))
            by_shard = {}
            for entity in ids:
                by_shard.setdefault(shard_of(entity, SHARDS), []).append(entity)
            for part in by_shard.values():
                try:
                    await self.views.hits(part)
                except ValkeyDown:
                    self.unknown.update(part)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), PAUSE_S)
                else:
                    self.counted.update(part)

    async def wait_calls(self, hits):
        """Until so many more were counted."""
        wanted = self.counted.total() + hits
        await wait_true(lambda: self.counted.total() >= wanted, what="hits are counted")

    async def end(self):
        """No more of them."""
        self._stop.set()
        await asyncio.gather(*self._callers)

    async def stored(self):
        """Totals as PostgreSQL has them."""
        rows = await self._sql("SELECT id, total FROM headrace.views_total")
        return {row["id"]: row["total"] for row in rows}


@pytest.fixture
async def crowd(make_views, sql):
    """Hits go on from here until its `end`."""
    crowd = Crowd(make_views, sql)
    yield crowd
    await crowd.end()


def key_of(valkey_store, shard):
    """A key of a shard."""
    return valkey_store._key(shard, "q")


async def flushed(flusher):
    """Flush until nothing is left."""
    while await flusher.run_once():
        pass


@pytest.mark.slow
async def test_totals_are_counted_and_read_on_all_primaries(cluster, valkey_store, views, flusher):
    assert len({cluster.owner_of(key_of(valkey_store, shard)).port for shard in range(SHARDS)}) == 3
    assert {total.total for total in await views.hits(IDS)} == {1}
    assert {total.total for total in await views.hits(IDS)} == {2}
    assert [total.total for total in await views.totals([*IDS, "ad:new"])] == [2] * len(IDS) + [0]
    await views.hit(IDS[0], viewer="someone")
    [one] = await views.totals([IDS[0]], fields=["total", "unique"])
    assert (one.total, one.unique) == (3, 1)
    await flushed(flusher)
    assert await flusher.write_uniques() == 1
    assert (await views.analytics.verify()).views == 2 * len(IDS) + 1
    assert [lag.pending for lag in await views.analytics.lag()] == [0] * SHARDS
    assert await valkey_store.drop_totals(range(SHARDS)) == len(IDS)
    assert {total.total for total in await views.totals(IDS[1:])} == {2}
    await views.hits(IDS)
    cursor = await valkey_store.sweep(b"0", [0, 1, 2, 3], idle_s=0)
    while cursor != b"0":
        cursor = await valkey_store.sweep(cursor, [0, 1, 2, 3], idle_s=0)
    assert await valkey_store.drop_totals(range(SHARDS)) == 0


@pytest.mark.slow
async def test_shards_that_move_lose_and_double_nothing(cluster, valkey_store, crowd, flusher):
    await crowd.wait_calls(50)
    for shard in (0, 1):
        key = key_of(valkey_store, shard)
        owner = cluster.owner_of(key)
        other = cluster.primaries[cluster.primaries.index(owner) - 1]
        for to in (other, owner):
            await asyncio.to_thread(cluster.move, key, to=to)
            await crowd.wait_calls(50)
            await flusher.run_once()
    await crowd.end()
    await flushed(flusher)
    assert not crowd.unknown
    assert await crowd.stored() == crowd.counted
    told = await crowd.views.totals(list(crowd.counted))
    assert {one.id: one.total for one in told} == crowd.counted


@pytest.mark.slow
@pytest.mark.parametrize("is_emptied", [False, True], ids=["with its data", "empty"])
async def test_a_primary_that_is_killed_doubles_nothing(
    cluster, valkey_store, crowd, flusher, is_emptied
):
    await crowd.wait_calls(400)
    assert await flusher.run_once() > 0
    gone = cluster.owner_of(key_of(valkey_store, 0))
    away = {
        shard for shard in range(SHARDS) if cluster.owner_of(key_of(valkey_store, shard)) is gone
    }
    gone.kill()
    try:
        await _goes_on_without(away, crowd, flusher)
        if is_emptied:
            gone.empty()
    finally:
        await asyncio.to_thread(gone.start)
        await asyncio.to_thread(cluster.wait_serving)
    there = [entity for entity in IDS if shard_of(entity, SHARDS) in away]
    before = {entity: crowd.counted[entity] for entity in there}
    await wait_true(lambda: all(crowd.counted[entity] > before[entity] for entity in there))
    await crowd.end()
    await _wait_all_flushed(flusher)
    totals = await crowd.stored()
    for entity in IDS:
        most = crowd.counted[entity] + crowd.unknown[entity]
        assert totals[entity] <= most, entity
        if not (is_emptied and entity in there):
            assert totals[entity] >= crowd.counted[entity], entity
    assert {one.id: one.total for one in await crowd.views.totals(IDS)} == totals


@pytest.mark.soak
async def test_a_replica_that_is_promoted_doubles_nothing(replicated, valkey_store, crowd, flusher):
    cluster, replica = replicated
    gone = cluster.primaries[0]
    await crowd.wait_calls(400)
    await flusher.run_once()
    there = [
        shard for shard in range(SHARDS) if cluster.owner_of(key_of(valkey_store, shard)) is gone
    ]
    assert there
    gone.kill()
    await wait_true(replica.is_serving, what="it is promoted")
    entity = next(entity for entity in IDS if shard_of(entity, SHARDS) in there)
    before = crowd.counted[entity]
    await wait_true(lambda: crowd.counted[entity] > before, what="hits are counted there")
    gone.start()
    await crowd.wait_calls(200)
    await crowd.end()
    await _wait_all_flushed(flusher)
    totals = await crowd.stored()
    for entity in IDS:
        assert totals[entity] <= crowd.counted[entity] + crowd.unknown[entity], entity
        if shard_of(entity, SHARDS) not in there:
            assert totals[entity] >= crowd.counted[entity], entity
    assert {one.id: one.total for one in await crowd.views.totals(IDS)} == totals


@pytest.mark.soak
async def test_a_storm_loses_and_doubles_nothing(own_primaries, valkey_store, crowd, flusher):
    draw, stop = random.Random(20261122), asyncio.Event()
    flushing = asyncio.create_task(flusher.run(stop))
    for _ in range(20):
        keys = [key_of(valkey_store, shard) for shard in range(SHARDS)]
        await asyncio.to_thread(own_primaries.harm, draw, keys)
        await crowd.wait_calls(200)
    await crowd.end()
    stop.set()
    await flushing
    await _wait_all_flushed(flusher)
    totals = await crowd.stored()
    for entity in IDS:
        counted, unknown = crowd.counted[entity], crowd.unknown[entity]
        assert counted <= totals[entity] <= counted + unknown, entity
    assert {one.id: one.total for one in await crowd.views.totals(IDS)} == totals
    assert not (await crowd.views.analytics.verify()).differences


async def _goes_on_without(away, crowd, flusher):
    """Hits, reads and the flush of the other shards go on."""
    await wait_true(lambda: crowd.unknown, what="hits fail")
    await crowd.wait_calls(50)
    told = await crowd.views.totals(IDS)
    assert {shard_of(one.id, SHARDS) for one in told if one.stale} == away
    assert None not in [one.total for one in told]
    entity = next(entity for entity in IDS if shard_of(entity, SHARDS) not in away)
    assert (await crowd.make_views().hit(entity)).total > 1
    crowd.counted[entity] += 1
    before = (await crowd.stored())[entity]

    async def is_flushed():
        await flusher.run_once()
        return (await crowd.stored())[entity] > before

    await wait_true(is_flushed, what="the other shards are flushed")


async def _wait_all_flushed(flusher):
    async def is_whole():
        await flusher.run_once()
        return not flusher._unreachable

    await wait_true(is_whole, what="the shards that were away are flushed")
    await flushed(flusher)


async def test_durable_hits_wait_for_the_primary_of_their_shard(cluster, make_views):
    for primary in cluster.primaries:
        assert primary.ask("CONFIG", "SET", "appendfsync", "always") == b"OK"
    try:
        views = make_views(durability="durable")
        assert {total.total for total in await views.hits(IDS)} == {1}
    finally:
        for primary in cluster.primaries:
            assert primary.ask("CONFIG", "SET", "appendfsync", "no") == b"OK"
