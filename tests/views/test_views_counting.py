"""A hit and its total: exact at once, whatever is pending, cached or not, however it is marked."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta

import pytest

from headrace.engines.multiplex import ValkeyRefused
from headrace.views import Hit, Total, Traffic
from headrace.views.errors import FieldUnknown, InvalidHit, InvalidSpan, ShardsFixed
from headrace.views.model import shard_of


async def total_of(views, entity):
    [total] = await views.totals([entity])
    return total.total


async def test_a_hit_is_answered_with_the_total_after_it(views):
    assert await views.hit("ad:1") == Total(id="ad:1", total=1)
    assert (await views.hit("ad:1", n=5)).total == 6
    assert await total_of(views, "ad:1") == 6
    assert await total_of(views, "ad:2") == 0


async def test_a_call_of_hits_counts_each_and_answers_in_order(views):
    ids = [f"ad:{number % 7}" for number in range(50)]
    totals = await views.hits(ids)
    assert [total.id for total in totals] == ids
    found = {total.id: total.total for total in await views.totals(sorted(set(ids)))}
    assert found == {f"ad:{number}": 8 if number == 0 else 7 for number in range(7)}


async def test_a_list_that_changes_after_the_call_was_counted_as_it_was(views):
    for total in (1, 2):
        ids = ["ad:1", "ad:2"]
        counting = asyncio.create_task(views.hits(ids))
        await asyncio.sleep(0)
        ids.clear()
        assert await counting == [Total(id="ad:1", total=total), Total(id="ad:2", total=total)]


async def test_known_ids_among_new_and_wrong_ones(views):
    await views.hits(["ad:1", "ad:2"])
    assert [one.total for one in await views.hits(["ad:1", "new", Hit(id="ad:2", n=3)])] == [
        2,
        1,
        4,
    ]
    for wrong in (["ad:1", "no id"], ["ad:1", None], ["ad:1", ["ad:2"]], ["ad:1", b"ad:1"]):
        with pytest.raises(InvalidHit):
            await views.hits(wrong)
    assert await total_of(views, "ad:1") == 2


async def test_many_callers_at_once_get_totals_that_each_of_them_raised(views):
    totals = await asyncio.gather(*[views.hit("ad:1") for _ in range(200)])
    # Those of the first call were filled together: they are told the total after all of it.
    assert max(total.total for total in totals) == 200
    again = await asyncio.gather(*[views.hit("ad:1") for _ in range(200)])
    assert sorted(total.total for total in again) == list(range(201, 401))


async def test_what_is_no_list_of_hits_counts_nothing(views):
    for wrong in ("abc", [None], ["a", 5], [Hit(id="a", viewer=5)], None):
        with pytest.raises(InvalidHit):
            await views.hits(wrong)
    with pytest.raises(InvalidHit):
        await views.hit(5)
    for wrong in ("abc", ["a", None], [["a"]], None):
        with pytest.raises(InvalidHit):
            await views.totals(wrong)
    with pytest.raises(FieldUnknown):
        await views.totals(["a"], fields=[5])
    assert [total.total for total in await views.totals(("a", "b", "c"))] == [0, 0, 0]
    assert [total.total for total in await views.totals(name for name in "abc")] == [0, 0, 0]


async def test_totals_of_any_size_are_told_in_whole(views, engines):
    await views.hit("ad:1")
    key = f"{engines.valkey.prefix}:{{v:1}}:c:ad:1"
    await engines.valkey.command("SET", key, 10**15)
    assert (await views.hit("ad:1")).total == 10**15
    assert (await views.hit("ad:1", n=2)).total == 10**15 + 2


async def test_several_instances_see_the_same_numbers(make_views):
    instances = [make_views() for _ in range(4)]
    for _ in range(5):
        await asyncio.gather(*[each.hits(["a", "b", "b"]) for each in instances])
    for each in instances:
        assert [t.total for t in await each.totals(["a", "b"])] == [20, 40]


async def test_a_total_that_was_dropped_comes_back_with_what_is_pending(
    views, valkey_store, flusher
):
    await views.hits(["ad:1"] * 10)
    await flusher.run_once()
    await views.hits(["ad:1"] * 3 + [Hit(id="ad:1", n=4), Hit(id="ad:1", traffic=Traffic.BOT)])
    assert await valkey_store.drop_totals([0, 1, 2, 3]) == 1
    assert (await views.hit("ad:1")).total == 18
    assert await total_of(views, "ad:1") == 18


@pytest.mark.slow
async def test_fills_that_race_hits_are_exact(make_views, valkey_store, flusher):
    """Totals are dropped all the time, while four instances count and a flusher flushes."""
    instances = [make_views() for _ in range(4)]
    seen: list[int] = []
    for step in range(30):
        calls = [each.hit("ad:1") for each in instances for _ in range(3)]
        seen += [
            total.total
            for total in await asyncio.gather(*calls, valkey_store.drop_totals([1]))
            if type(total) is Total
        ]
        if step % 7 == 0:
            await flusher.run_once()
    assert max(seen) == 360
    assert (await instances[0].hit("ad:1", traffic="bot")).total == 360
    await flusher.run_once()
    await valkey_store.drop_totals([0, 1, 2, 3])
    assert await total_of(instances[0], "ad:1") == 360


async def test_classes_are_counted_apart_and_people_are_the_total(views, flusher):
    await views.hit("ad:1")
    for traffic, times in ((Traffic.BOT, 3), (Traffic.OWNER, 2), (Traffic.STAFF, 1)):
        total = await views.hit("ad:1", n=times, traffic=traffic)
        assert total.total == 1
    assert (await views.hit("only-bots", traffic="bot")).total == 0
    assert (await views.hit("only-bots")).total == 1
    await flusher.run_once()
    [ad, bots] = await views.totals(["ad:1", "only-bots"], fields=("total", "classes"))
    assert ad.classes == {"human": 1, "bot": 3, "owner": 2, "staff": 1}
    assert bots.classes == {"human": 1, "bot": 1}


async def test_an_event_counts_once(views, flusher):
    first = await views.hit("ad:1", event="e1")
    again = await views.hit("ad:1", event="e1")
    assert (first.total, again.total) == (1, 1)
    totals = await views.hits([Hit(id="ad:1", event="e2"), Hit(id="ad:1", event="e2"), "ad:1"])
    assert [total.total for total in totals][-1] == 3
    assert (await views.hit("ad:2", event="e1")).total == 1, "an event is of its entity"
    assert (await views.hit("ad:1", event="e1", traffic="bot")).total == 3
    await flusher.run_once()
    assert [t.classes for t in await views.totals(["ad:1"], fields=("classes",))] == [{"human": 3}]


@pytest.mark.slow
async def test_viewers_of_a_day_are_estimated(views, flusher, valkey_store):
    for number in range(100):
        await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(number, number + 10)])
    [ad, none] = await views.totals(["ad:1", "ad:2"], fields=("unique",))
    assert 105 <= ad.unique <= 113
    assert none.unique == 0
    await flusher.run_once()
    assert await flusher.write_uniques() == 1
    assert await flusher.write_uniques() == 0


async def test_viewers_written_down_outlive_valkey(views, flusher, engines):
    await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(20)])
    await flusher.run_once()
    await flusher.write_uniques()
    await drop_all(engines)
    [ad] = await views.totals(["ad:1"], fields=("unique",))
    assert 19 <= ad.unique <= 21


async def test_viewers_of_past_days_are_read_and_dropped_by_age(views, flusher, sql):
    """Yesterday's from PostgreSQL, today's from Valkey as well.

    What is older than `views.viewers_kept` goes.
    """
    await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(20)])
    today = datetime.now(UTC).date()
    past = {
        today - timedelta(days=days): viewers
        for days, viewers in ((1, 7), (29, 5), (399, 3), (402, 2))
    }
    for day, viewers in past.items():
        await sql(
            "INSERT INTO headrace.views_unique (id, day, viewers)"
            f" VALUES ('ad:1', '{day}', {viewers})"
        )
    found = await views.analytics.viewers("ad:1")
    assert [(row.day, row.viewers) for row in found[:-1]] == [
        (today - timedelta(days=29), 5),
        (today - timedelta(days=1), 7),
    ]
    assert found[-1].day == today
    assert 19 <= found[-1].viewers <= 21
    yesterday = await views.analytics.viewers(
        "ad:1", from_day=today - timedelta(days=1), to_day=today
    )
    assert [row.viewers for row in yesterday] == [7]
    assert await flusher.drop_old_viewers() == 1
    assert await flusher.drop_old_viewers() == 0
    longer = await views.analytics.viewers("ad:1", from_day=today - timedelta(days=1000))
    assert [row.viewers for row in longer[:-1]] == [3, 5, 7]


@pytest.mark.parametrize(
    "span",
    [
        {"from_day": "2026-11-01"},
        {"from_day": datetime(2026, 11, 1, tzinfo=UTC)},
        {"from_day": date(2026, 11, 2), "to_day": date(2026, 11, 2)},
        {"from_day": date(1, 1, 1), "to_day": date.max},
        {"to_day": date.min},
    ],
)
async def test_a_span_of_days_that_means_nothing_is_refused(views, span):
    with pytest.raises(InvalidSpan):
        await views.analytics.viewers("ad:1", **span)


async def test_today_begins_at_midnight_of_the_deployment(make_views, flusher, sql):
    await make_views().hit("ad:1")
    await flusher.run_once()
    [ad] = await make_views(time_zone="Asia/Tokyo").totals(["ad:1"], fields=("today",))
    assert ad.today == 1
    await sql("UPDATE headrace.views_hour SET hour = hour - interval '24 hours'")
    [ad] = await make_views(time_zone="Asia/Tokyo").totals(["ad:1"], fields=("today",))
    assert ad.today == 0


async def test_a_field_that_does_not_exist_is_named(views):
    with pytest.raises(FieldUnknown, match="yesterday"):
        await views.totals(["a"], fields=("yesterday",))


async def test_the_number_of_shards_stays(make_views):
    await make_views(shards=4).hit("a")
    with pytest.raises(ShardsFixed, match="use 4 shards"):
        await make_views(shards=8).hit("a")


@pytest.mark.parametrize("hits", [[], None])
async def test_nothing_is_counted_for_nothing(views, hits):
    assert await views.hits(hits or []) == []
    assert await views.totals([]) == []


async def test_totals_nobody_asks_for_are_forgotten_once_flushed(
    views, flusher, valkey_store, make_flusher
):
    await views.hits(["ad:1", "ad:2"])
    await views.delete("ad:3")
    await flusher.run_once()
    shards = [0, 1, 2, 3]
    await valkey_store.sweep(b"0", shards, idle_s=3_600)
    assert await valkey_store.totals(valkey_store.total_keys(["ad:1", "ad:2"], [1, 3])) == [1, 1]
    cursor = await valkey_store.sweep(b"0", shards, idle_s=0)
    while cursor != b"0":
        cursor = await valkey_store.sweep(cursor, shards, idle_s=0)
    assert await valkey_store.totals(
        valkey_store.total_keys(["ad:1", "ad:2", "ad:3"], [1, 3, 1])
    ) == [None, None, 0]
    assert (await views.hit("ad:1")).total == 2


async def test_hits_of_one_tick_are_one_entry_a_shard(views, engines):
    await views.hit("ad:1")
    before = await length(engines, 1)
    await asyncio.gather(*[views.hit("ad:1") for _ in range(50)])
    assert await length(engines, 1) == before + 1


async def test_a_hit_comes_after_the_latest_moment_that_is_known(views, engines, flusher, sql):
    """As where a server lost its tail and its clock is behind.

    PostgreSQL's offset is ahead of the clock.
    """
    await views.hit("ad:1")
    await flusher.run_once()
    ahead_ms = int(datetime.now(UTC).timestamp() * 1000) + 3_600_000
    await sql(f"UPDATE headrace.views_shard SET through = '{ahead_ms}-7'")
    for each in (views,):
        each._shards.floors_ms[1] = str(ahead_ms)
        await each.hit("ad:1")
    rows = await engines.valkey.command("XRANGE", f"{engines.valkey.prefix}:{{v:1}}:q", "-", "+")
    last = rows[-1][0].decode()
    assert int(last.split("-")[0]) == ahead_ms + 1


async def length(engines, shard):
    return await engines.valkey.command("XLEN", f"{engines.valkey.prefix}:{{v:{shard}}}:q")


async def drop_all(engines):
    keys = await engines.valkey.command("KEYS", f"{engines.valkey.prefix}:*")
    await engines.valkey.command("DEL", *keys)


@pytest.mark.parametrize("mark", ["", "!e7", "*3"])
async def test_a_call_in_the_wrong_shard_is_refused_and_counts_nothing(views, engines, mark):
    """Ids of the shard that stand before the stray one are as they were; so are events."""
    names = [f"ad:{number}" for number in range(40)]
    await views.hits(names)
    here = [name for name in names if shard_of(name, 4) == 1]
    stray = next(name for name in names if shard_of(name, 4) == 2)
    key = f"{engines.valkey.prefix}:{{v:1}}:q"

    async def entries():
        return await engines.valkey.command("XLEN", key)

    before = await entries()
    for line in (stray, ",".join([*here, here[0], stray, here[1]]), f"{stray},{here[0]}"):
        marked = ",".join(f"{name}{mark}" for name in line.split(","))
        with pytest.raises(ValkeyRefused) as raised:
            await engines.multiplexer.call("headrace_views_hit_v1", [key], [marked])
        assert "nothing was counted" in raised.value.reply
        assert f'"{stray}" is of another shard' in raised.value.reply
    assert await entries() == before
    assert [total.total for total in await views.totals(names)] == [1] * 40
    marked = ",".join(f"{name}{mark}" for name in [*here, "new:" + stray_of(1)])
    _, told, _ = await engines.multiplexer.call("headrace_views_hit_v1", [key], [marked])
    assert told.decode().split(",") == ["4" if mark == "*3" else "2"] * len(here) + ["-"]


def stray_of(shard):
    """The end of an id that nobody has seen, and that is of this shard."""
    return next(str(n) for n in range(100) if shard_of(f"new:{n}", 4) == shard)
