"""Views in PostgreSQL: one function per named query. No function begins a transaction.

Changes that must be atomic (a flush, a deletion, a reclassification) are database functions, each
one statement. All of them lock the row of the shard, so they run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from headrace.engines.postgres import Row, Runner
from headrace.engines.sql import load_queries
from headrace.views.model import (
    CLASSES,
    MARKS_MAX,
    NUMBER,
    START,
    Correction,
    Count,
    Deleted,
    Difference,
    ExportRow,
    Mark,
    Reclassify,
    SeriesPoint,
    TopEntry,
    Traffic,
    class_name,
    hour_at,
)

NO_COUNTERS: Final[Mapping[str, int]] = MappingProxyType({})
SQL: Final[Any] = load_queries("headrace.views")


@dataclass(frozen=True, slots=True)
class Shard:
    """Offset and owner of a shard."""

    shard: int
    through: str
    setups: int
    """How often the stream was set up in Valkey."""
    corrections: int
    flusher: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A total and the offset of its shard, read in one snapshot."""

    id: str
    shard: int
    through: str
    corrections: int
    total: int
    is_deleted: bool


class Span(NamedTuple):
    """The time and step of a series."""

    unit: str
    """hour of UTC, day or month of the time zone."""
    from_at: datetime
    to_at: datetime
    time_zone: str


async def ids_like(runner: Runner, part: str, *, rows_max: int) -> list[str]:
    """Ids with a total that begin with `part`."""
    # The last character of Unicode sorts after every character of an id.
    rows = await runner.all(SQL.ids_like, part=part, last=part + "\U0010ffff", rows_max=rows_max)
    return [row["id"] for row in rows]


async def ensure_shards(runner: Runner, shards: int) -> int:
    """Create the shards if there are none. Return how many exist."""
    return int(await runner.value(SQL.ensure_shards, shards=shards))


async def all_shards(runner: Runner) -> list[Shard]:
    """Every shard, in order."""
    return [Shard(**dict(row)) for row in await runner.all(SQL.shards)]


async def find_shard(runner: Runner, shard: int) -> Shard:
    """One shard; a missing row means that it was never flushed."""
    return _shard(shard, await runner.one(SQL.shard, shard=shard))


async def begin_set_up(runner: Runner, shard: int) -> Shard:
    """The shard, to be set up in Valkey. Flushes of entries that were read before do nothing."""
    return _shard(shard, await runner.one(SQL.begin_set_up, shard=shard))


def _shard(shard: int, row: Row | None) -> Shard:
    return Shard(**dict(row)) if row else Shard(shard, START, setups=0, corrections=0)


async def lease_shards(runner: Runner, name: str, *, lease_s: float) -> list[Shard]:
    """Renew flusher `name` for `lease_s`. Return the shards that it owns."""
    rows = await runner.all(SQL.lease_shards, name=name, lease_s=lease_s)
    return [Shard(**dict(row)) for row in rows]


async def leave_shards(runner: Runner, name: str) -> None:
    """Release the shards of flusher `name`."""
    await runner.run(SQL.leave_shards, name=name)


async def flush(
    runner: Runner,
    shard: int,
    *,
    setups: int,
    from_id: str,
    to_id: str,
    counts: Sequence[Count],
    numbers: Mapping[str, int] = NO_COUNTERS,
) -> list[str] | None:
    """Count, and move the offset from `from_id` to `to_id`, in one transaction.

    `numbers` are those of all counters in `counts`.

    Return the deleted entities, whose views were dropped. None: another flusher moved the offset
    first, or the stream was set up since `setups` was read. Nothing was done.
    """
    columns = zip(*counts, strict=True) if counts else ((), (), (), (), ())
    ids, classes, hours, views, counters = columns
    moments = {hour: hour_at(hour) for hour in set(hours)}
    dead: list[str] | None = await runner.value(
        SQL.flush,
        shard=shard,
        setups=setups,
        from_id=from_id,
        to_id=to_id,
        ids=ids,
        classes=[
            traffic + len(CLASSES) * numbers[counter] if counter else traffic
            for traffic, counter in zip(classes, counters, strict=True)
        ],
        hours=[moments[hour] for hour in hours],
        views=views,
    )
    return dead


async def write_uniques(runner: Runner, rows: Sequence[tuple[str, date, int, bytes]]) -> None:
    """Store viewer counts: entity, day, viewers, sketch."""
    await runner.run(
        SQL.write_uniques,
        ids=[row[0] for row in rows],
        days=[row[1] for row in rows],
        viewers=[row[2] for row in rows],
        sketches=[row[3] for row in rows],
    )


async def drop_tombstones(runner: Runner) -> int:
    """Delete expired tombstones. Return their number."""
    return await runner.run(SQL.drop_tombstones)


