"""What is made of the counts for those whose entities they are: series, top lists, deletion, corrections, the proof."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final
from zoneinfo import ZoneInfo

from headrace.engines.postgres import Postgres
from headrace.jobs import Jobs, NewJob
from headrace.views import store
from headrace.views.errors import InvalidSpan, shown
from headrace.views.hot import Hot
from headrace.views.model import (
    TOMBSTONE_S,
    TOP_MAX,
    Deleted,
    Reclassify,
    SeriesPoint,
    ShardLag,
    TopEntry,
    Traffic,
    Verified,
    require_ids,
    shard_of,
)
from headrace.views.service.patience import Patience
from headrace.views.service.shards import Shards

RECLASSIFY_QUEUE: Final = "views.reclassify"
HOURS_MAX: Final = timedelta(days=100)
DAYS_MAX: Final = timedelta(days=3_660)
HOURS_USUAL: Final = timedelta(days=2)
DAYS_USUAL: Final = timedelta(days=30)
WINDOW_S_MAX: Final = 31 * 86_400.0
TOP_KEPT_S: Final = 5.0
"""So long a process tells the same top list: it is made from every hour row of the window."""
ANSWER_S: Final = 3.0
"""Longest wait for a series, which is read by its index."""
TOP_S_MAX: Final = 10.0
"""Longest wait for a top list. One that takes long says nothing of PostgreSQL to those who ask for less."""
DIFFERENCES_MAX: Final = 100
VERIFY_S_MAX: Final = 600.0


class Owners:
    """Works on the hour rows."""

    def __init__(
        self,
        postgres: Postgres,
        hot: Hot,
        shards: Shards,
        jobs: Jobs,
        *,
        patience: Patience,
        time_zone: str,
    ) -> None:
        self._patience = patience
        self._long_patience = Patience()
        self._postgres = postgres
        self._hot = hot
        self._shards = shards
        self._jobs = jobs
        self._time_zone = time_zone
        self._tops: dict[tuple[float, int, Traffic], tuple[float, list[TopEntry]]] = {}

    async def series(
        self, entity: str, by: str, from_at: datetime | None, to_at: datetime | None
    ) -> list[SeriesPoint]:
        """Views of an entity by hour or day, oldest first. Raises: InvalidHit, InvalidSpan, PostgresDown."""
        require_ids([entity])
        if by not in ("hour", "day"):
            raise InvalidSpan(f"series by {shown(by)}: expected hour or day")
        usual, longest = (HOURS_USUAL, HOURS_MAX) if by == "hour" else (DAYS_USUAL, DAYS_MAX)
        zone = None if by == "hour" else ZoneInfo(self._time_zone)
        since_at, until_at = _span(from_at, to_at, usual=usual, longest=longest, days_of=zone)
        read: Callable[..., Awaitable[list[SeriesPoint]]] = store.series.hours
        if by == "day":
            read = partial(store.series.days, time_zone=self._time_zone)
        return await self._patience.ask(
            lambda: read(self._postgres, entity, from_at=since_at, to_at=until_at), wait_s=ANSWER_S
        )

    async def top(self, window_s: float, limit: int, traffic: Traffic) -> list[TopEntry]:
        """The most viewed entities of the last `window_s`, in whole hours. Raises: InvalidSpan, PostgresDown."""
        if not isinstance(window_s, int | float) or not 0 < window_s <= WINDOW_S_MAX:
            raise InvalidSpan(
                f"top of {shown(window_s)}: expected a window in seconds, up to 31 days"
            )
        if not isinstance(limit, int) or not 1 <= limit <= TOP_MAX:
            raise InvalidSpan(f"top {shown(limit)}: expected 1 to {TOP_MAX} lines")
        key, now_s = (window_s, limit, traffic), time.monotonic()
        known = self._tops.get(key)
        if known is not None and now_s - known[0] < TOP_KEPT_S:
            return known[1]
        self._patience.require_awake()
        found = await self._long_patience.ask(
            lambda: store.series.top(
                self._postgres, window_s=window_s, traffic=traffic, rows_max=limit
            ),
            wait_s=TOP_S_MAX,
        )
        self._tops = {k: v for k, v in self._tops.items() if now_s - v[0] < TOP_KEPT_S}
        self._tops[key] = (now_s, found)
        return found

    async def delete(self, entity: str) -> Deleted:
        """Remove an entity's counts and count nothing for it for 30 days; again: the same from now on.

        The total told is PostgreSQL's: hits that were not flushed go, too. Where Valkey is away afterwards it fails although PostgreSQL forgot: delete again. Raises: InvalidHit,
        PostgresDown, ValkeyDown.
        """
        require_ids([entity])
        await self._shards.ready()
        shard = shard_of(entity, self._shards.count)
        deleted = await store.series.delete(self._postgres, entity, shard, kept_s=TOMBSTONE_S)
        await self._hot.bury(shard, [entity])
        return deleted

    async def reclassify(self, wanted: Reclassify) -> int:
        """Enqueue the move of an entity's views between classes; the job's id. Raises: InvalidHit, InvalidSpan."""
        require_ids([wanted.id])
        since_at, until_at = _span(
            wanted.from_at, wanted.to_at, usual=HOURS_USUAL, longest=DAYS_MAX
        )
        if wanted.source == wanted.target:
            raise InvalidSpan(
                f"reclassify {wanted.source} to {wanted.target}: expected two classes"
            )
        for moment in (since_at, until_at):
            if moment != moment.replace(minute=0, second=0, microsecond=0):
                raise InvalidSpan(f"reclassify {moment.isoformat()}: expected a whole hour of UTC")
        job_id: int = await self._jobs.enqueue(NewJob(queue=RECLASSIFY_QUEUE, payload=wanted))
        return job_id

    async def move(self, wanted: Reclassify) -> int:
        """Move them; how many. What was moved is not moved again, so a repeated run adds nothing."""
        await self._shards.ready()
        shard = shard_of(wanted.id, self._shards.count)
        views, corrections = await store.series.reclassify(self._postgres, wanted, shard)
        await self._hot.correct(shard, wanted.id, corrections=corrections)
        return views

    async def verify(self) -> Verified:
        """Compare every total with its hours. One statement sees both as of one moment."""
        async with self._postgres.session() as session:
            await session.allow_long_statements(VERIFY_S_MAX)
            differences = await store.series.differences(session, rows_max=DIFFERENCES_MAX)
            entities, views = await store.series.counted(session)
        return Verified(entities=entities, views=views, differences=differences)

    async def lag(self) -> list[ShardLag]:
        """How far each shard's flush is. Raises: PostgresDown, ValkeyDown."""
        await self._shards.ready()
        found = []
        for state in await store.shards.all_shards(self._postgres):
            pending, first_ms = await self._hot.lag(state.shard, state.through)
            now_s = await self._hot.now_s(state.shard) if first_ms else 0.0
            oldest_s = max(0.0, round(now_s - first_ms / 1000, 3))
            found.append(
                ShardLag(
                    shard=state.shard,
                    through=state.through,
                    pending=pending,
                    oldest_s=oldest_s,
                    flusher=state.flusher,
                )
            )
        return found


def _span(
    from_at: datetime | None,
    to_at: datetime | None,
    *,
    usual: timedelta,
    longest: timedelta,
    days_of: ZoneInfo | None = None,
) -> tuple[datetime, datetime]:
    """Both ends in UTC; a beginning of ours is that of a day of `days_of`. Raises: InvalidSpan."""
    try:
        until_at = _in_utc(to_at) if to_at else datetime.now(UTC) + timedelta(hours=1)
        since_at = _in_utc(from_at) if from_at else until_at - usual
        if days_of is not None and not from_at:
            day = since_at.astimezone(days_of).date()
            since_at = datetime.combine(day, datetime.min.time(), days_of).astimezone(UTC)
        is_valid = timedelta() < until_at - since_at <= longest
    except (OverflowError, ValueError) as error:
        raise InvalidSpan(
            "from and to are moments with a time zone such as 2026-11-21T10:00:00Z"
        ) from error
    if not is_valid:
        raise InvalidSpan(
            f"from {since_at.isoformat()} to {until_at.isoformat()}: expected a span of at most {longest.days}"
            " days that begins before it ends"
        )
    return since_at, until_at


def _in_utc(moment: datetime) -> datetime:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ValueError(moment)
    return moment.astimezone(UTC)
