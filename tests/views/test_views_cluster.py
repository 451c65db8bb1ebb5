"""Views on a cluster: hits are counted once while hash slots move and primaries are killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest
from tests.kit.storm.room_views import sweep_totals
from tests.kit.waiting import wait_true

from headrace.kernel.errors import Unavailable
from headrace.views import ViewsConfig
from headrace.views.model import shard_of

SHARDS = ViewsConfig().shards
IDS = [f"ad:{number}" for number in range(40)]


@pytest.fixture
def engines(cluster_engines):
    """All engines, Valkey a cluster."""
    return cluster_engines


class Crowd:
    """Concurrent callers, their acknowledged hits, and those without an answer."""

    def __init__(self, make_views, sql, **settings):
        self.make_views, self._sql = make_views, sql
        self.views = make_views(**settings)
        self.counted, self.unknown = Counter(), Counter()
        self._stop = asyncio.Event()
        self._callers = [asyncio.create_task(self._call(number)) for number in range(8)]

    async def _call(self, number):
        draw = random.Random(number)
        while not self._stop.is_set():
            by_shard = {}
            for entity in draw.sample(IDS, draw.randint(1, 6)):
                by_shard.setdefault(shard_of(entity, SHARDS), []).append(entity)
            for part in by_shard.values():
                try:
                    await self.views.hits(part)
                except Unavailable:
                    self.unknown.update(part)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), 0.01)
                else:
                    self.counted.update(part)

    async def wait_calls(self, hits):
        """Wait for more acknowledged hits."""
        wanted = self.counted.total() + hits
        await wait_true(lambda: self.counted.total() >= wanted, what="hits are counted")

    async def wait_counted(self, ids):
        """Wait for another hit of each id."""
        before = {entity: self.counted[entity] for entity in ids}
        await wait_true(lambda: all(self.counted[entity] > before[entity] for entity in ids))

    async def end(self):
        """Stop the callers."""
        self._stop.set()
        await asyncio.gather(*self._callers)

    async def stored(self):
        """Totals in PostgreSQL."""
        rows = await self._sql("SELECT id, total FROM headrace.views_total")
        return {row["id"]: row["total"] for row in rows}

    async def require_counted_once(self, flusher, *, lost=()):
        """Every acknowledged hit is counted once, except those of the ids in `lost`."""
        await self.end()

        async def is_flushed():
            # With `appendfsync everysec` an entry is flushed 2.2 s after it was first seen.
            await flusher.run_once()
            is_reachable = not flusher._unreachable
            return is_reachable and not any(one.pending for one in await self.views.analytics.lag())

        await wait_true(is_flushed, what="all shards are flushed")
        totals = await self.stored()
        for entity in IDS:
            counted = self.counted[entity]
            assert totals[entity] <= counted + self.unknown[entity], entity
            assert entity in lost or totals[entity] >= counted, entity
        assert {one.id: one.total for one in await self.views.totals(IDS)} == totals
        assert (await self.views.analytics.verify()).differences == []


@pytest.fixture
async def make_crowd(make_views, sql):
    """`make_crowd(durability="durable")`: callers that count until `end`."""
    made = []

    def make(**settings):
        made.append(Crowd(make_views, sql, **settings))
        return made[-1]

    yield make
    for crowd in made:
        await crowd.end()


@pytest.fixture
async def crowd(make_crowd):
    """Callers that count until `end`."""
    return make_crowd()


def key_of(valkey_store, shard):
    """A key of a shard."""
    return valkey_store._key(shard, "q")


def shards_of(cluster, valkey_store, primary):
    """The shards of a primary."""
    owners = {n: cluster.owner_of(key_of(valkey_store, n)) for n in range(SHARDS)}
    return {shard for shard, owner in owners.items() if owner is primary}


def ids_of(shards):
    return [entity for entity in IDS if shard_of(entity, SHARDS) in shards]


async def flushed(flusher):
    """Flush until nothing is left."""
    while await flusher.run_once():
        pass


@pytest.mark.slow
async def test_totals_are_counted_and_read_on_all_primaries(
    cluster, valkey_store, views, flusher, make_views
):
    assert all(shards_of(cluster, valkey_store, primary) for primary in cluster.primaries)
    for total in (1, 2):
        assert {each.total for each in await views.hits(IDS)} == {total}
    assert [each.total for each in await views.totals([*IDS, "ad:new"])] == [2] * len(IDS) + [0]
    await views.hit(IDS[0], viewer="someone")
    [one] = await views.totals([IDS[0]], fields=["total", "unique"])
    assert (one.total, one.unique) == (3, 1)
    await flushed(flusher)
    assert await flusher.write_uniques() == 1
    assert (await views.analytics.verify()).views == 2 * len(IDS) + 1
    assert [lag.pending for lag in await views.analytics.lag()] == [0] * SHARDS
    assert await valkey_store.drop_totals(range(SHARDS)) == len(IDS)
    assert {each.total for each in await views.totals(IDS[1:])} == {2}
    await views.hits(IDS)
    await sweep_totals(valkey_store, range(SHARDS))
    assert await valkey_store.drop_totals(range(SHARDS)) == 0
    for primary in cluster.primaries:
        assert primary.ask("CONFIG", "SET", "appendfsync", "always") == b"OK"
    try:
        durable = make_views(durability="durable")
        assert {each.total for each in await durable.hits(IDS[1:])} == {4}
    finally:
        for primary in cluster.primaries:
            assert primary.ask("CONFIG", "SET", "appendfsync", "no") == b"OK"


@pytest.mark.slow
async def test_shards_that_move_lose_and_double_nothing(cluster, valkey_store, crowd, flusher):
    await crowd.wait_calls(50)
    for shard in (0, 1):
        key = key_of(valkey_store, shard)
        owner = cluster.owner_of(key)
        for to in (cluster.primaries[cluster.primaries.index(owner) - 1], owner):
            await asyncio.to_thread(cluster.move, key, to=to)
            await crowd.wait_calls(50)
            await flusher.run_once()
    assert not crowd.unknown
    await crowd.require_counted_once(flusher)


@pytest.mark.slow
@pytest.mark.parametrize("is_emptied", [False, True], ids=["with its data", "empty"])
async def test_a_killed_primary_doubles_nothing_and_stops_only_its_shards(
    cluster, valkey_store, crowd, flusher, is_emptied
):
    await crowd.wait_calls(400)
    assert await flusher.run_once() > 0
    gone = cluster.owner_of(key_of(valkey_store, 0))
    down = shards_of(cluster, valkey_store, gone)
    gone.kill()
    try:
        await wait_true(lambda: crowd.unknown, what="hits fail")
        await crowd.wait_calls(50)
        found = await crowd.views.totals(IDS)
        assert {shard_of(one.id, SHARDS) for one in found if one.stale} == down
        assert None not in [one.total for one in found]
        alive = next(entity for entity in IDS if shard_of(entity, SHARDS) not in down)
        assert (await crowd.make_views().hit(alive)).total > 1
        crowd.counted[alive] += 1
        before = (await crowd.stored())[alive]

        async def is_flushed():
            await flusher.run_once()
            return (await crowd.stored())[alive] > before

        await wait_true(is_flushed, what="the other shards are flushed")
        if is_emptied:
            gone.empty()
    finally:
        await asyncio.to_thread(gone.start)
        await asyncio.to_thread(cluster.wait_serving)
    await crowd.wait_counted(ids_of(down))
    await crowd.require_counted_once(flusher, lost=ids_of(down) if is_emptied else ())


@pytest.mark.soak
async def test_a_promoted_replica_doubles_nothing(replicated, valkey_store, crowd, flusher):
    cluster, replica = replicated
    gone = cluster.primaries[0]
    await crowd.wait_calls(400)
    await flusher.run_once()
    moved = ids_of(shards_of(cluster, valkey_store, gone))
    gone.kill()
    await wait_true(replica.is_serving, what="it is promoted")
    await crowd.wait_counted(moved[:1])
    gone.start()
    await crowd.wait_calls(200)
    await crowd.require_counted_once(flusher, lost=moved)


DURABLE = {"durability": "durable", "durable_replicas": 1}
"""All replicas of a primary: while one is down, hits are counted and not acknowledged."""


@pytest.mark.soak
@pytest.mark.parametrize("settings", [{}, DURABLE], ids=["as set by default", "durable"])
async def test_hosts_of_a_cluster_that_fail_double_nothing(
    spread, valkey_store, make_crowd, flusher, settings
):
    """Shards move under load; a primary is killed and another cut off; both return as replicas."""
    crowd = make_crowd(**settings)
    await crowd.wait_calls(400)
    for shard in range(3):
        key = key_of(valkey_store, shard)
        owner = spread.owner_of(key)
        to = next(one for one in spread.primaries if one is not owner)
        await asyncio.to_thread(spread.move, key, to=to)
        await crowd.wait_calls(100)
        await flusher.run_once()
    assert not crowd.unknown
    lost = set()
    for cut, gone in enumerate(spread.primaries[:2]):
        ids = ids_of(shards_of(spread, valkey_store, gone))
        lost |= set(ids)
        replica = spread.replica_of(gone)
        if cut:
            gone.host.cut()
        else:
            gone.kill()
        await wait_true(lambda replica=replica: spread.leads(replica), what="it is promoted")
        if not settings:
            await crowd.wait_counted(ids)
        if cut:
            gone.host.restore()
        else:
            await asyncio.to_thread(gone.start)
        await wait_true(spread.is_whole, what="it returned as a replica")
        await crowd.wait_counted(ids)
    await crowd.require_counted_once(flusher, lost=() if settings else lost)


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings", [{}, {**DURABLE, "durable_replicas": 2}], ids=["as set by default", "durable"]
)
async def test_a_primary_of_sentinels_that_is_cut_off_doubles_nothing(
    watched, make_crowd, flusher, settings
):
    crowd = make_crowd(**settings)
    await crowd.wait_calls(400)
    await flusher.run_once()
    gone = watched.primary()
    gone.host.cut()
    await asyncio.to_thread(watched.wait_primary, other_than=gone)
    if not settings:
        await crowd.wait_counted(IDS)
    gone.host.restore()
    await wait_true(watched.is_whole, what="it returned as a replica")
    await crowd.wait_counted(IDS)
    await crowd.require_counted_once(flusher, lost=() if settings else IDS)


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
    await crowd.require_counted_once(flusher)
