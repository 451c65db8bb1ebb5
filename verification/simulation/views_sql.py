"""A model of the SQL of views: what each statement of `headrace.views` reads and changes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from typing import Any

from headrace.views.model import START
from headrace.views.store import SQL
from verification.simulation.postgres import PostgresModel, Row


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A row of views_shard."""

    through: str = START
    corrections: int = 0
    setups: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A row of views_lease."""

    flusher: str | None = None
    renewed_at: datetime | None = None
    expires_at: datetime | None = None

    def is_free(self, now: datetime) -> bool:
        """Whether no flusher owns the shard."""
        if self.renewed_at is None or self.expires_at is None:
            return True
        return not self.renewed_at <= now <= self.expires_at


@dataclass(frozen=True, slots=True)
class TombstoneRow:
    """A row of views_tombstone."""

    until_at: datetime
    dropped: int = 0


class ViewsTables:
    """The tables, and the statements registered on a model."""

    def __init__(self, model: PostgresModel) -> None:
        self._model = model
        self.shards, self.leases = model.table(), model.table()
        self.flushers, self.totals = model.table(), model.table()
        self.hours, self.tombstones = model.table(), model.table()
        self.uniques, self.corrections = model.table(), model.table()
        for query, statement in (
            (SQL.ensure_shards, self._ensure_shards),
            (SQL.shards, self._all_shards),
            (SQL.shard, self._shard),
            (SQL.begin_set_up, self._begin_set_up),
            (SQL.lease_shards, self._lease),
            (SQL.leave_shards, self._leave),
            (SQL.flush, self._flush),
            (SQL.write_uniques, self._write_uniques),
            (SQL.drop_tombstones, self._drop_tombstones),
            (SQL.drop_uniques, self._drop_uniques),
            (SQL.totals_to_fill, self._totals_to_fill),
            (SQL.totals, self._totals),
            (SQL.delete, self._delete),
            (SQL.reclassify, self._reclassify),
            (SQL.corrections, self._corrections_from),
            (SQL.drop_corrections, self._drop_corrections),
            (SQL.differences, self._differences),
            (SQL.ensure_months, self._nothing),
            (SQL.roll_up, self._no_step),
            (SQL.keep_changes, self._no_changes),
        ):
            model.on(query)(statement)

    def through_of(self, shard: int) -> str:
        """The committed offset of a shard."""
        row = self.shards.get(shard)
        return START if row is None else row.through

    # Shards and leases

    def _ensure_shards(self, shards: int) -> list[Row]:
        if not len(self.shards):
            self._model.lock_advisory("views_shard")
            for shard in range(shards):
                self.shards.put(shard, ShardRow())
                self.leases.put(shard, LeaseRow())
        return [{"count": len(self.shards)}]

    def _all_shards(self) -> list[Row]:
        now = self._model.now()
        found = []
        for shard, row in sorted(self.shards.items()):
            lease = self.leases.get(shard)
            flusher = None if lease.is_free(now) else lease.flusher
            found.append(_shard_fields(shard, row) | {"flusher": flusher})
        return found

    def _shard(self, shard: int) -> list[Row]:
        row = self.shards.get(shard)
        return [] if row is None else [_shard_fields(shard, row)]

    def _begin_set_up(self, shard: int) -> list[Row]:
        self.shards.lock(shard)
        row = self.shards.get(shard)
        if row is not None:
            self.shards.put(shard, replace(row, setups=row.setups + 1))
        return self._shard(shard)

    def _lease(self, name: str, lease_s: float) -> list[Row]:
        self._model.lock_advisory("views_flusher")
        now = self._model.now()
        until_at = now + timedelta(seconds=lease_s)
        self.flushers.put(name, LeaseRow(name, now, until_at))
        for other, row in list(self.flushers.items()):
            if row.is_free(now):
                self.flushers.pop(other)
        share = math.ceil(len(self.shards) / len(self.flushers))
        leases = sorted(self.leases.items())
        own = [shard for shard, row in leases if row.flusher == name]
        for shard in own[share:]:
            self.leases.put(shard, LeaseRow())
        free = [
            shard
            for shard, row in sorted(self.leases.items())
            if row.flusher != name and row.is_free(now)
        ]
        taken = (own[:share] + free)[:share]
        for shard in taken:
            self.leases.put(shard, LeaseRow(name, now, until_at))
        rows = [
            _shard_fields(shard, self.shards.get(shard))
            for shard, row in sorted(self.leases.items())
            if row.flusher == name
        ]
        return rows or []

    def _leave(self, name: str) -> int:
        for shard, row in list(self.leases.items()):
            if row.flusher == name:
                self.leases.put(shard, LeaseRow())
        self.flushers.pop(name)
        return 1

    # Counting

    def _flush(  # noqa: PLR0917 - of the query
        self,
        shard: int,
        setups: int,
        from_id: str,
        to_id: str,
        ids: Sequence[str],
        classes: Sequence[int],
        hours: Sequence[datetime],
        views: Sequence[int],
    ) -> list[Row]:
        # An update waits for the row and then reads it as committed.
        self.shards.lock(shard)
        row = self.shards.get(shard)
        if row is None or (row.through, row.setups) != (from_id, setups):
            return [{"dead": None}]
        self.shards.put(shard, replace(row, through=to_id))
        now, dead = self._model.now(), []
        dropped: Counter[str] = Counter()
        for entity, count in zip(ids, views, strict=True):
            dropped[entity] += count
        for entity in sorted(dropped):
            stone = self.tombstones.get(entity)
            if stone is not None and stone.until_at > now:
                count = stone.dropped + dropped[entity]
                self.tombstones.put(entity, replace(stone, dropped=count))
                dead.append(entity)
        for entity, kind, hour, count in zip(ids, classes, hours, views, strict=True):
            if entity not in dead:
                self._add(entity, kind, hour, count)
        return [{"dead": dead}]

    def _add(self, entity: str, kind: int, hour: datetime, count: int) -> None:
        self.totals.put((entity, kind), (self.totals.get((entity, kind)) or 0) + count)
        key = (entity, hour, kind)
        self.hours.put(key, (self.hours.get(key) or 0) + count)

    def _totals_to_fill(self, ids: Sequence[str], shards: Sequence[int]) -> list[Row]:
        now, found = self._model.now(), []
        for entity, shard in zip(ids, shards, strict=True):
            row, stone = self.shards.get(shard), self.tombstones.get(entity)
            if row is not None:
                found.append(
                    {
                        "shard": shard,
                        "through": row.through,
                        "corrections": row.corrections,
                        "id": entity,
                        "total": self.totals.get((entity, 0)) or 0,
                        "is_deleted": stone is not None and stone.until_at > now,
                    }
                )
        return found

    def _totals(self, ids: Sequence[str]) -> list[Row]:
        found = ((entity, self.totals.get((entity, 0))) for entity in dict.fromkeys(ids))
        return [{"id": entity, "total": total} for entity, total in found if total is not None]

    def _differences(self, rows_max: int) -> list[Row]:
        hours: dict[tuple[str, int], int] = defaultdict(int)
        for (entity, _, kind), count in self.hours.items():
            hours[entity, kind] += count
        totals = dict(self.totals.items())
        rows = [
            {"id": key[0], "class": key[1], "total": totals.get(key, 0), "hours": hours.get(key, 0)}
            for key in sorted(hours.keys() | totals.keys())
        ]
        return [row for row in rows if row["total"] != row["hours"]][:rows_max]

    # Corrections

    def _note_correction(self, entity: str, shard: int, shards: int) -> int:
        self._ensure_shards(shards)
        self.shards.lock(shard)
        row: Any = self.shards.get(shard)
        number: int = max(row.corrections, (self._model.timeline - 1) << 40) + 1
        self.shards.put(shard, replace(row, corrections=number))
        self.corrections.put((shard, number), (entity, self._model.now()))
        return number

    def _corrections_from(self, shard: int, since: int, rows_max: int) -> list[Row]:
        now, rows = self._model.now(), []
        for (own, number), (entity, _) in sorted(self.corrections.items()):
            if own == shard and number >= since:
                stone = self.tombstones.get(entity)
                is_deleted = stone is not None and stone.until_at > now
                rows.append({"number": number, "id": entity, "is_deleted": is_deleted})
        return rows[:rows_max]

    def _drop_corrections(self, kept_s: float, rows_max: int) -> int:
        before = self._model.now() - timedelta(seconds=kept_s)
        last = {(shard, row.corrections) for shard, row in self.shards.items()}
        rows = sorted(self.corrections.items())
        old = [key for key, (_, at) in rows if at < before and key not in last][:rows_max]
        for key in old:
            self.corrections.pop(key)
        return len(old)

    def _delete(
        self,
        id: str,  # noqa: A002 - of the query
        shard: int,
        shards: int,
        kept_s: float,
    ) -> list[Row]:
        corrections = self._note_correction(id, shard, shards)
        until_at = self._model.now() + timedelta(seconds=kept_s)
        stone = self.tombstones.get(id) or TombstoneRow(until_at)
        self.tombstones.put(id, replace(stone, until_at=until_at))
        total = self.totals.get((id, 0)) or 0
        for table in (self.totals, self.hours, self.uniques):
            for key in [key for key, _ in table.items() if key[0] == id]:
                table.pop(key)
        return [{"total": total, "until_at": until_at, "corrections": corrections}]

    def _reclassify(  # noqa: PLR0917 - of the query
        self,
        id: str,  # noqa: A002 - of the query
        shard: int,
        shards: int,
        from_at: datetime,
        to_at: datetime,
        source: int,
        target: int,
    ) -> list[Row]:
        corrections = self._note_correction(id, shard, shards)
        moved = 0
        for (entity, hour, kind), count in list(self.hours.items()):
            if entity == id and kind % 4 == source and from_at <= hour < to_at:
                self.hours.pop((entity, hour, kind))
                self.totals.put((id, kind), (self.totals.get((id, kind)) or 0) - count)
                self._add(id, kind + target - source, hour, count)
                moved += count if kind < 4 else 0
        return [{"views": moved, "corrections": corrections}]

    # Viewers, history

    def _write_uniques(
        self,
        ids: Sequence[str],
        days: Sequence[date],
        viewers: Sequence[int],
        sketches: Sequence[bytes],
    ) -> int:
        now = self._model.now()
        for entity, day, count, _ in zip(ids, days, viewers, sketches, strict=True):
            stone = self.tombstones.get(entity)
            if stone is None or stone.until_at <= now:
                key = (entity, day)
                self.uniques.put(key, max(count, self.uniques.get(key) or 0))
        return len(ids)

    def _drop_tombstones(self) -> int:
        now = self._model.now()
        old = [key for key, stone in self.tombstones.items() if stone.until_at < now]
        for key in old:
            self.tombstones.pop(key)
        return len(old)

    def _drop_uniques(self, before: date, rows_max: int) -> int:
        old = [key for key, _ in self.uniques.items() if key[1] < before][:rows_max]
        for key in old:
            self.uniques.pop(key)
        return len(old)

    def _nothing(self) -> int:
        return 1

    def _no_step(self, before: datetime, time_zone: str, ids_max: int) -> list[Row]:
        """No month of a run is old enough."""
        return [{"roll_up": False}]

    def _no_changes(self, kept_s: float, rows_max: int) -> list[Row]:
        """Changes are not kept."""
        assert kept_s == 0, "the scenario keeps no changes"
        return [{"dropped": 0}]


def _shard_fields(shard: int, row: Any) -> Row:
    return {
        "shard": shard,
        "through": row.through,
        "setups": row.setups,
        "corrections": row.corrections,
    }
