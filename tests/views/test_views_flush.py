"""The flusher: division of shards, trimming, bounded reads, entries of other programs, lag.

Exactly-once counting through races, crashes and losses is in `test_views_machine.py`.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.valkey import ValkeyDown
from headrace.views import Hit, Total
from headrace.views import store as shard_store
from headrace.views.model import START, shard_of

INVALID_LINES = [
    "ad:1!e!e",
    "ad:1/e",
    "ad:1*0",
    "ad:1*1000001",
    "ad:1 2",
    "ad:1/b/b",
    "ad:1=a=b",
    "ad:2,ad:1\x00",
    "ad:2," + "x" * 129,
    "*5",
]


async def stored(sql):
    """Human totals in PostgreSQL."""
    rows = await sql("SELECT id, total FROM headrace.views_total WHERE class = 0")
    return {row["id"]: row["total"] for row in rows}


def stream_of(engines):
    """The stream of `ad:1`."""
    return f"{engines.valkey.prefix}:{{v:1}}:q"


async def entries(engines):
    """Ids of the entries of that stream."""
    rows = await engines.valkey.command("XRANGE", stream_of(engines), "-", "+")
    return [row[0].decode() for row in rows]


async def owners(sql):
    rows = await sql("SELECT flusher, count(*) AS shards FROM headrace.views_lease GROUP BY 1")
    return {row["flusher"]: row["shards"] for row in rows}


async def test_shards_are_divided_among_flushers_and_taken_over(make_flusher, sql):
    one, two = make_flusher("one", lease_s=0.0), make_flusher("two", lease_s=10.0)
    await one.run_once()
    assert await owners(sql) == {one.name: 4}
    one._config = two._config
    for each in (one, two, one, two):
        each._leased_s = float("-inf")
        await each.run_once()
    assert await owners(sql) == {one.name: 2, two.name: 2}
    for table, column in (("flusher", "name"), ("lease", "flusher")):
        await sql(
            f"UPDATE headrace.views_{table} SET expires_at = now() - interval '1s'"
            f" WHERE {column} = '{one.name}'"
        )
    two._leased_s = float("-inf")
    await two.run_once()
    assert await owners(sql) == {two.name: 4}


async def test_a_lease_of_before_the_clock_was_set_back_is_taken_over(make_flusher, sql):
    one, two = make_flusher("one"), make_flusher("two")
    await one.run_once()
    for table in ("flusher", "lease"):
        await sql(
            f"UPDATE headrace.views_{table} SET renewed_at = renewed_at + interval '1 hour',"
            " expires_at = expires_at + interval '1 hour'"
        )
    await two.run_once()
    assert await owners(sql) == {two.name: 4}


async def test_shards_that_postgresql_lost_are_created_again(views, flusher, sql):
    """A failover lost all commits. A hit is counted, and changes of counts succeed."""
    await views.hits(["ad:1"] * 3)
    await flusher.run_once()
    await sql(
        "TRUNCATE headrace.views_shard, headrace.views_lease, headrace.views_flusher,"
        " headrace.views_total, headrace.views_hour"
    )
    assert await views.hit("ad:2") == Total(id="ad:2", total=None, stale=True)
    await views.delete("ad:3")
    assert await views.hit("ad:2") == Total(id="ad:2", total=2)
    flusher._leased_s = float("-inf")
    while await flusher.run_once():
        pass
    assert await stored(sql) == {"ad:1": 3, "ad:2": 2}


async def test_an_unused_total_stays_until_its_hits_are_flushed(
    views, engines, make_flusher, valkey_store
):
    flusher = make_flusher(cache_for_s=0.0)
    flusher._swept_s = float("inf")  # only this test sweeps
    await flusher.run_once()
    keys = valkey_store.total_keys(["ad:1"], [1])
    await views.hit("ad:1")
    for _ in range(3):
        await flusher._sweep()
        assert await valkey_store.totals(keys) == [1]
    await views.hit("ad:1")
    await flusher.run_once()
    await flusher._sweep()
    assert await valkey_store.totals(keys) == [2], "it was hit since it was found"

    async def is_swept():  # in parts: the keys of other tests are scanned, too
        await flusher._sweep()
        return await valkey_store.totals(keys) == [None]

    await wait_true(is_swept, what="swept")


@pytest.mark.slow
async def test_a_flusher_runs_until_stopped_and_releases_its_shards(views, make_flusher, sql):
    flusher = make_flusher(flush_every_s=0.02)
    stop = asyncio.Event()
    running = asyncio.create_task(flusher.run(stop))
    for _ in range(10):
        await views.hits(["ad:1"] * 10)

    async def is_flushed():
        return await stored(sql) == {"ad:1": 100}

    await wait_true(is_flushed, what="flushed")
    stop.set()
    await running
    assert await owners(sql) == {None: 4}


async def test_flushed_entries_stay_until_trimmed_and_the_anchor_stays(
    views, engines, flusher, make_flusher
):
    for _ in range(300):
        await views.hit("ad:1")
    assert await flusher.run_once() == 1
    assert await flusher.run_once() == 0
    assert len(await entries(engines)) == 301
    await views.hit("ad:1")
    trimming = make_flusher(trim_after_s=0.0)
    await shard_store.leave_shards(flusher._postgres, flusher.name)
    await trimming.run_once()
    await trimming.run_once()
    left = await entries(engines)
    assert len(left) < 300, "the stream is trimmed by whole nodes"
    assert left[-1] == trimming._shards[1].through


async def test_a_stale_flusher_does_not_move_the_offset_back(
    views, engines, flusher, make_flusher, sql
):
    """Another flusher moved the offset, and the entry at the stale one was trimmed."""
    await views.hit("ad:1")
    await flusher.run_once()
    await shard_store.leave_shards(flusher._postgres, flusher.name)
    other = make_flusher("other")
    await other.run_once()
    await views.hit("ad:1")
    assert await other.run_once() == 1
    await engines.valkey.command("XDEL", stream_of(engines), flusher._shards[1].through)
    for _ in range(2):
        assert await flusher.run_once() == 0
    assert await stored(sql) == {"ad:1": 2}


async def test_lag_reports_pending_hits_and_the_owner(views, flusher):
    await views.hits(["ad:1", Hit(id="ad:1", n=7)])
    await views.hit("ad:1")
    lag = (await views.analytics.lag())[shard_of("ad:1", 4)]
    assert (lag.pending, lag.flusher) == (2, None)
    assert 0 <= lag.oldest_s < 60
    await flusher.run_once()
    lag = (await views.analytics.lag())[shard_of("ad:1", 4)]
    assert (lag.pending, lag.oldest_s, lag.flusher) == (0, 0.0, flusher.name)


async def test_invalid_lines_of_other_clients_count_nothing(views, engines, flusher, sql):
    """Sent to the function they are refused; written into the stream they stop no flush."""
    await views.hit("ad:1")
    before = await entries(engines)
    for line in ["", *INVALID_LINES]:
        with pytest.raises(ValkeyDown):
            await engines.valkey.call("headrace_views_hit_v1", [stream_of(engines)], [line])
    assert await entries(engines) == before
    for line in [*INVALID_LINES, b"\xff\xfe"]:
        await engines.valkey.command("XADD", stream_of(engines), "*", "v", line)
    await views.hit("ad:1")
    await flusher.run_once()
    found = await stored(sql)
    assert found.pop("ad:1") == 2
    assert found == {"ad:2": 2}, "valid hits beside an invalid one"
    assert (await views.analytics.verify()).differences == []


@pytest.mark.slow
async def test_entries_of_any_size_are_read_in_bounded_parts(
    valkey_store, engines, views, flusher, sql
):
    """A thousand long names are 128 kB an entry; a read returns about half a megabyte."""
    names = [f"{number:03}{'x' * 120}" for number in range(999)]
    await views.hits(names)
    line = ",".join(name for name in names if shard_of(name, 4) == 1)
    for _ in range(70):
        await engines.multiplexer.call("headrace_views_hit_v1", [stream_of(engines)], [line])
    found, through, parts = [], START, 0
    while True:
        pending = await valkey_store.pending(1, through=through, entries_max=2_000)
        found += [entry for entry, _ in pending.rows]
        parts += 1
        if not pending.is_cut:
            break
        assert sum(len(hits) for _, hits in pending.rows) < 4_000_000
        through = found[-1]
    assert parts > 1
    assert len(found) == 71
    assert found == (await entries(engines))[-71:]
    while await flusher.run_once():
        pass
    assert await stored(sql) == {name: 71 if shard_of(name, 4) == 1 else 1 for name in names}
