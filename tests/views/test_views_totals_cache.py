"""Totals kept in a process: own hits at once, others' hits in time, one load per id, no growth."""

from __future__ import annotations

import asyncio

from tests.kit.waiting import wait_true

from headrace.views import totals_cache
from headrace.views.model import Total
from headrace.views.totals_cache import TotalsCache


async def total_of(views, *ids):
    return [one.total for one in await views.totals(list(ids))]


async def test_own_hits_are_seen_at_once_and_those_of_others_in_time(make_views):
    here, there = make_views(cache_ms=60_000), make_views(cache_ms=50)
    for count in range(1, 4):
        await here.hit("a")
        assert await total_of(here, "a", "b") == [count, 0]
    assert await total_of(there, "a") == [3]
    await here.hits(["a", "b", "a"])
    assert await total_of(here, "b", "a") == [1, 5]

    async def seen():
        return await total_of(there, "a", "b") == [5, 1]

    await wait_true(seen, what="the hits of the other process are seen")
    await there.hit("b")
    assert await total_of(here, "b") == [1], "within the time"
    await here.delete("a")
    assert await total_of(here, "a", "b") == [0, 2]


async def test_an_unavailable_total_is_not_kept(make_views, monkeypatch):
    views = make_views(cache_ms=60_000)
    await views.hit("a")
    views._cache.clear()

    async def stale(names, _keys):
        return [Total(id=name, total=None, stale=True) for name in names]

    with monkeypatch.context() as patch:
        patch.setattr(views, "_totals", stale)
        assert await total_of(views, "a") == [None]
    assert await total_of(views, "a") == [1]


class Source:
    """Totals of ids, read when `go` is set; `loaded` has the ids of each load."""

    def __init__(self, total):
        self.total, self.go, self.loaded = total, asyncio.Event(), []

    async def load(self, names):
        self.loaded.append(names)
        total = self.total
        await self.go.wait()
        return [Total(id=name, total=total) for name in names]


async def test_concurrent_reads_share_a_load_even_if_one_is_cancelled():
    source = Source(7)
    cache = TotalsCache(source.load, keep_s=60.0)
    reads = [asyncio.create_task(cache.read(["a", "b", "a"])) for _ in range(5)]
    reads.append(asyncio.create_task(cache.read(["b", "c"])))
    await asyncio.sleep(0)
    reads[0].cancel()
    source.go.set()
    _, *found = await asyncio.gather(*reads, return_exceptions=True)
    assert [[one.total for one in row] for row in found] == [[7] * 3] * 4 + [[7] * 2]
    assert source.loaded == [["a", "b"], ["c"]]
    assert [one.id for one in cache.find(["c", "a"])] == ["c", "a"]


async def test_a_load_that_began_before_a_hit_does_not_hide_it():
    source = Source(1)
    cache = TotalsCache(source.load, keep_s=60.0)
    early = asyncio.create_task(cache.read(["a"]))
    await asyncio.sleep(0)
    cache.note([Total(id="a", total=3), Total(id="a", total=2)])
    cache.clear()
    source.total = 3
    later = asyncio.create_task(cache.read(["a"]))
    await asyncio.sleep(0)
    source.go.set()
    assert [one.total for one in await early + await later] == [3, 3]
    assert cache.find(["a"])[0].total == 3


async def test_the_number_of_kept_totals_is_bounded(monkeypatch):
    monkeypatch.setattr(totals_cache, "ENTRIES_MAX", 100)
    source = Source(0)
    source.go.set()
    cache = TotalsCache(source.load, keep_s=60.0)
    for number in range(500):
        await cache.read([f"{number}"])
        assert len(cache._window.kept) <= 100
