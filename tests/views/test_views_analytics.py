"""Series over midnights, top lists, deletion with racing hits, moves between classes, the proof."""

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


def hour_of(moment):
    return int(moment.timestamp()) // 3600


@pytest.fixture
def count(postgres):
    """`await count([("ad:1", 0, moment, 5)])`: flush these as if they had been hit then."""

    async def flush(rows):
        await views_store.ensure_shards(postgres, 4)
        for entity, traffic, moment, views in rows:
            shard = shard_of(entity, 4)
            state = await views_store.find_shard(postgres, shard)
            to_id = f"{max(10**12, int(state.through.partition('-')[0])) + 1}-0"
            counts = [Count(entity, traffic, hour_of(moment), views)]
            dead = await views_store.flush(
                postgres, shard, from_id=state.through, to_id=to_id, counts=counts
            )
            assert dead == []

    return flush


async def test_hours_are_of_utc_and_classes_apart(views, count):
    noon = at("2026-03-01T12:00")
    await count(
        [
            ("ad:1", 0, noon, 3),
            ("ad:1", 0, noon, 2),
            ("ad:1", 1, noon, 7),
            ("ad:1", 0, noon + HOUR, 1),
        ]
    )
    assert await views.analytics.series("ad:1", "hour", from_at=noon, to_at=noon + 2 * HOUR) == [
        SeriesPoint(start_at=noon, human=5, bot=7),
        SeriesPoint(start_at=noon + HOUR, human=1),
    ]
    assert await views.analytics.series("ad:2", from_at=noon, to_at=noon + HOUR) == []


async def test_days_begin_at_the_deployments_midnight_also_when_clocks_change(make_views, count):
    """Amsterdam, 2026-03-29: the day has 23 hours, from 23:00 UTC to 22:00 UTC."""
    views = make_views(time_zone="Europe/Amsterdam")
    await count(
        [
            ("ad:1", 0, at("2026-03-28T22:00"), 1),
            ("ad:1", 0, at("2026-03-28T23:00"), 10),
            ("ad:1", 0, at("2026-03-29T21:00"), 100),
            ("ad:1", 0, at("2026-03-29T22:00"), 1000),
        ]
    )
    span = {"from_at": at("2026-03-27T23:00"), "to_at": at("2026-03-31T00:00")}
    assert await views.analytics.series("ad:1", "day", **span) == [
        SeriesPoint(start_at=at("2026-03-27T23:00"), human=1),
        SeriesPoint(start_at=at("2026-03-28T23:00"), human=110),
        SeriesPoint(start_at=at("2026-03-29T22:00"), human=1000),
    ]


@pytest.mark.parametrize("time_zone", ["UTC", "Asia/Kolkata", "America/St_Johns"])
async def test_days_begin_with_a_whole_one_where_no_beginning_is_named(
    make_views, count, time_zone
):
    """Hours are whole ones of UTC: where midnight is within one, the day begins with the next."""
    zone = ZoneInfo(time_zone)
    day = (datetime.now(UTC) + HOUR - timedelta(days=30)).astimezone(zone).date()
    midnight = datetime.combine(day, datetime.min.time(), zone).astimezone(UTC)
    hour = hour_at(hour_of(midnight + timedelta(minutes=59)))
    await count([("ad:1", 0, hour, 5), ("ad:1", 0, hour - HOUR, 7)])
    assert await make_views(time_zone=time_zone).analytics.series("ad:1", "day") == [
        SeriesPoint(start_at=midnight, human=5)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"by": "week"},
        {"by": 5},
        {"from_at": "2026-01-01"},
        {"by": "day", "to_at": datetime.min.replace(tzinfo=UTC) + timedelta(days=29)},
        {"from_at": datetime(2026, 1, 1), "to_at": at("2026-01-02T00:00")},  # noqa: DTZ001
        {"from_at": at("2026-01-02T00:00"), "to_at": at("2026-01-02T00:00")},
        {"from_at": at("2025-01-02T00:00"), "to_at": at("2026-01-02T00:00")},
        {"by": "day", "from_at": datetime.min.replace(tzinfo=UTC), "to_at": at("2026-01-02T00:00")},
    ],
)
async def test_a_span_that_means_nothing_is_refused(views, wrong):
    with pytest.raises(InvalidSpan):
        await views.analytics.series("ad:1", **wrong)


