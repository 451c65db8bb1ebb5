"""Viewers over days and items together: the estimates of Valkey itself, within the stated error."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from headrace.views import Hit
from headrace.views.errors import InvalidHit, InvalidSpan
from headrace.views.sketches import SketchInvalid, estimate, merged


async def test_merges_and_estimates_are_those_of_valkey(engines):
    """Sparse and dense sketches, up to the point where every register is filled."""
    valkey, prefix = engines.valkey, f"{engines.valkey.prefix}:hll"
    keys = []
    for number, size in enumerate((1, 5, 200, 2_500, 40_000)):
        key = f"{prefix}{number}"
        names = [f"u{n}" for n in range(number * 50, number * 50 + size)]
        for start in range(0, size, 5_000):
            await valkey.command("PFADD", key, *names[start : start + 5_000])
        keys.append(key)
    sketches = [await valkey.command("GET", key) for key in keys]
    for sketch, key in zip(sketches, keys, strict=True):
        assert estimate(merged([sketch])) == await valkey.command("PFCOUNT", key)
    for count in range(2, len(keys) + 1):
        found = estimate(merged(sketches[:count]))
        assert found == await valkey.command("PFCOUNT", *keys[:count])
    assert abs(found - 40_200) < 0.02 * 40_200
    assert estimate(merged([])) == 0
    dense = sketches[-1]
    for broken in (b"", b"HYLL", dense[:-1], sketches[0] + b"\xff", b"x" + dense[1:], dense[:4]):
        with pytest.raises(SketchInvalid):
            merged([broken])


async def test_a_viewer_of_many_days_and_items_counts_once(views, flusher, sql):
    await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(100)])
    await views.hits([Hit(id="ad:2", viewer=f"u{n}") for n in range(50, 150)])
    await flusher.run_once()
    await flusher.write_uniques()
    today = datetime.now(UTC).date()
    monday = today - timedelta(days=today.weekday())
    for days in (7, 8, 40):
        await sql(
            "INSERT INTO headrace.views_unique SELECT id,"
            f" date '{monday - timedelta(days=days)}', viewers, sketch FROM headrace.views_unique"
            f" WHERE day = '{today}'"
        )
    await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(150, 200)])
    span = {"from_day": monday - timedelta(days=60), "to_day": today + timedelta(days=1)}

    async def by(period, ids=("ad:1",)):
        rows = await views.analytics.viewers(ids, period, **span)
        return {row.day: row.viewers for row in rows}

    near = pytest.approx(100, rel=0.03)
    assert list((await by("day")).values()) == [near, near, near, pytest.approx(150, rel=0.03)]
    weeks = await by("week", ["ad:1", "ad:2"])
    assert list(weeks) == [monday - timedelta(days=days) for days in (42, 14, 7, 0)]
    assert list(weeks.values())[:3] == [pytest.approx(150, rel=0.03)] * 3
    assert weeks[monday] == pytest.approx(200, rel=0.03), "hits not stored yet are included"
    assert list((await by("all", ["ad:2", "ad:1", "ad:1"])).values()) == [
        pytest.approx(200, rel=0.03)
    ]
    assert sum((await by("month")).values()) < 400
    assert await by("day", ["ad:9"]) == {}


async def test_invalid_reads_of_viewers_are_refused(views):
    today = datetime.now(UTC).date()
    for ids, by, span in (
        (["ad:1"], "year", {}),
        (["ad:1"], "week", {"from_day": "2026-01-01"}),
        ([f"ad:{n}" for n in range(200)], "day", {}),
        (["ad:1"], "day", {"from_day": today - timedelta(days=4_000)}),
    ):
        with pytest.raises(InvalidSpan):
            await views.analytics.viewers(ids, by, **span)
    for wrong in (["ad 1"], 5, "ad 1", b"ad:1"):
        with pytest.raises(InvalidHit):
            await views.analytics.viewers(wrong)


async def test_a_stored_sketch_survives_an_emptied_valkey(views, flusher, engines):
    await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(100)])
    await flusher.run_once()
    await flusher.write_uniques()
    keys = await engines.valkey.command("KEYS", f"{engines.valkey.prefix}:*")
    await engines.valkey.command("DEL", *keys)
    await views.hits([Hit(id="ad:1", viewer=f"u{n}") for n in range(90, 120)])
    await flusher.write_uniques()
    [row] = await views.analytics.viewers(["ad:1"])
    assert row.viewers == pytest.approx(120, rel=0.03), "the stored and the new viewers together"
