"""The flush: exactly once, whoever races, whatever either engine forgot."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.valkey import ValkeyDown
from headrace.views import Hit
from headrace.views import store as shard_store
from headrace.views.model import START, shard_of

ENTITIES = [f"ad:{number}" for number in range(12)]


async def stored(sql):
    """Every total in PostgreSQL, and the sum of hours."""
    rows = await sql("SELECT id, total FROM headrace.views_total WHERE class = 0")
    [hours] = await sql("SELECT coalesce(sum(views), 0) AS views FROM headrace.views_hour")
    return {row["id"]: row["total"] for row in rows}, hours["views"]


async def stream(engines, shard=1):
    """Ids of the entries of a shard."""
    key = f"{engines.valkey.prefix}:{{v:{shard}}}:q"
    return [row[0].decode() for row in await engines.valkey.command("XRANGE", key, "-", "+")]


async def test_hits_reach_totals_and_hours_once(views, flusher, sql):
    await views.hits(ENTITIES * 10 + [Hit(id="ad:0", n=5)])
    assert await flusher.run_once() == 12
    assert await flusher.run_once() == 0
    totals, hours = await stored(sql)
    assert totals == {entity: 15 if entity == "ad:0" else 10 for entity in ENTITIES}
    assert hours == 125
    assert (await views.analytics.verify()).differences == []


@pytest.mark.slow
async def test_racing_flushers_count_once(views, make_flusher, sql):
    """All believe that all shards are theirs."""
    flushers = [make_flusher(f"f{number}") for number in range(3)]
    for each in flushers:
        await each.run_once()
        await sql("UPDATE headrace.views_lease SET expires_at = now() - interval '1 second'")
        await sql("DELETE FROM headrace.views_flusher")
    for _ in range(10):
        await asyncio.gather(views.hits(ENTITIES), *[each.run_once() for each in flushers])
    await flushers[0].run_once()
    totals, hours = await stored(sql)
    assert totals == dict.fromkeys(ENTITIES, 10)
    assert hours == 120


async def test_shards_are_divided_among_flushers_and_taken_over(make_flusher, sql):
    one, two = make_flusher("one", lease_s=0.0), make_flusher("two", lease_s=10.0)
    await one.run_once()
    assert await owners(sql) == {one.name: 4}
    one._config = two._config
    one._leased_s = float("-inf")
    await one.run_once()
    await two.run_once()
    one._leased_s = float("-inf")
    await one.run_once()
    two._leased_s = float("-inf")
    await two.run_once()
    assert await owners(sql) == {one.name: 2, two.name: 2}
    await sql(
        "UPDATE headrace.views_flusher SET expires_at = now() - interval '1s'"
        f" WHERE name = '{one.name}'"
    )
    await sql(
        "UPDATE headrace.views_lease SET expires_at = now() - interval '1s'"
        f" WHERE flusher = '{one.name}'"
    )
    two._leased_s = float("-inf")
    await two.run_once()
    assert await owners(sql) == {two.name: 4}


async def owners(sql):
    rows = await sql("SELECT flusher, count(*) AS shards FROM headrace.views_lease GROUP BY 1")
    return {row["flusher"]: row["shards"] for row in rows}


async def test_what_was_flushed_stays_until_trimmed_and_the_anchor_stays(
    views, engines, flusher, make_flusher
):
    for _ in range(300):
        await views.hit("ad:1")
    await flusher.run_once()
    assert len(await stream(engines)) == 301
    await views.hit("ad:1")
    trimming = make_flusher(trim_after_s=0.0)
    await take_all(flusher, trimming)
    await trimming.run_once()
    left = await stream(engines)
    assert len(left) < 300, "whole nodes of the stream go"
    assert left[-1] == trimming._shards[1].through


async def take_all(held, taking):
    """Let go of all shards, and take them."""
    await shard_store.leave_shards(held._postgres, held.name)
    await taking.run_once()


async def test_an_older_postgres_is_caught_up_again(views, flusher, sql):
    """A failover to a standby that misses the last commits.

    Totals, hours and offset are those of before.
    """
    await views.hits(ENTITIES)
    await flusher.run_once()
    for table in ("shard", "total", "hour"):
        await sql(f"CREATE TABLE old_{table} AS TABLE headrace.views_{table}")
    await views.hits(ENTITIES * 3)
    await flusher.run_once()
    await sql(
        "UPDATE headrace.views_shard s SET through = o.through"
        " FROM old_shard o WHERE o.shard = s.shard"
    )
    for table in ("total", "hour"):
        await sql(f"DELETE FROM headrace.views_{table}")
        await sql(f"INSERT INTO headrace.views_{table} TABLE old_{table}")
    await views.hits(ENTITIES)
    await flusher.run_once()
    await flusher.run_once()
    totals, hours = await stored(sql)
    assert totals == dict.fromkeys(ENTITIES, 5)
    assert hours == 60
    assert [t.total for t in await views.totals(ENTITIES)] == [5] * 12


async def test_an_emptied_valkey_goes_on_from_postgres(views, make_views, engines, flusher, sql):
    await views.hits(ENTITIES * 4)
    await flusher.run_once()
    keys = await engines.valkey.command("KEYS", f"{engines.valkey.prefix}:*")
    await engines.valkey.command("DEL", *keys)
    assert [t.total for t in await make_views().totals(ENTITIES)] == [4] * 12
    assert [t.total for t in await views.hits(ENTITIES)] == [5] * 12
    await flusher.run_once()
    totals, _ = await stored(sql)
    assert totals == dict.fromkeys(ENTITIES, 5)


async def test_a_flusher_that_comes_first_sets_an_emptied_valkey_up(views, engines, flusher, sql):
    await views.hits(ENTITIES * 4)
    await flusher.run_once()
    keys = await engines.valkey.command("KEYS", f"{engines.valkey.prefix}:*")
    await engines.valkey.command("DEL", *keys)
    await flusher.run_once()
    assert [t.total for t in await views.hits(ENTITIES)] == [5] * 12
    await flusher.run_once()
    totals, _ = await stored(sql)
    assert totals == dict.fromkeys(ENTITIES, 5)


@pytest.mark.parametrize("hits_first", [True, False])
async def test_a_lost_tail_costs_what_was_lost_and_totals_are_right_again(
    views, engines, flusher, sql, hits_first
):
    """The stream lost entries that PostgreSQL counted, and the cached total fell with them."""
    key = f"{engines.valkey.prefix}:{{v:1}}"
    await views.hits(["ad:1"] * 10)
    await flusher.run_once()
    await engines.valkey.command("COPY", f"{key}:q", f"{key}:old")
    await views.hits(["ad:1"] * 5)
    await views.hits(["ad:1"] * 6)
    await flusher.run_once()
    await engines.valkey.command("RENAME", f"{key}:old", f"{key}:q")
    await engines.valkey.command("SET", f"{key}:c:ad:1", 11)
    if hits_first:
        await views.hits(["ad:1"] * 2)
    await flusher.run_once()
    if not hits_first:
        await views.hits(["ad:1"] * 2)
    assert (await views.totals(["ad:1"]))[0].total == 23
    await flusher.run_once()
    totals, hours = await stored(sql)
    assert totals == {"ad:1": 23}
    assert hours == 23


async def test_a_stream_that_goes_on_without_its_anchor_is_flushed_on(views, engines, flusher, sql):
    await views.hits(["ad:1"] * 3)
    await flusher.run_once()
    key = f"{engines.valkey.prefix}:{{v:1}}:q"
    await engines.valkey.command("XDEL", key, (await stream(engines))[-1])
    await flusher.run_once()
    await views.hits(["ad:1"] * 2)
    await flusher.run_once()
    await flusher.run_once()
    totals, _ = await stored(sql)
    assert totals == {"ad:1": 5}
    assert (await views.hit("ad:1")).total == 6


@pytest.mark.slow
async def test_a_flusher_runs_until_told_and_leaves_its_shards(views, make_flusher, sql):
    flusher = make_flusher(flush_every_s=0.02)
    stop = asyncio.Event()
    running = asyncio.create_task(flusher.run(stop))

    async def is_flushed():
        return (await stored(sql))[1] == 100

    for _ in range(10):
        await views.hits(["ad:1"] * 10)
    await wait_true(is_flushed, what="flushed")
    stop.set()
    await running
    assert await owners(sql) == {None: 4}


async def test_lag_says_what_is_pending_and_whose_it_is(views, flusher):
    await views.hit("ad:1")
    [lag] = [each for each in await views.analytics.lag() if each.shard == shard_of("ad:1", 4)]
    assert (lag.pending, lag.flusher) == (1, None)
    assert 0 <= lag.oldest_s < 60
    await flusher.run_once()
    [lag] = [each for each in await views.analytics.lag() if each.shard == shard_of("ad:1", 4)]
    assert (lag.pending, lag.oldest_s, lag.flusher) == (0, 0.0, flusher.name)


async def test_functions_that_the_server_lost_are_loaded_again(views, engines, flusher):
    await views.hit("ad:1")
    await engines.valkey.command("FUNCTION", "DELETE", "headrace_views_v1")
    assert (await views.hit("ad:1")).total == 2
    await engines.valkey.command("FUNCTION", "DELETE", "headrace_views_v1")
    await flusher.run_once()
    assert (await views.hit("ad:1")).total == 3


NO_HITS = [
    "",
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


async def test_a_call_of_another_client_that_is_no_hit_counts_nothing(views, engines, flusher, sql):
    await views.hit("ad:1")
    key = f"{engines.valkey.prefix}:{{v:{shard_of('ad:1', 4)}}}:q"
    before = await engines.valkey.command("XLEN", key)
    for line in NO_HITS:
        with pytest.raises(ValkeyDown):
            await engines.valkey.call("headrace_views_hit_v1", [key], [line])
    assert await engines.valkey.command("XLEN", key) == before
    await flusher.run_once()
    assert await stored(sql) == ({"ad:1": 1}, 1)


@pytest.mark.parametrize("line", [*NO_HITS[1:], b"\xff\xfe"])
async def test_what_was_written_into_a_stream_by_hand_stops_no_flush(
    views, engines, flusher, sql, line
):
    await views.hit("ad:1")
    key = f"{engines.valkey.prefix}:{{v:{shard_of('ad:1', 4)}}}:q"
    await engines.valkey.command("XADD", key, "*", "v", line)
    await views.hit("ad:1")
    await flusher.run_once()
    totals, _ = await stored(sql)
    assert totals["ad:1"] == 2


@pytest.mark.slow
async def test_entries_of_any_size_are_read_in_bounded_parts(
    valkey_store, engines, views, flusher, sql
):
    """A thousand hits with long names each are 128 kB an entry; a read takes half a MB."""
    names = [f"{number:03}{'x' * 120}" for number in range(999)]
    await views.hits(names)
    for _ in range(100):
        line = ",".join(name for name in names if shard_of(name, 4) == 1)
        key = f"{engines.valkey.prefix}:{{v:1}}:q"
        await engines.multiplexer.call("headrace_views_hit_v1", [key], [line])
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
    assert found == [entry for entry in await stream(engines) if entry in found]
    assert len(found) == 101
    while await flusher.run_once():
        pass
    totals, _ = await stored(sql)
    assert totals == {name: 101 if shard_of(name, 4) == 1 else 1 for name in names}
