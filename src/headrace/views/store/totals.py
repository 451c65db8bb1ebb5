"""Totals of entities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime

from headrace.engines.postgres import Runner
from headrace.views.model import CLASSES
from headrace.views.store.sql import SQL


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A total with the offset of its shard, read together."""

    id: str
    shard: int
    through: str
    corrections: int
    total: int
    is_deleted: bool


async def totals_to_fill(
    runner: Runner, ids: Sequence[str], shards: Sequence[int]
) -> list[Snapshot]:
    """People's totals, in one snapshot with the offsets of the entities' `shards`."""
    rows = await runner.all(SQL.totals_to_fill, ids=ids, shards=shards)
    return [Snapshot(**dict(row)) for row in rows]


async def totals(runner: Runner, ids: Sequence[str]) -> dict[str, int]:
    """People's totals; without entities that have none."""
    return {row["id"]: row["total"] for row in await runner.all(SQL.totals, ids=ids)}


async def class_totals(runner: Runner, ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Totals by class; without entities that have none."""
    found: dict[str, dict[str, int]] = {}
    for row in await runner.all(SQL.class_totals, ids=ids):
        found.setdefault(row["id"], {})[CLASSES[row["class"]].value] = row["total"]
    return found


async def day_totals(runner: Runner, ids: Sequence[str], *, since_at: datetime) -> dict[str, int]:
    """People's views since a moment; without entities that have none."""
    rows = await runner.all(SQL.day_totals, ids=ids, since_at=since_at)
    return {row["id"]: row["views"] for row in rows}


async def day_uniques(runner: Runner, ids: Sequence[str], *, day: date) -> dict[str, int]:
    """Viewers of a day as last written down; without entities that have none."""
    rows = await runner.all(SQL.day_uniques, ids=ids, day=day)
    return {row["id"]: row["viewers"] for row in rows}


async def uniques_by_day(
    runner: Runner, entity: str, *, since: date, until: date
) -> dict[date, int]:
    """Viewers of an entity as last written down, of each day from `since` up to before `until`."""
    rows = await runner.all(SQL.uniques_by_day, id=entity, since=since, until=until)
    return {row["day"]: row["viewers"] for row in rows}
