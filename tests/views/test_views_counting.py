"""A hit and its total: exact under concurrency, with viewers, days and malformed calls.

Orders of hits, flushes and losses are in `test_views_machine.py`.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta

import pytest
from tests.kit.storm.room_views import sweep_totals
from tests.views.room_harness import KeysCopy

from headrace.engines.multiplex import ValkeyRefused
from headrace.views import Hit, Total, counting
from headrace.views.errors import InvalidHit, InvalidSpan, ShardsFixed
from headrace.views.model import shard_of

SHARDS = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Fill totals also if PostgreSQL is slower on this machine than callers wait for."""
    monkeypatch.setattr(counting, "FILL_S", 60.0)


async def totals_of(views, *ids):
    return [total.total for total in await views.totals(ids)]


def key_of(engines, shard, rest="q"):
    return f"{engines.valkey.prefix}:{{v:{shard}}}:{rest}"


async def test_a_call_counts_each_hit_and_answers_in_order(views):
    assert await views.hit("ad:1") == Total(id="ad:1", total=1)
    ids = [f"ad:{number % 7}" for number in range(50)]
    totals = await views.hits(ids)
    assert [total.id for total in totals] == ids
    assert await totals_of(views, *sorted(set(ids))) == [8, 8, 7, 7, 7, 7, 7]
    again = await views.hits(["ad:1", "fresh", "ad:1", "ad:2", "fresh", "ad:1"])
    assert [total.total for total in again] == [9, 2, 10, 8, 2, 11]
    known = await views.hits(["ad:1", "new", Hit(id="ad:2", n=3)])
    assert [total.total for total in known] == [12, 1, 11]
    assert await views.hits([]) == await views.totals([]) == []
    assert await totals_of(views, "ad:9", "ad:6") == [0, 7]


async def test_a_list_that_changes_after_the_call_is_counted_as_it_was(views):
    for total in (1, 2):
        ids = ["ad:1", "ad:2"]
        counting = asyncio.create_task(views.hits(ids))
        await asyncio.sleep(0)
        ids.clear()
        assert await counting == [Total(id="ad:1", total=total), Total(id="ad:2", total=total)]


async def test_an_invalid_call_counts_nothing(views):
    await views.hits(["ad:1", "ad:2"])
    for wrong in ("abc", None, [None], ["a", 5], [Hit(id="a", viewer=5)]):
        with pytest.raises(InvalidHit):
            await views.hits(wrong)
    for wrong in ("no id", None, ["ad:2"], b"ad:1"):
        with pytest.raises(InvalidHit):
            await views.hits(["ad:1", wrong])
    for wrong in ("abc", ["a", None], [["a"]], None):
        with pytest.raises(InvalidHit):
            await views.totals(wrong)
    for field in (5, "yesterday"):
        with pytest.raises(InvalidHit, match=str(field)):
            await views.totals(["a"], fields=[field])
    assert await totals_of(views, "a", "ad:1") == [0, 1]


async def test_concurrent_callers_get_different_totals(make_views, engines):
    instances = [make_views() for _ in range(4)]
    first = await asyncio.gather(*[each.hit("ad:1") for each in instances for _ in range(50)])
    # The first calls were filled together: they return the total after all of them.
    assert max(total.total for total in first) == 200
    before = await engines.valkey.command("XLEN", key_of(engines, 1))
    again = await asyncio.gather(*[instances[0].hit("ad:1") for _ in range(200)])
    assert sorted(total.total for total in again) == list(range(201, 401))
    entries = await engines.valkey.command("XLEN", key_of(engines, 1))
    assert entries == before + 1, "hits of one tick are one entry per shard"
    for each in instances:
        assert await totals_of(each, "ad:1") == [400]


async def test_totals_of_any_size_are_exact(views, engines):
    await views.hit("ad:1")
    await engines.valkey.command("SET", key_of(engines, 1, "c:ad:1"), 10**15)
    assert (await views.hit("ad:1")).total == 10**15
    assert (await views.hit("ad:1", n=2)).total == 10**15 + 2