async def test_top_lists_are_of_their_window_and_class(make_views, count):
    now_at = datetime.now(UTC)
    await count(
        [
            ("old", 0, now_at - 30 * HOUR, 900),
            ("a", 0, now_at, 5),
            ("b", 0, now_at - 2 * HOUR, 7),
            ("c", 0, now_at, 7),
            ("c", 1, now_at, 70),
        ]
    )
    assert [(t.id, t.views) for t in await make_views().analytics.top()] == [
        ("b", 7),
        ("c", 7),
        ("a", 5),
    ]
    assert [t.id for t in await make_views().analytics.top(3600, 2)] == ["c", "a"]
    assert [t.id for t in await make_views().analytics.top(31 * 86_400, 1)] == ["old"]
    assert [(t.id, t.views) for t in await make_views().analytics.top(traffic="bot")] == [("c", 70)]
    for wrong in ((0, 5), (32 * 86_400, 5), (3600, 0), (3600, 1_001), ("24h", 5), (3600, "5")):
        with pytest.raises(InvalidSpan):
            await make_views().analytics.top(*wrong)


async def test_a_deleted_entity_is_gone_and_stays_so(views, flusher, sql, valkey_store):
    await views.hits(
        ["ad:1"] * 5 + ["ad:2", Hit(id="ad:1", traffic="bot"), Hit(id="ad:1", viewer="u1")]
    )
    await flusher.run_once()
    await flusher.write_uniques()
    await views.hits(["ad:1"] * 3)
    deleted = await views.delete("ad:1")
    assert (deleted.id, deleted.total) == ("ad:1", 6)
    assert timedelta(days=29) < deleted.until_at - datetime.now(UTC) <= timedelta(days=30)
    assert (await views.hit("ad:1")).total == 0
    await flusher.run_once()
    await valkey_store.drop_totals([0, 1, 2, 3])
    assert (await views.hit("ad:1")).total == 0
    await flusher.run_once()
    found = await views.totals(["ad:1", "ad:2"], fields=("total", "unique"))
    assert [(t.total, t.unique) for t in found] == [(0, 0), (1, 0)]
    for table in ("total", "hour", "unique"):
        assert await sql(f"SELECT * FROM headrace.views_{table} WHERE id = 'ad:1'") == []
    [row] = await sql("SELECT dropped FROM headrace.views_tombstone")
    assert row["dropped"] == 5
    assert (await views.delete("ad:1")).total == 0
    assert (await views.analytics.verify()).views == 1


async def test_deleting_beside_hits_and_flushes_leaves_nothing(views, flusher, sql):
    for number in range(15):
        entity = f"ad:{number}"
        await asyncio.gather(
            views.hits([entity] * 20),
            flusher.run_once(),
            views.delete(entity),
            views.hits([entity]),
        )
    await flusher.run_once()
    assert await sql("SELECT * FROM headrace.views_total") == []
    assert await sql("SELECT * FROM headrace.views_hour") == []


async def test_after_its_tombstone_an_entity_begins_anew(views, flusher, sql, engines):
    await views.hit("ad:1")
    await views.delete("ad:1")
    await sql("UPDATE headrace.views_tombstone SET until_at = now() - interval '1 second'")
    await engines.valkey.command("DEL", f"{engines.valkey.prefix}:{{v:1}}:c:ad:1")
    await flusher.run_once()
    await views.hit("ad:1")
    await flusher.run_once()
    assert [row["total"] for row in await sql("SELECT total FROM headrace.views_total")] == [2]