async def drop_uniques(runner: Runner, *, before: date, rows_max: int) -> int:
    """Delete up to `rows_max` viewer counts of days before `before`. Return their number."""
    return await runner.run(SQL.drop_uniques, before=before, rows_max=rows_max)


async def totals_to_fill(
    runner: Runner, ids: Sequence[str], shards: Sequence[int]
) -> list[Snapshot]:
    """Human totals and the offsets of the entities' `shards`, in one snapshot."""
    rows = await runner.all(SQL.totals_to_fill, ids=ids, shards=shards)
    return [Snapshot(**dict(row)) for row in rows]


async def totals(runner: Runner, ids: Sequence[str]) -> dict[str, int]:
    """Human totals of the entities that have any."""
    return {row["id"]: row["total"] for row in await runner.all(SQL.totals, ids=ids)}


async def counter_numbers(runner: Runner, names: Sequence[str]) -> dict[str, int]:
    """Numbers of counters, assigned to new names; a name is missing if there are 1,000 others."""
    return {
        row["name"]: row["number"] for row in await runner.all(SQL.counter_numbers, names=names)
    }


async def counter_totals(runner: Runner, ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Totals of counters of humans, of the entities that have any."""
    found: dict[str, dict[str, int]] = {}
    for row in await runner.all(SQL.counter_totals, ids=ids):
        found.setdefault(row["id"], {})[row["name"]] = row["total"]
    return found


async def class_totals(runner: Runner, ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Totals by class of the entities that have any."""
    found: dict[str, dict[str, int]] = {}
    for row in await runner.all(SQL.class_totals, ids=ids):
        found.setdefault(row["id"], {})[CLASSES[row["class"]].value] = row["total"]
    return found


async def day_totals(runner: Runner, ids: Sequence[str], *, since_at: datetime) -> dict[str, int]:
    """Human views since a moment, of the entities that have any."""
    rows = await runner.all(SQL.day_totals, ids=ids, since_at=since_at)
    return {row["id"]: row["views"] for row in rows}


async def day_uniques(runner: Runner, ids: Sequence[str], *, day: date) -> dict[str, int]:
    """Stored viewers of a day, of the entities that have any."""
    rows = await runner.all(SQL.day_uniques, ids=ids, day=day)
    return {row["id"]: row["viewers"] for row in rows}


async def sketches(
    runner: Runner, ids: Sequence[str], *, since: date, until: date
) -> list[tuple[date, bytes]]:
    """Stored sketches of entities by day, from `since` to before `until`."""
    rows = await runner.all(SQL.sketches, ids=ids, since=since, until=until)
    return [(row["day"], row["sketch"]) for row in rows]


async def series(runner: Runner, entity: str, span: Span) -> list[SeriesPoint]:
    """Views in a span, oldest first."""
    return _points(await runner.all(SQL.series, ids=[entity], **span._asdict()))


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """What one flush, move or deletion changed in a shard."""

    shard: int
    number: int
    at: datetime
    is_known: bool
    """Whether it is the change at the reader's position, without its rows."""
    rows: list[ExportRow]


async def changes(runner: Runner, numbers: Sequence[int], *, rows_max: int) -> list[ChangeBatch]:
    """The change at each shard's number, and later ones, oldest first per shard."""
    shards = list(range(len(numbers)))
    rows = await runner.all(SQL.changes, shards=shards, numbers=numbers, rows_max=rows_max)
    names = {row["number"]: row["name"] for row in await runner.all(SQL.counters)}
    return [_batch(row, names) for row in rows]


async def newest_changes(runner: Runner) -> list[ChangeBatch]:
    """The newest change of each shard, by shard, without its rows; empty: changes are off."""
    return [_batch(row, {}) for row in await runner.all(SQL.newest_changes)]


async def keep_changes(runner: Runner, *, kept_s: float, rows_max: int) -> int:
    """Turn changes on, or off for 0, and drop some that are too old. Return how many."""
    return int(await runner.value(SQL.keep_changes, kept_s=kept_s, rows_max=rows_max))


async def export(
    runner: Runner, span: Span, *, after: str, ids_max: int
) -> tuple[list[ExportRow], list[str]]:
    """Views of the next `ids_max` entities after `after`, and the ids of these entities."""
    ids = [row["id"] for row in await runner.all(SQL.next_ids, after=after, ids_max=ids_max)]
    rows = await runner.all(SQL.series, ids=ids, **span._asdict())
    return [
        ExportRow(id=entity, start_at=start_at, traffic=class_name(number, name), views=views)
        for entity, start_at, number, views, name in rows
    ], ids


def _batch(row: Row, names: Mapping[int, str]) -> ChangeBatch:
    columns = (row["ids"], row["classes"], row["hours"], row["views"])
    rows = [
        ExportRow(id=entity, start_at=start_at, traffic=_name(number, names), views=views)
        for entity, number, start_at, views in (
            () if row["is_known"] else zip(*columns, strict=True)
        )
    ]
    return ChangeBatch(row["shard"], row["number"], row["at"], row["is_known"], rows)


def _name(number: int, names: Mapping[int, str]) -> str:
    return class_name(number, names[number // len(CLASSES)] if number >= len(CLASSES) else None)


async def mark(runner: Runner, entity: str, marked: Mark) -> None:
    """Store a mark, or change its end."""
    await runner.run(SQL.mark, id=entity, **msgspec.structs.asdict(marked))


async def unmark(runner: Runner, entity: str, name: str, *, from_at: datetime | None) -> int:
    """Delete the marks of a name, or the one that begins at `from_at`. Return how many."""
    return await runner.run(SQL.unmark, id=entity, name=name, from_at=from_at)


async def marks(runner: Runner, entity: str, *, from_at: datetime, to_at: datetime) -> list[Mark]:
    """Marks that overlap a span, oldest first; the newest of too many."""
    rows = await runner.all(SQL.marks, id=entity, from_at=from_at, to_at=to_at, rows_max=MARKS_MAX)
    return [Mark(**dict(row)) for row in rows]


async def hours_from(runner: Runner) -> datetime | None:
    """The first hour that is not replaced by its day; None: every hour is kept."""
    found: datetime | None = await runner.value(SQL.hours_from)
    return found


async def ensure_months(runner: Runner) -> None:
    """Create the partitions of hours from last month to the month after next."""
    await runner.run(SQL.ensure_months)


async def roll_up(runner: Runner, *, before: datetime, time_zone: str, ids_max: int) -> bool:
    """Take one step to replace hours before a moment by days. Return whether there may be more."""
    return bool(
        await runner.value(SQL.roll_up, before=before, time_zone=time_zone, ids_max=ids_max)
    )


async def top(
    runner: Runner, *, window_s: float, traffic: Traffic, rows_max: int
) -> list[TopEntry]:
    """The most viewed entities of the last `window_s`, most first."""
    rows = await runner.all(
        SQL.top, window_s=window_s, **{"class": NUMBER[traffic]}, rows_max=rows_max
    )
    return [TopEntry(id=row["id"], views=row["views"]) for row in rows]


async def differences(runner: Runner, *, rows_max: int) -> list[Difference]:
    """Totals that differ from the sum of their hours."""
    return [
        Difference(
            id=row["id"], traffic=CLASSES[row["class"] % 4], total=row["total"], hours=row["hours"]
        )
        for row in await runner.all(SQL.differences, rows_max=rows_max)
    ]


async def counted(runner: Runner) -> tuple[int, int]:
    """Number of entities, and the sum of all their views."""
    row = await runner.one(SQL.counted)
    assert row is not None
    return row["entities"], row["views"]


async def delete(
    runner: Runner, entity: str, shard: int, *, shards: int, kept_s: float
) -> tuple[Deleted, int]:
    """Delete an entity and leave a tombstone for `kept_s`. Return the correction's number too."""
    row = await runner.one(SQL.delete, id=entity, shard=shard, shards=shards, kept_s=kept_s)
    assert row is not None
    deleted = Deleted(id=entity, total=row["total"], until_at=row["until_at"])
    return deleted, row["corrections"]


async def reclassify(
    runner: Runner, request: Reclassify, shard: int, *, shards: int
) -> tuple[int, int]:
    """Move views between classes. Return how many moved, and the correction's number."""
    row = await runner.one(
        SQL.reclassify,
        id=request.id,
        shard=shard,
        shards=shards,
        from_at=request.from_at,
        to_at=request.to_at,
        source=NUMBER[request.source],
        target=NUMBER[request.target],
    )
    assert row is not None
    return row["views"], row["corrections"]


async def corrections(runner: Runner, shard: int, *, since: int, rows_max: int) -> list[Correction]:
    """Deletions and moves of a shard from a number on, in order."""
    rows = await runner.all(SQL.corrections, shard=shard, since=since, rows_max=rows_max)
    return [Correction(**dict(row)) for row in rows]


async def drop_corrections(runner: Runner, *, kept_s: float, rows_max: int) -> int:
    """Delete some numbers of old deletions and moves. Return how many."""
    return await runner.run(SQL.drop_corrections, kept_s=kept_s, rows_max=rows_max)


def _points(rows: list[Row]) -> list[SeriesPoint]:
    found: dict[datetime, dict[str, Any]] = {}
    for row in rows:
        point = found.setdefault(row["start_at"], {})
        if row["name"] is None:
            point[CLASSES[row["class"]].value] = row["views"]
        elif row["class"] % len(CLASSES) == 0:
            point.setdefault("counters", {})[row["name"]] = row["views"]
    return [SeriesPoint(start_at=start_at, **views) for start_at, views in found.items()]
