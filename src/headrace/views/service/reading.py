"""Reads of many entities at once: totals from Valkey in one command, what it lacks from PostgreSQL in one statement.

A read writes nothing: what is looked at without being hit does not push out what is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from headrace.engines.multiplex import ValkeyPartlyDown
from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.kernel.errors import Unavailable
from headrace.views import store
from headrace.views.errors import FieldUnknown, InvalidSpan, TooManyIds, shown
from headrace.views.hot import Hot
from headrace.views.model import (
    FIELDS,
    IDS_PER_READ_MAX,
    DayViewers,
    Total,
    require_ids,
    shard_of,
)
from headrace.views.service.patience import Patience
from headrace.views.service.shards import Shards
from headrace.views.settings import totals_untold

KEYS_KEPT_MAX: Final = 100_000
"""Keys of entities that were asked for, about 25 MB; then it begins anew."""
ANSWER_S: Final = 3.0
"""Longest wait for what Valkey has not; then it is told as unknown."""
_EPOCH: Final = date(1970, 1, 1)
VIEWERS_USUAL: Final = timedelta(days=30)
VIEWERS_DAYS_MAX: Final = 3_660


class Reading:
    """Answers reads from wherever there is an answer."""

    def __init__(
        self, postgres: Postgres, hot: Hot, shards: Shards, patience: Patience, *, time_zone: str
    ) -> None:
        self._postgres = postgres
        self._patience = patience
        self._hot = hot
        self._shards = shards
        self._zone = ZoneInfo(time_zone)
        self._keys: dict[str, str] = {}

    async def totals(self, ids: Sequence[str], fields: Sequence[str]) -> list[Total]:
        """One for each id, in order; 0 for what was never hit.

        Raises: InvalidHit, TooManyIds, FieldUnknown; ValkeyDown, PostgresDown where neither answers.
        """
        for field in fields:
            if field not in FIELDS:
                raise FieldUnknown(field, FIELDS)
        names = ids if isinstance(ids, list) else require_ids(ids)
        keys = self._keys_of(names)
        if not keys:
            return []
        if not self._shards.is_ready:
            await self._ready()
        found = await self._totals(names, keys)
        extra = [field for field in fields if field != "total"]
        if not extra:
            return found
        try:
            return await self._patience.ask(
                lambda: self._with_fields(found, extra), wait_s=ANSWER_S
            )
        except Unavailable:
            totals_untold.labels(reason="postgres").inc(len(found))
            return [msgspec.structs.replace(total, stale=True) for total in found]

    async def viewers(
        self, entity: str, from_day: date | None, to_day: date | None
    ) -> list[DayViewers]:
        """Viewers of an entity by day, oldest first. Raises: InvalidHit, InvalidSpan, PostgresDown."""
        require_ids([entity])
        today = datetime.now(self._zone).date()
        since, until = _days(from_day, to_day, today)
        if not self._shards.is_ready:
            await self._ready()
        found = await self._patience.ask(
            lambda: store.totals.uniques_by_day(self._postgres, entity, since=since, until=until),
            wait_s=ANSWER_S,
        )
        if since <= today < until:
            latest, _ = await self._patience.ask(lambda: self._viewers([entity]), wait_s=ANSWER_S)
            found[today] = max(found.get(today, 0), latest.get(entity, 0))
        return [DayViewers(day=day, viewers=found[day]) for day in sorted(found) if found[day]]

    async def _ready(self) -> None:
        try:
            await self._shards.ready()
        except Unavailable:
            # Neither engine can say how many shards there are now; what is configured is as good for a read.
            return

    def _keys_of(self, ids: Sequence[str]) -> list[str]:
        """Where the totals are. An id is judged and its shard found when it is first asked for: 20 ids cost 20 us else."""
        known = self._keys
        try:
            keys = [known[entity] for entity in ids]
        except (KeyError, TypeError):
            names, count = require_ids(ids), self._shards.count
            keys = self._hot.total_keys(names, [shard_of(name, count) for name in names])
            if len(known) > KEYS_KEPT_MAX:
                known.clear()
            known.update(zip(names, keys, strict=True))
        if len(keys) > IDS_PER_READ_MAX:
            raise TooManyIds(len(keys), IDS_PER_READ_MAX)
        return keys

    async def _totals(self, names: list[str], keys: list[str]) -> list[Total]:
        try:
            cached = await self._hot.totals(keys)
        except ValkeyPartlyDown as error:
            totals_untold.labels(reason="valkey").inc(len(error.lost))
            return await self._with_missing(names, error.found, error.lost)
        except ValkeyDown:
            totals_untold.labels(reason="valkey").inc(len(names))
            kept = await self._stored(names)
            return [Total(id=name, total=kept.get(name, 0), stale=True) for name in names]
        if None not in cached:
            return [Total(id=name, total=total) for name, total in zip(names, cached, strict=True)]
        return await self._with_missing(names, cached)

    async def _with_missing(
        self, names: list[str], cached: list[int | None], lost: Collection[int] = ()
    ) -> list[Total]:
        """With PostgreSQL's totals of what is not cached; stale where a primary of the cluster did not answer."""
        missing = [name for name, total in zip(names, cached, strict=True) if total is None]
        stored: dict[str, int] | None = None
        try:
            stored = await self._stored(missing)
        except Unavailable:
            totals_untold.labels(reason="postgres").inc(len(missing))
        answer = []
        for place, (name, total) in enumerate(zip(names, cached, strict=True)):
            if total is not None:
                answer.append(Total(id=name, total=total))
            elif stored is not None:
                answer.append(Total(id=name, total=stored.get(name, 0), stale=place in lost))
            else:
                answer.append(Total(id=name, total=None, stale=True))
        return answer

    async def _stored(self, names: list[str]) -> dict[str, int]:
        return await self._patience.ask(
            lambda: store.totals.totals(self._postgres, names), wait_s=ANSWER_S
        )

    async def _with_fields(self, totals: list[Total], fields: Sequence[str]) -> list[Total]:
        """The totals with what PostgreSQL (and for viewers Valkey) adds. Raises: PostgresDown."""
        names = list(dict.fromkeys(total.id for total in totals))
        added: dict[str, dict[str, object]] = {name: {} for name in names}
        if "today" in fields:
            views = await store.totals.day_totals(
                self._postgres, names, since_at=self._midnight_at()
            )
            for name in names:
                added[name]["today"] = views.get(name, 0)
        if "classes" in fields:
            classes = await store.totals.class_totals(self._postgres, names)
            for name in names:
                added[name]["classes"] = classes.get(name, {})
        if "unique" in fields:
            viewers, is_stale = await self._viewers(names)
            for name in names:
                added[name]["unique"] = viewers.get(name, 0)
                if is_stale:
                    added[name]["stale"] = True
        return [msgspec.structs.replace(total, **added[total.id]) for total in totals]

    async def _viewers(self, names: list[str]) -> tuple[dict[str, int], bool]:
        """Viewers today, and whether only those that were written down: Valkey, which has the latest, did not tell.

        It is Valkey's number, and what was written down where that is more (Valkey was emptied).
        """
        today = datetime.now(self._zone).date()
        stored = await store.totals.day_uniques(self._postgres, names, day=today)
        by_shard: dict[int, list[str]] = {}
        for name in names:
            by_shard.setdefault(shard_of(name, self._shards.count), []).append(name)
        day = (today - _EPOCH) // timedelta(days=1)
        try:
            parts = await asyncio.gather(
                *[self._hot.viewers(shard, part, day=day) for shard, part in by_shard.items()]
            )
        except ValkeyDown:
            return stored, True
        for part in parts:
            for name, count in part.items():
                stored[name] = max(count, stored.get(name, 0))
        return stored, False

    def _midnight_at(self) -> datetime:
        now_at = datetime.now(self._zone)
        return datetime.combine(now_at.date(), datetime.min.time(), self._zone).astimezone(UTC)


def _days(from_day: date | None, to_day: date | None, today: date) -> tuple[date, date]:
    """The days from the first up to before the second; today and 30 days before it. Raises: InvalidSpan."""
    for day in (from_day, to_day):
        if day is not None and (not isinstance(day, date) or isinstance(day, datetime)):
            raise InvalidSpan(f"viewers of {shown(day)}: expected days such as 2026-11-21")
    try:
        until = to_day or today + timedelta(days=1)
        since = from_day or min(today, until) - VIEWERS_USUAL
    except OverflowError as error:
        raise InvalidSpan("viewers: expected days such as 2026-11-21") from error
    if not 0 < (until - since).days <= VIEWERS_DAYS_MAX:
        raise InvalidSpan(
            f"viewers from {since} to {until}: expected a span of 1 to {VIEWERS_DAYS_MAX} days"
        )
    return since, until
