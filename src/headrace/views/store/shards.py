"""Shards: their offsets, who flushes them, and the flush itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from headrace.engines.postgres import Runner
from headrace.views.model import START, Count, hour_at
from headrace.views.store.sql import SQL


@dataclass(frozen=True, slots=True)
class Shard:
    """Up to where a shard is counted."""

    shard: int
    through: str
    corrections: int
    flusher: str | None = None


async def ensure_shards(runner: Runner, shards: int) -> int:
    """Set so many up where there are none; how many there are."""
    return int(await runner.value(SQL.ensure_shards, shards=shards))


async def all_shards(runner: Runner) -> list[Shard]:
    """Every shard, in order."""
    return [Shard(**dict(row)) for row in await runner.all(SQL.shards)]


async def find_shard(runner: Runner, shard: int) -> Shard:
    """One shard; one that was not set up (or whose setting up PostgreSQL lost) was never flushed."""
    row = await runner.one(SQL.shard, shard=shard)
    return Shard(shard, row["through"], row["corrections"]) if row else Shard(shard, START, 0)


async def lease_shards(runner: Runner, name: str, *, lease_s: float) -> list[Shard]:
    """Say that flusher `name` is alive; the shards that are its own until then."""
    rows = await runner.all(SQL.lease_shards, name=name, lease_s=lease_s)
    return [Shard(**dict(row)) for row in rows]


async def leave_shards(runner: Runner, name: str) -> None:
    """Let others have the shards of flusher `name`."""
    await runner.run(SQL.leave_shards, name=name)


async def flush(
    runner: Runner, shard: int, *, from_id: str, to_id: str, counts: Sequence[Count]
) -> list[str] | None:
    """Count, and move the offset from `from_id` to `to_id`, in one transaction.

    None where another one moved it first: nothing was done. Else the entities that are deleted, whose views were
    dropped.
    """
    ids, classes, hours, views = zip(*counts, strict=True) if counts else ((), (), (), ())
    moments = {hour: hour_at(hour) for hour in set(hours)}
    dead: list[str] | None = await runner.value(
        SQL.flush,
        shard=shard,
        from_id=from_id,
        to_id=to_id,
        ids=ids,
        classes=classes,
        hours=[moments[hour] for hour in hours],
        views=views,
    )
    return dead


async def write_uniques(runner: Runner, rows: Sequence[tuple[str, date, int]]) -> None:
    """Keep numbers of viewers: entity, day, viewers."""
    await runner.run(
        SQL.write_uniques,
        ids=[row[0] for row in rows],
        days=[row[1] for row in rows],
        viewers=[row[2] for row in rows],
    )


async def drop_tombstones(runner: Runner) -> int:
    """Forget tombstones that are over; how many."""
    return await runner.run(SQL.drop_tombstones)


async def drop_uniques(runner: Runner, *, before: date, rows_max: int) -> int:
    """Remove up to `rows_max` numbers of viewers of days before `before`; how many."""
    return await runner.run(SQL.drop_uniques, before=before, rows_max=rows_max)