@pytest.mark.slow
async def test_fills_that_race_hits_are_exact(make_views, valkey_store, flusher):
    """Cached totals are dropped again and again while four instances count."""
    instances = [make_views() for _ in range(4)]
    seen: list[int] = []
    for step in range(20):
        calls = [each.hit("ad:1") for each in instances for _ in range(3)]
        answers = await asyncio.gather(*calls, valkey_store.drop_totals([1]))
        seen += [answer.total for answer in answers if type(answer) is Total]
        if step % 7 == 0:
            await flusher.run_once()
    assert max(seen) == 240
    assert (await instances[0].hit("ad:1", traffic="bot")).total == 240
    await flusher.run_once()
    await valkey_store.drop_totals(SHARDS)
    assert await totals_of(instances[0], "ad:1") == [240]


async def test_classes_and_events_are_counted_apart(views, flusher):
    for n, traffic in ((1, "human"), (3, "bot"), (2, "owner"), (1, "staff")):
        assert (await views.hit("ad:1", n=n, traffic=traffic)).total == 1
    assert (await views.hit("ad:2", traffic="bot")).total == 0
    for entity, traffic, total in (
        ("ad:1", "human", 2),
        ("ad:1", "human", 2),
        ("ad:2", "human", 1),
        ("ad:1", "bot", 2),
    ):
        hit = await views.hit(entity, event="e1", traffic=traffic)
        assert hit.total == total, "an event counts once per entity"
    await flusher.run_once()
    found = await views.totals(["ad:1", "ad:2"], fields=("total", "classes"))
    assert [each.classes for each in found] == [
        {"human": 2, "bot": 3, "owner": 2, "staff": 1},
        {"human": 1, "bot": 1},
    ]


async def test_viewers_of_today_are_estimated_and_outlive_valkey(views, flusher, engines):
    for number in range(10):
        await views.hits([Hit(id="ad:1", viewer=f"u{number * 9 + n}") for n in range(20)])
    [ad, none] = await views.totals(["ad:1", "ad:2"], fields=("unique",))
    assert 96 <= ad.unique <= 106
    assert none.unique == 0
    await flusher.run_once()
    assert [await flusher.write_uniques() for _ in range(2)] == [1, 0]
    await KeysCopy(engines.valkey).empty()
    assert await views.totals(["ad:1"], fields=("unique",)) == [ad]


async def test_viewers_of_past_days_are_read_and_dropped_by_age(views, engines, flusher, sql):
    await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(20)])
    today = datetime.now(UTC).date()
    for days, viewers in ((1, 7), (29, 5), (399, 3), (402, 2)):
        key = f"{engines.valkey.prefix}:sketch:{days}"
        await engines.valkey.command("PFADD", key, *range(viewers))
        sketch = (await engines.valkey.command("GET", key)).hex()
        await sql(
            f"INSERT INTO headrace.views_unique VALUES ('ad:1', '{today - timedelta(days=days)}',"
            f" {viewers}, decode('{sketch}', 'hex'))"
        )
    *past, last = await views.analytics.viewers("ad:1")
    assert [(row.day, row.viewers) for row in past] == [
        (today - timedelta(days=29), 5),
        (today - timedelta(days=1), 7),
    ]
    assert last.day == today
    assert 19 <= last.viewers <= 21
    yesterday = {"from_day": today - timedelta(days=1), "to_day": today}
    assert [row.viewers for row in await views.analytics.viewers("ad:1", **yesterday)] == [7]
    assert [await flusher.drop_old_viewers() for _ in range(2)] == [1, 0]
    longer = await views.analytics.viewers("ad:1", from_day=today - timedelta(days=1000))
    assert [row.viewers for row in longer[:-1]] == [3, 5, 7]


async def test_an_invalid_span_of_days_is_refused(views):
    for span in (
        {"from_day": "2026-11-01"},
        {"from_day": datetime(2026, 11, 1, tzinfo=UTC)},
        {"from_day": date(2026, 11, 2), "to_day": date(2026, 11, 2)},
        {"from_day": date(1, 1, 1), "to_day": date.max},
        {"to_day": date.min},
    ):
        with pytest.raises(InvalidSpan):
            await views.analytics.viewers("ad:1", **span)