async def test_views_move_between_classes_by_a_job(views, jobs, engines, count, flusher):
    noon = at("2026-03-01T12:00")
    await count([("ad:1", 0, noon, 30), ("ad:1", 0, noon + HOUR, 4), ("ad:1", 1, noon, 1)])
    assert (await views.hit("ad:1")).total == 35
    span = {"from_at": noon, "to_at": noon + HOUR}
    assert await views.corrections.reclassify("ad:1", **span, source="human", target="bot") > 0
    app = SimpleNamespace(engines=engines, jobs=jobs)
    assert await drain(app) == {"done": 1}
    assert (await views.hit("ad:1")).total == 6
    await flusher.run_once()
    [ad] = await views.totals(["ad:1"], fields=("classes",))
    assert ad.classes == {"human": 6, "bot": 31}
    assert (await views.analytics.verify()).differences == []
    await views.corrections.reclassify("ad:1", **span, source="human", target="bot")
    assert await drain(app) == {"done": 1}
    assert (await views.totals(["ad:1"]))[0].total == 6


async def test_a_total_read_before_a_move_is_not_cached_after_it(
    views, valkey_store, count, postgres
):
    noon = at("2026-03-01T12:00")
    await count([("ad:1", 0, noon, 30)])
    await views.hit("ad:2")
    await views._shards.set_up(1)
    [old] = await views_store.totals_to_fill(postgres, ["ad:1"], [1])
    wanted = {"from_at": noon, "to_at": noon + HOUR, "source": "human", "target": "bot"}
    await views.corrections.move(SimpleNamespace(id="ad:1", **wanted))
    state, _ = await valkey_store.fill(
        1, through=old.through, corrections=old.corrections, totals=[("ad:1", old.total)]
    )
    assert state == "retry"
    assert (await views.hit("ad:1")).total == 1


async def test_a_move_that_postgres_lost_is_taken_back(views, make_flusher, count, sql):
    """A failover to a standby without that commit.

    Totals were cached after it, and snapshots before it refused.
    """
    noon = at("2026-03-01T12:00")
    await count([("ad:1", 0, noon, 30)])
    assert (await views.hit("ad:1")).total == 31
    for table in ("shard", "total", "hour"):
        await sql(f"CREATE TABLE old_{table} AS TABLE headrace.views_{table}")
    span = {"from_at": noon, "to_at": noon + HOUR}
    await views.corrections.move(SimpleNamespace(id="ad:1", **span, source="human", target="bot"))
    assert (await views.hit("ad:1")).total == 2
    await sql("UPDATE headrace.views_shard SET corrections = 0")
    for table in ("total", "hour"):
        await sql(f"DELETE FROM headrace.views_{table}")
        await sql(f"INSERT INTO headrace.views_{table} TABLE old_{table}")
    await make_flusher().run_once()
    assert (await views.hit("ad:1")).total == 33


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "human", "target": "human"},
        {"from_at": at("2026-03-01T12:30")},
        {"to_at": at("2026-03-01T11:00")},
    ],
)
async def test_a_move_that_means_nothing_is_refused(views, wrong):
    noon = at("2026-03-01T12:00")
    usual = {"from_at": noon, "to_at": noon + HOUR, "source": "human", "target": "bot"}
    with pytest.raises(InvalidSpan):
        await views.corrections.reclassify("ad:1", **(usual | wrong))


async def test_verify_finds_what_contradicts_itself(views, count, sql):
    await count([("ad:1", 0, hour_at(500_000), 5), ("ad:2", 1, hour_at(500_000), 2)])
    found = await views.analytics.verify()
    assert (found.entities, found.views, found.differences) == (2, 7, [])
    await sql("UPDATE headrace.views_total SET total = 9 WHERE id = 'ad:2'")
    await sql("DELETE FROM headrace.views_hour WHERE id = 'ad:1'")
    found = await views.analytics.verify()
    assert [(d.id, d.traffic, d.total, d.hours) for d in found.differences] == [
        ("ad:1", "human", 5, 0),
        ("ad:2", "bot", 9, 2),
    ]
