"""Months of hours: created ahead, replaced by days, dropped; nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from headrace.engines.sql import compile_query
from headrace.kernel.config import InvalidConfig, load_config
from headrace.views import SeriesPoint, ViewsConfig
from headrace.views import store as views_store
from headrace.views.errors import InvalidSpan
from headrace.views.model import Count, shard_of

OLD = datetime(2024, 5, 31, 22, tzinfo=UTC)
"""In Amsterdam the first hour of 2024-06-01."""
SPAN = {"from_at": OLD - timedelta(days=40), "to_at": OLD + timedelta(days=40)}


@pytest.fixture
def count(postgres):
    """`await count(("ad:1", 0, moment, 5), ...)`: flush views as if hit at a moment."""

    async def flush(*rows):
        await views_store.ensure_shards(postgres, 4)
        for entity, traffic, moment, views in rows:
            state = await views_store.find_shard(postgres, shard_of(entity, 4))
            to_id = f"{max(10**12, int(state.through.partition('-')[0])) + 1}-0"
            counts = [Count(entity, traffic, int(moment.timestamp()) // 3600, views)]
            await views_store.flush(
                postgres,
                state.shard,
                setups=state.setups,
                from_id=state.through,
                to_id=to_id,
                counts=counts,
            )

    return flush


async def partitions(sql):
    rows = await sql(
        "SELECT c.relname AS name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'headrace.views_hour'::regclass ORDER BY 1"
    )
    return [row["name"] for row in rows]


async def roll_up_all(flusher):
    """Run steps to the end; their number."""
    steps = 1
    while await flusher.roll_up():
        steps += 1
    return steps


async def test_old_hours_become_days_and_recent_hours_stay(
    make_views, make_flusher, count, sql, monkeypatch
):
    monkeypatch.setattr("headrace.views.worker.ROLL_UP_IDS", 2)
    views, flusher = (
        make_views(time_zone="Europe/Amsterdam"),
        make_flusher(time_zone="Europe/Amsterdam"),
    )
    now_at = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    names = [f"ad:{number}" for number in range(5)]
    for name in names:
        await count(
            (name, 0, OLD - timedelta(hours=1), 1),
            (name, 0, OLD, 10),
            (name, 1, OLD, 7),
            (name, 0, OLD + timedelta(hours=5), 100),
            (name, 0, now_at, 3),
        )
    by_day = [await views.analytics.series(name, "day", **SPAN) for name in names]
    assert by_day[0] == [
        SeriesPoint(start_at=OLD - timedelta(days=1), human=1),
        SeriesPoint(start_at=OLD, human=110, bot=7),
    ]
    assert await roll_up_all(flusher) == 2 * (1 + 3 + 1) + 1, "close, copy 2 + 2 + 1, drop; end"
    assert not {"views_hour_2024_05", "views_hour_2024_06"} & set(await partitions(sql))
    assert [await views.analytics.series(name, "day", **SPAN) for name in names] == by_day
    assert await views.analytics.series("ad:1", "month", **SPAN) == [
        SeriesPoint(start_at=OLD - timedelta(days=31), human=1),
        SeriesPoint(start_at=OLD, human=110, bot=7),
    ]
    assert await views.analytics.series("ad:1", "hour", from_at=OLD, to_at=SPAN["to_at"]) == []
    assert [point.human for point in await views.analytics.series("ad:1", "hour")] == [3]
    found = await views.analytics.verify()
    assert (found.views, found.differences) == (5 * 121, [])
    late = OLD + timedelta(hours=1)
    await count(("ad:1", 0, late, 1_000))
    assert (await views.analytics.series("ad:1", "day", **SPAN))[1].human == 1_110
    assert (await views.analytics.verify()).differences == []
    with pytest.raises(InvalidSpan, match="cannot be moved"):
        await views.corrections.reclassify("ad:1", **SPAN, source="human", target="bot")
    await views.delete("ad:1")
    assert await views.analytics.series("ad:1", "day", **SPAN) == []
    assert (await views.analytics.verify()).differences == []


async def test_an_older_month_that_returns_amid_the_steps_repeats_no_copy(
    views, make_flusher, count, sql, monkeypatch
):
    """As after a step of PostgreSQL's clock."""
    monkeypatch.setattr("headrace.views.worker.ROLL_UP_IDS", 1)
    await count(("ad:1", 0, OLD, 10), ("ad:2", 0, OLD, 20))
    flusher = make_flusher()
    assert [await flusher.roll_up() for _ in range(2)] == [True, True], "close, copy ad:1"
    await sql("SELECT headrace.ensure_view_months_v1(ARRAY['2024-03-05'::timestamptz])")
    await roll_up_all(flusher)
    found = await views.analytics.verify()
    assert (found.views, found.differences) == (30, [])


async def test_reads_deletions_and_flushes_amid_the_steps_are_exact(
    views, make_flusher, count, monkeypatch
):
    """Two flushers take steps at once, and an entity is deleted on either side of the cursor."""
    monkeypatch.setattr("headrace.views.worker.ROLL_UP_IDS", 1)
    names = [f"ad:{number}" for number in range(6)]
    for name in names:
        await count((name, 0, OLD, 10), (name, 0, OLD + timedelta(days=3), 1))
    flushers, steps = [make_flusher("one"), make_flusher("two")], 0
    while any(await asyncio.gather(*[flusher.roll_up() for flusher in flushers])):
        steps += 1
        if steps == 3:
            await asyncio.gather(
                *[views.delete(name) for name in ("ad:0", "ad:5")], flushers[0].roll_up()
            )
            names = names[1:-1]
        await count(("ad:3", 0, OLD, 1))
        for name in names:
            points = await views.analytics.series(name, "day", **SPAN)
            assert [point.human for point in points] == [10 + steps * (name == "ad:3"), 1]
        assert (await views.analytics.verify()).differences == []
    assert steps > 5


async def test_a_month_in_use_is_dropped_later(views, flusher, count, postgres, sql):
    """The drop waits 200 ms for its lock and is repeated; reads and flushes continue."""
    await count(("ad:1", 0, OLD, 10))
    assert [await flusher.roll_up() for _ in range(2)] == [True, True]
    reading = compile_query("test", "-- A long read.\nSELECT count(*) FROM headrace.views_hour")
    async with postgres.transaction() as tx:
        await tx.all(reading)
        assert await flusher.roll_up()
        assert "views_hour_2024_05" in await partitions(sql)
        await count(("ad:1", 0, datetime.now(UTC), 1))
        assert [p.human for p in await views.analytics.series("ad:1", "day", **SPAN)] == [10]
    await roll_up_all(flusher)
    assert "views_hour_2024_05" not in await partitions(sql)
    assert (await views.analytics.verify()).differences == []


async def test_months_are_created_ahead_and_by_a_flush_that_needs_one(flusher, count, sql):
    assert not await flusher.roll_up()
    ahead = await partitions(sql)
    assert len(ahead) == 4
    assert datetime.now(UTC).strftime("views_hour_%Y_%m") == ahead[1]
    await count(("ad:1", 0, datetime(2031, 12, 31, 23, tzinfo=UTC), 1))
    assert (await partitions(sql))[-1] == "views_hour_2031_12"


def test_hours_are_kept_longer_than_any_top_list():
    for text in ("31d", "soon", "-400d"):
        with pytest.raises(InvalidConfig):
            load_config({"views": ViewsConfig}, env={"HEADRACE_VIEWS_HOURS_KEPT": text})
