"""What is made of the hour rows: series, top lists, the proof; and what removes or moves them."""

from __future__ import annotations

from datetime import datetime

from headrace.engines.postgres import Row, Runner
from headrace.views.model import (
    CLASSES,
    NUMBER,
    Deleted,
    Difference,
    Reclassify,
    SeriesPoint,
    TopEntry,
    Traffic,
)
from headrace.views.store.sql import SQL


async def hours(
    runner: Runner, entity: str, *, from_at: datetime, to_at: datetime
) -> list[SeriesPoint]:
    """Views by hour, oldest first."""
    return _points(await runner.all(SQL.hours, id=entity, from_at=from_at, to_at=to_at))


async def days(
    runner: Runner, entity: str, *, from_at: datetime, to_at: datetime, time_zone: str
) -> list[SeriesPoint]:
    """Views by day of a time zone, oldest first."""
    rows = await runner.all(SQL.days, id=entity, from_at=from_at, to_at=to_at, time_zone=time_zone)
    return _points(rows)


async def top(
    runner: Runner, *, window_s: float, traffic: Traffic, rows_max: int
) -> list[TopEntry]:
    """The most viewed entities since `window_s` ago, most first."""
    rows = await runner.all(
        SQL.top, window_s=window_s, **{"class": NUMBER[traffic]}, rows_max=rows_max
    )
    return [TopEntry(id=row["id"], views=row["views"]) for row in rows]


async def differences(runner: Runner, *, rows_max: int) -> list[Difference]:
    """Totals that are not the sum of their hours."""
    return [
        Difference(
            id=row["id"], traffic=CLASSES[row["class"]], total=row["total"], hours=row["hours"]
        )
        for row in await runner.all(SQL.differences, rows_max=rows_max)
    ]


async def counted(runner: Runner) -> tuple[int, int]:
    """How many entities there are, and all their views."""
    row = await runner.one(SQL.counted)
    assert row is not None
    return row["entities"], row["views"]


async def delete(runner: Runner, entity: str, shard: int, *, kept_s: float) -> Deleted:
    """Remove an entity and leave a tombstone for `kept_s`."""
    row = await runner.one(SQL.delete, id=entity, shard=shard, kept_s=kept_s)
    assert row is not None
    return Deleted(id=entity, total=row["total"], until_at=row["until_at"])


async def reclassify(runner: Runner, wanted: Reclassify, shard: int) -> tuple[int, int]:
    """Move views between classes; how many, and the shard's corrections after it. Again: none."""
    row = await runner.one(
        SQL.reclassify,
        id=wanted.id,
        shard=shard,
        from_at=wanted.from_at,
        to_at=wanted.to_at,
        source=NUMBER[wanted.source],
        target=NUMBER[wanted.target],
    )
    assert row is not None
    return row["views"], row["corrections"]


def _points(rows: list[Row]) -> list[SeriesPoint]:
    found: dict[datetime, dict[str, int]] = {}
    for row in rows:
        found.setdefault(row["start_at"], {})[CLASSES[row["class"]].value] = row["views"]
    return [SeriesPoint(start_at=start_at, **views) for start_at, views in found.items()]
