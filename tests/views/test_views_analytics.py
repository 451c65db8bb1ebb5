"""Series across midnights, top lists, deletions, moves between classes, verification."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest

from headrace.testing.jobs import drain
from headrace.views import Hit, SeriesPoint
from headrace.views import store as views_store
from headrace.views.errors import InvalidSpan
from headrace.views.model import Count, hour_at, shard_of

HOUR = timedelta(hours=1)


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


NOON = at("2026-03-01T12:00")
ONE_HOUR = {"from_at": NOON, "to_at": NOON + HOUR}
MOVE = {**ONE_HOUR, "source": "human", "target": "bot"}


def hour_of(moment):
    return int(moment.timestamp()) // 3600


@pytest.fixture
def count(postgres):
    """`await count(("ad:1", 0, moment, 5), ...)`: flush views as if hit at a moment."""

    async def flush(*rows):
        await views_store.ensure_shards(postgres, 4)
        for entity, traffic, moment, views in rows:
            state = await views_store.find_shard(postgres, shard_of(entity, 4))
            to_id = f"{max(10**12, int(state.through.partition('-')[0])) + 1}-0"
            counts = [Count(entity, traffic, hour_of(moment), views)]
            dead = await views_store.flush(
                postgres,
                state.shard,
                setups=state.setups,
                from_id=state.through,
                to_id=to_id,
                counts=counts,
            )
            assert dead == []

    return flush


async def test_hours_are_of_utc_and_classes_apart(views, count):
    later = NOON + HOUR
    await count(
        ("ad:1", 0, NOON, 3), ("ad:1", 0, NOON, 2), ("ad:1", 1, NOON, 7), ("ad:1", 0, later, 1)
    )
    span = {"from_at": NOON, "to_at": NOON + 2 * HOUR}
    assert await views.analytics.series("ad:1", "hour", **span) == [
        SeriesPoint(start_at=NOON, human=5, bot=7),
        SeriesPoint(start_at=later, human=1),
    ]
    assert await views.analytics.series("ad:2", **ONE_HOUR) == []


async def test_days_begin_at_local_midnight_also_when_clocks_change(make_views, count):
    """Amsterdam, 2026-03-29: the day has 23 hours, from 23:00 UTC to 22:00 UTC."""
    views = make_views(time_zone="Europe/Amsterdam")
    hours = ("2026-03-28T22:00", "2026-03-28T23:00", "2026-03-29T21:00", "2026-03-29T22:00")
    await count(*[("ad:1", 0, at(hour), 10**n) for n, hour in enumerate(hours)])
    span = {"from_at": at("2026-03-27T23:00"), "to_at": at("2026-03-31T00:00")}
    assert await views.analytics.series("ad:1", "day", **span) == [
        SeriesPoint(start_at=at("2026-03-27T23:00"), human=1),
        SeriesPoint(start_at=at("2026-03-28T23:00"), human=110),
        SeriesPoint(start_at=at("2026-03-29T22:00"), human=1000),
    ]


async def test_the_default_span_begins_with_a_whole_day(make_views, count):
    """Hours are whole hours of UTC: where midnight is inside one, the day begins with the next."""
    for number, time_zone in enumerate(("UTC", "Asia/Kolkata", "America/St_Johns")):
        zone = ZoneInfo(time_zone)
        day = (datetime.now(UTC) + HOUR - timedelta(days=30)).astimezone(zone).date()
        midnight = datetime.combine(day, datetime.min.time(), zone).astimezone(UTC)
        hour = hour_at(hour_of(midnight + timedelta(minutes=59)))
        await count((f"ad:{number}", 0, hour, 5), (f"ad:{number}", 0, hour - HOUR, 7))
        series = await make_views(time_zone=time_zone).analytics.series(f"ad:{number}", "day")
        assert series == [SeriesPoint(start_at=midnight, human=5)]


async def test_invalid_spans_are_refused(views):
    first, last = datetime.min.replace(tzinfo=UTC), at("2026-01-02T00:00")
    for wrong in (
        {"by": "week"},
        {"by": 5},
        {"from_at": "2026-01-01"},
        {"by": "day", "to_at": first + timedelta(days=29)},
        {"from_at": datetime(2026, 1, 1), "to_at": last},  # noqa: DTZ001
        {"from_at": last, "to_at": last},
        {"from_at": last - timedelta(days=365), "to_at": last},
        {"by": "day", "from_at": first, "to_at": last},
    ):
        with pytest.raises(InvalidSpan):
            await views.analytics.series("ad:1", **wrong)
    for wrong in ({"target": "human"}, {"from_at": NOON + HOUR / 2}, {"to_at": NOON - HOUR}):
        with pytest.raises(InvalidSpan):
            await views.corrections.reclassify("ad:1", **(MOVE | wrong))
    for wrong in ((0, 5), (32 * 86_400, 5), (3600, 0), (3600, 1_001), ("24h", 5), (3600, "5")):
        with pytest.raises(InvalidSpan):
            await views.analytics.top(*wrong)


async def test_top_lists_are_of_their_window_and_class(make_views, count):
    now_at = datetime.now(UTC)
    await count(
        ("old", 0, now_at - 30 * HOUR, 900),
        ("a", 0, now_at, 5),
        ("b", 0, now_at - 2 * HOUR, 7),
        ("c", 0, now_at, 7),
        ("c", 1, now_at, 70),
    )
    for arguments, top in (
        ((), [("b", 7), ("c", 7), ("a", 5)]),
        ((3600, 2), [("c", 7), ("a", 5)]),
        ((31 * 86_400, 1), [("old", 900)]),
    ):
        found = await make_views().analytics.top(*arguments)
        assert [(entry.id, entry.views) for entry in found] == top
    [bots] = await make_views().analytics.top(traffic="bot")
    assert (bots.id, bots.views) == ("c", 70)


async def test_a_deleted_entity_stays_deleted(views, flusher, sql, valkey_store):
    bot, viewer = Hit(id="ad:1", traffic="bot"), Hit(id="ad:1", viewer="u1")
    await views.hits([*["ad:1"] * 5, "ad:2", bot, viewer])
    await flusher.run_once()
    await flusher.write_uniques()
    await views.hits(["ad:1"] * 3)
    await views.corrections.mark("ad:1", "promoted")
    deleted = await views.delete("ad:1")
    assert (deleted.id, deleted.total) == ("ad:1", 6)
    assert timedelta(days=29) < deleted.until_at - datetime.now(UTC) <= timedelta(days=30)
    for _ in range(2):
        assert (await views.hit("ad:1")).total == 0
        await flusher.run_once()
        await valkey_store.drop_totals([0, 1, 2, 3])
    found = await views.totals(["ad:1", "ad:2"], fields=("total", "unique"))
    assert [(t.total, t.unique) for t in found] == [(0, 0), (1, 0)]
    for table in ("total", "hour", "unique", "mark"):
        assert await sql(f"SELECT * FROM headrace.views_{table} WHERE id = 'ad:1'") == []
    [row] = await sql("SELECT dropped FROM headrace.views_tombstone")
    assert row["dropped"] == 5
    assert (await views.delete("ad:1")).total == 0
    assert (await views.analytics.verify()).views == 1


async def test_hits_and_flushes_that_race_a_deletion_leave_nothing(views, flusher, sql):
    for number in range(15):
        entity = f"ad:{number}"
        hits = views.hits([entity] * 20)
        await asyncio.gather(hits, flusher.run_once(), views.delete(entity), views.hits([entity]))
    await flusher.run_once()
    for table in ("total", "hour"):
        assert await sql(f"SELECT * FROM headrace.views_{table}") == []


async def test_after_its_tombstone_an_entity_is_counted_again(views, flusher, sql, engines):
    await views.hit("ad:1")
    await views.delete("ad:1")
    await sql("UPDATE headrace.views_tombstone SET until_at = now() - interval '1 second'")
    await engines.valkey.command("DEL", f"{engines.valkey.prefix}:{{v:1}}:c:ad:1")
    await flusher.run_once()
    await views.hit("ad:1")
    await flusher.run_once()
    assert [row["total"] for row in await sql("SELECT total FROM headrace.views_total")] == [2]


async def test_a_job_moves_views_between_classes_once(views, app, count, flusher):
    await count(("ad:1", 0, NOON, 30), ("ad:1", 0, NOON + HOUR, 4), ("ad:1", 1, NOON, 1))
    assert (await views.hit("ad:1")).total == 35
    assert await views.corrections.reclassify("ad:1", **MOVE) > 0
    assert await drain(app) == {"done": 1}
    assert (await views.hit("ad:1")).total == 6
    await flusher.run_once()
    [ad] = await views.totals(["ad:1"], fields=("classes",))
    assert ad.classes == {"human": 6, "bot": 31}
    assert (await views.analytics.verify()).differences == []
    await views.corrections.reclassify("ad:1", **MOVE)
    assert await drain(app) == {"done": 1}
    assert (await views.totals(["ad:1"]))[0].total == 6


async def test_a_total_read_before_a_move_is_not_cached_after_it(
    views, valkey_store, count, postgres
):
    await count(("ad:1", 0, NOON, 30))
    await views.hit("ad:2")
    await views._shards.set_up(1)
    [old] = await views_store.totals_to_fill(postgres, ["ad:1"], [1])
    await views.corrections.move(SimpleNamespace(id="ad:1", **MOVE))
    filled = await valkey_store.fill(
        1, through=old.through, corrections=old.corrections, totals=[("ad:1", old.total)]
    )
    assert filled is None, "the snapshot is too old"
    assert (await views.hit("ad:1")).total == 1


async def test_verify_finds_totals_that_differ_from_their_hours(views, count, sql):
    await count(("ad:1", 0, hour_at(500_000), 5), ("ad:2", 1, hour_at(500_000), 2))
    found = await views.analytics.verify()
    assert (found.entities, found.views, found.differences) == (2, 7, [])
    await sql("UPDATE headrace.views_total SET total = 9 WHERE id = 'ad:2'")
    await sql("DELETE FROM headrace.views_hour WHERE id = 'ad:1'")
    found = await views.analytics.verify()
    assert [(d.id, d.traffic, d.total, d.hours) for d in found.differences] == [
        ("ad:1", "human", 5, 0),
        ("ad:2", "bot", 9, 2),
    ]