async def test_today_begins_at_midnight_of_the_configured_time_zone(make_views, flusher, sql):
    views = make_views(time_zone="Asia/Tokyo")
    await views.hit("ad:1")
    await flusher.run_once()
    assert not await flusher.roll_up(), "the months around today exist, and none is old"
    for today in (1, 0):
        [ad] = await views.totals(["ad:1"], fields=("today",))
        assert ad.today == today
        await sql("UPDATE headrace.views_hour SET hour = hour - interval '24 hours'")


async def test_the_number_of_shards_is_fixed(make_views):
    await make_views(shards=4).hit("a")
    with pytest.raises(ShardsFixed, match="use 4 shards"):
        await make_views(shards=8).hit("a")


async def test_only_unused_totals_are_swept_and_deletion_marks_stay(views, flusher, valkey_store):
    await views.hits(["ad:1", "ad:2"])
    await views.delete("ad:3")
    await flusher.run_once()
    keys = valkey_store.total_keys(["ad:1", "ad:2", "ad:3"], [1, 3, 1])
    assert (await valkey_store.find_idle(b"0", SHARDS, idle_s=3_600))[1] == []
    await sweep_totals(valkey_store, SHARDS)
    assert await valkey_store.totals(keys) == [None, None, 0]
    assert (await views.hit("ad:1")).total == 2


async def test_fills_need_no_search_of_the_hits_that_wait(views, engines, flusher, valkey_store):
    """The stream has more entries than a fill may search. Flushed notes are deleted.

    The server has more keys of others than one step of a sweep.
    """
    others = [word for n in range(2_500) for word in (f"{engines.valkey.prefix}:other:{n}", 1)]
    await engines.valkey.command("MSET", *others)
    names = (name for name in (f"{n}{'x' * 120}" for n in range(99)) if shard_of(name, 4) == 1)
    new, often = next(names), next(names)
    await views.hit("ad:1")
    for _ in range(5):
        args = [key_of(engines, 1)], [",".join([often] * 1_000)]
        _, totals, _ = await engines.multiplexer.call("headrace_views_hit_v1", *args)
        assert set(totals.decode().split(",")) == {"-"}
    assert await views.hit(new) == Total(id=new, total=1)
    assert await views.hit(often, n=2) == Total(id=often, total=5_002)
    await sweep_totals(valkey_store, SHARDS)
    assert await views.hit(new) == Total(id=new, total=0, stale=True), "only a search finds them"
    while await flusher.run_once():
        pass
    for total in (3, 4):
        assert await views.hit(new) == Total(id=new, total=total)
        await flusher.run_once()
    notes = [key_of(engines, 1, key) for key in ("p", "po")]
    assert await engines.valkey.command("EXISTS", *notes) == 0


def other_of_shard_1(*, but="ad:1"):
    return next(name for name in map(str, range(99)) if shard_of(name, 4) == 1 and name != but)


async def hit_without_a_fill(engines, name, times):
    keys = [key_of(engines, 1)]
    await engines.multiplexer.call("headrace_views_hit_v1", keys, [",".join([name] * times)])


async def report_flushed(engines):
    """Report the known offset to Valkey, as a flusher does after its commit."""
    keys = [key_of(engines, 1), key_of(engines, 1, "m")]
    through = await engines.valkey.command("HGET", keys[1], "through")
    await engines.multiplexer.call("headrace_views_flushed_v1", keys, [through, ""])


async def test_a_read_is_stale_only_while_hits_of_its_uncached_total_wait(
    views, engines, flusher, valkey_store
):
    """As after an outage of PostgreSQL, during which no total is filled."""
    await views.hit("ad:1")
    new, quiet = other_of_shard_1(), "quiet"
    await hit_without_a_fill(engines, new, 3)
    read = await views.totals([new, quiet, "ad:1"])
    assert read == [
        Total(id=new, total=0, stale=True),
        Total(id=quiet, total=0),
        Total(id="ad:1", total=1),
    ]
    while await flusher.run_once():
        pass
    assert await views.totals([new, quiet]) == [Total(id=new, total=3), Total(id=quiet, total=0)]
    await views.hit("ad:1")
    await valkey_store.drop_totals(SHARDS)
    assert await views.totals(["ad:1"]) == [Total(id="ad:1", total=1, stale=True)]
    while await flusher.run_once():
        pass
    assert await views.totals(["ad:1"]) == [Total(id="ad:1", total=2)]


async def test_hits_noted_before_a_report_of_the_flusher_count(views, engines):
    await views.hit("ad:1")
    new = other_of_shard_1()
    await hit_without_a_fill(engines, new, 3)
    await report_flushed(engines)
    await hit_without_a_fill(engines, new, 2)
    assert await views.hit(new) == Total(id=new, total=6)


async def test_an_older_offset_of_postgres_finds_the_hits_of_deleted_notes(
    views, engines, flusher, sql
):
    """After a failover that lost a flush, the hits are only in the stream."""
    await views.hit("ad:1")
    await flusher.run_once()
    [before] = await sql("SELECT through FROM headrace.views_shard WHERE shard = 1")
    new = other_of_shard_1()
    await hit_without_a_fill(engines, new, 3)
    while await flusher.run_once():
        pass
    for _ in range(2):
        await report_flushed(engines)
    notes = [key_of(engines, 1, key) for key in ("p", "po")]
    assert await engines.valkey.command("EXISTS", *notes) == 0
    await sql(f"UPDATE headrace.views_shard SET through = '{before['through']}' WHERE shard = 1")
    await sql(f"DELETE FROM headrace.views_total WHERE id = '{new}'")
    assert await views.hit(new) == Total(id=new, total=4)


async def test_hits_of_a_cached_total_count_after_the_end_of_a_deletion(
    views, engines, flusher, sql
):
    """They left no note, and wait for a flusher for longer than the deletion lasts."""
    await views.hits(["ad:1"] * 3)
    await views.delete("ad:1")
    await sql("DELETE FROM headrace.views_tombstone")
    await engines.valkey.command("DEL", key_of(engines, 1, "c:ad:1"))
    assert await views.hit("ad:1") == Total(id="ad:1", total=4)
    while await flusher.run_once():
        pass
    assert [row["total"] for row in await sql("SELECT total FROM headrace.views_total")] == [4]


async def test_a_hit_gets_an_id_after_the_highest_known_one(views, engines, flusher, sql):
    """The clock of the server is behind PostgreSQL's offset."""
    await views.hit("ad:1")
    await flusher.run_once()
    ahead_ms = int(datetime.now(UTC).timestamp() * 1000) + 3_600_000
    await sql(f"UPDATE headrace.views_shard SET through = '{ahead_ms}-7'")
    views._shards.floors_ms[1] = str(ahead_ms)
    await views.hit("ad:1")
    [last] = await engines.valkey.command("XREVRANGE", key_of(engines, 1), "+", "-", "COUNT", 1)
    assert int(last[0].decode().split("-")[0]) == ahead_ms + 1


@pytest.mark.parametrize("mark", ["", "!e7", "*3"])
async def test_a_call_to_the_wrong_shard_is_refused_and_counts_nothing(views, engines, mark):
    """Neither the ids of the shard before the wrong one nor the events are counted."""
    names = [f"ad:{number}" for number in range(40)]
    await views.hits(names)
    here = [name for name in names if shard_of(name, 4) == 1]
    stray = next(name for name in names if shard_of(name, 4) == 2)
    key = key_of(engines, 1)
    before = await engines.valkey.command("XLEN", key)
    for line in ([stray], [*here, here[0], stray, here[1]], [stray, here[0]]):
        marked = ",".join(f"{name}{mark}" for name in line)
        with pytest.raises(ValkeyRefused) as raised:
            await engines.multiplexer.call("headrace_views_hit_v1", [key], [marked])
        assert "nothing was counted" in raised.value.reply
        assert f'"{stray}" is of another shard' in raised.value.reply
    line = ",".join([f"{here[0]}{mark}"] * 1_001)
    with pytest.raises(ValkeyRefused, match="at most 1000 hits"):
        await engines.multiplexer.call("headrace_views_hit_v1", [key], [line])
    assert await engines.valkey.command("XLEN", key) == before
    assert await totals_of(views, *names) == [1] * 40
    new = next(name for name in (f"new:{n}" for n in range(100)) if shard_of(name, 4) == 1)
    marked = ",".join(f"{name}{mark}" for name in [*here, new])
    _, totals, _ = await engines.multiplexer.call("headrace_views_hit_v1", [key], [marked])
    assert totals.decode().split(",") == ["4" if mark == "*3" else "2"] * len(here) + ["-"]
