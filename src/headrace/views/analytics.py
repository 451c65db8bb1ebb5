"""Analytics (series, viewers, top lists, checks) and corrections (deletion, reclassification)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.jobs import Jobs, NewJob, Registry, Task
from headrace.kernel.errors import describe_value
from headrace.views import store
from headrace.views.counting import Shards
from headrace.views.errors import InvalidSpan
from headrace.views.model import (
    TOMBSTONE_S,
    TOP_MAX,
    Correction,
    DayViewers,
    Deleted,
    Mark,
    Reclassify,
    SeriesPoint,
    ShardLag,
    TopEntry,
    Traffic,
    Verified,
    require_ids,
    require_mark,
    require_traffic,
    shard_of,
)
from headrace.views.sketches import estimate, merged
from headrace.views.valkey_store import CircuitBreaker, ValkeyStore

RECLASSIFY_QUEUE: Final = "views.reclassify"
HOURS_DEFAULT: Final = timedelta(days=2)
DAYS_MAX: Final = timedelta(days=3_660)
SPANS: Final = {
    "hour": (HOURS_DEFAULT, timedelta(days=100)),
    "day": (timedelta(days=30), DAYS_MAX),
    "month": (timedelta(days=335), DAYS_MAX),
}
"""Default and longest span of a series."""
WINDOW_S_MAX: Final = 31 * 86_400.0
TOP_CACHED_S: Final = 5.0
"""How long a process caches a top list, which reads every hour row of its window."""
ANSWER_S: Final = 3.0
"""Wait limit of an indexed read."""
TOP_S_MAX: Final = 10.0
"""Wait limit of a top list. Its timeout does not open the breaker of other reads."""
DIFFERENCES_MAX: Final = 100
VERIFY_S_MAX: Final = 600.0
_EPOCH: Final = date(1970, 1, 1)


SKETCHES_MAX: Final = 3_660
"""Sketches per read, each up to 12 KiB and 2 ms."""
PART_CHARACTERS_MAX: Final = 128
PERIODS: Final[dict[str, Callable[[date], date]]] = {
    "day": lambda day: day,
    "week": lambda day: day - timedelta(days=day.weekday()),
    "month": lambda day: day.replace(day=1),
    "all": lambda day: day,
}
"""The first day of a day's period."""


class Analytics:
    """Reads over hours and days, and the state of the flush."""

    def __init__(
        self,
        postgres: Postgres,
        valkey: ValkeyStore,
        shards: Shards,
        breaker: CircuitBreaker,
        *,
        time_zone: str,
    ) -> None:
        self._breaker = breaker
        self._top_breaker = CircuitBreaker()
        self._postgres = postgres
        self._valkey = valkey
        self._shards = shards
        self._zone = ZoneInfo(time_zone)
        self._tops: dict[tuple[float, int, Traffic], tuple[float, list[TopEntry]]] = {}

    async def series(
        self,
        entity: str,
        by: str = "hour",
        *,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
    ) -> list[SeriesPoint]:
        """Views by `hour` (UTC), `day` or `month` (configured time zone), oldest first, no zeros.

        The default span is two days for hours, today and the 30 days before it for days, and the
        current month and the 11 before it. Hours older than `views.hours_kept` exist as days only.
        Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        require_ids([entity])
        span = span_of(by, from_at, to_at, zone=self._zone)
        return await self._breaker.call(
            lambda: store.series(self._postgres.reads, entity, span), wait_s=ANSWER_S
        )

    async def hours_from(self) -> datetime | None:
        """The first hour that is not replaced by its day; None: all are kept."""
        return await self._breaker.call(lambda: store.hours_from(self._postgres), wait_s=ANSWER_S)

    async def marks(
        self, entity: str, *, from_at: datetime | None = None, to_at: datetime | None = None
    ) -> list[Mark]:
        """Marks of an item that overlap a span, oldest first, up to 1,000.

        The default span is today and the 30 days before it. Raises: InvalidHit, InvalidSpan,
        PostgresDown.
        """
        require_ids([entity])
        span = span_of("day", from_at, to_at, zone=self._zone)
        return await self._breaker.call(
            lambda: store.marks(self._postgres, entity, from_at=span.from_at, to_at=span.to_at),
            wait_s=ANSWER_S,
        )

    async def viewers(
        self,
        ids: str | Sequence[str],
        by: str = "day",
        *,
        from_day: date | None = None,
        to_day: date | None = None,
    ) -> list[DayViewers]:
        """Different viewers of items together, by `day`, `week` (from Monday), `month` or `all`.

        A viewer of several items or days counts once in each period. `day` of a row is the first
        one of its period; periods are cut at the span's ends, by default today and the 30 days
        before it. Each number is an estimate (within 2 % for 95 of 100), of days that are kept
        for `views.viewers_kept`. Raises: InvalidHit, InvalidSpan, TooManyIds, PostgresDown.
        """
        names = list(dict.fromkeys(require_ids([ids] if isinstance(ids, str) else ids)))
        if by not in PERIODS:
            raise InvalidSpan(f"viewers by {describe_value(by)}: expected {', '.join(PERIODS)}")
        today = datetime.now(self._zone).date()
        since, until = _days(from_day, to_day, today)
        if len(names) * (until - since).days > SKETCHES_MAX:
            raise InvalidSpan(
                f"viewers of {len(names)} items over {(until - since).days} days: expected at most"
                f" {SKETCHES_MAX} items times days"
            )
        await self._shards.ready_for_read()
        stored = await self._breaker.call(
            lambda: store.sketches(self._postgres.reads, names, since=since, until=until),
            wait_s=ANSWER_S,
        )
        if since <= today < until:
            shards = [shard_of(name, self._shards.count) for name in names]
            number = (today - _EPOCH) // timedelta(days=1)
            with suppress(ValkeyDown):
                latest = await self._valkey.sketches(names, shards, day=number)
                stored += [(today, sketch) for sketch in latest]
        by_period: dict[date, list[bytes]] = {}
        for day, sketch in stored:
            first = PERIODS[by](day) if by != "all" else since
            by_period.setdefault(max(first, since), []).append(sketch)
        return await asyncio.to_thread(_merged, by_period)

    async def viewers_today(self, names: list[str]) -> tuple[dict[str, int], bool]:
        """Viewers today, and whether the numbers are stale because Valkey is down.

        The larger of Valkey's number and the stored one, because Valkey may have been emptied.
        """
        today = datetime.now(self._zone).date()
        stored = await store.day_uniques(self._postgres, names, day=today)
        by_shard: dict[int, list[str]] = {}
        for name in names:
            by_shard.setdefault(shard_of(name, self._shards.count), []).append(name)
        day = (today - _EPOCH) // timedelta(days=1)
        try:
            parts = await asyncio.gather(
                *[self._valkey.viewers(shard, part, day=day) for shard, part in by_shard.items()]
            )
        except ValkeyDown:
            return stored, True
        for part in parts:
            for name, count in part.items():
                stored[name] = max(count, stored.get(name, 0))
        return stored, False

    async def top(
        self, window_s: float = 86_400.0, limit: int = 20, *, traffic: Traffic | str = Traffic.HUMAN
    ) -> list[TopEntry]:
        """The most viewed items of the last `window_s`, in whole hours, most first.

        Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        counted = require_traffic(traffic, counts=False)
        if not isinstance(window_s, int | float) or not 0 < window_s <= WINDOW_S_MAX:
            raise InvalidSpan(
                f"top of {describe_value(window_s)}: expected a window in seconds, up to 31 days"
            )
        if not isinstance(limit, int) or not 1 <= limit <= TOP_MAX:
            raise InvalidSpan(f"top {describe_value(limit)}: expected 1 to {TOP_MAX} rows")
        key, now_s = (window_s, limit, counted), time.monotonic()
        cached = self._tops.get(key)
        if cached is not None and now_s - cached[0] < TOP_CACHED_S:
            return cached[1]
        self._breaker.require_closed()
        found = await self._top_breaker.call(
            lambda: store.top(
                self._postgres.reads, window_s=window_s, traffic=counted, rows_max=limit
            ),
            wait_s=TOP_S_MAX,
        )
        self._tops = {k: v for k, v in self._tops.items() if now_s - v[0] < TOP_CACHED_S}
        self._tops[key] = (now_s, found)
        return found

    async def find(self, part: str, *, rows_max: int = 10) -> list[str]:
        """Ids of items with views that begin with `part`. Raises: PostgresDown."""
        if not part.isprintable() or len(part) > PART_CHARACTERS_MAX:
            return []
        return await store.ids_like(self._postgres.reads, part, rows_max=rows_max)

    async def verify(self) -> Verified:
        """Compare every total with the sum of its hours, as of one moment. Raises: PostgresDown."""
        async with self._postgres.session() as session:
            await session.allow_long_statements(VERIFY_S_MAX)
            differences = await store.differences(session, rows_max=DIFFERENCES_MAX)
            entities, views = await store.counted(session)
        return Verified(entities=entities, views=views, differences=differences)

    async def lag(self) -> list[ShardLag]:
        """Progress of each shard's flush. Raises: PostgresDown, ValkeyDown."""
        await self._shards.ready()
        found = []
        for state in await store.all_shards(self._postgres):
            pending, first_ms = await self._valkey.lag(state.shard, state.through)
            now_s = await self._valkey.now_s(state.shard) if first_ms else 0.0
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


class Corrections:
    """Deletion of counts, their move between classes, and marks."""

    def __init__(self, postgres: Postgres, valkey: ValkeyStore, shards: Shards, jobs: Jobs) -> None:
        self._postgres = postgres
        self._valkey = valkey
        self._shards = shards
        self._jobs = jobs

    def register(self, registry: Registry) -> None:
        """Add the task that reclassifies; required in every process that enqueues or works."""
        registry.add(Task(queue=RECLASSIFY_QUEUE, handler=self.move, retries=20))

    async def delete(self, entity: str) -> Deleted:
        """Delete an item's counts, and drop its hits for 30 days from now.

        The returned total is PostgreSQL's; hits not flushed yet are deleted too. On ValkeyDown
        PostgreSQL has deleted the item, and a flusher deletes it in Valkey. Raises: InvalidHit,
        PostgresDown, ValkeyDown.
        """
        require_ids([entity])
        await self._shards.ready()
        shard = shard_of(entity, self._shards.count)
        deleted, number = await store.delete(
            self._postgres, entity, shard, shards=self._shards.count, kept_s=TOMBSTONE_S
        )
        correction = Correction(number, entity, is_deleted=True)
        await self._valkey.correct(shard, [correction], after=number - 1)
        return deleted

    async def mark(
        self,
        entity: str,
        name: str,
        *,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
    ) -> Mark:
        """Mark an item's time from `from_at` (now) to `to_at` (not ended).

        A mark of the same name and beginning gets the new end. Raises: InvalidHit, InvalidSpan,
        PostgresDown.
        """
        require_ids([entity])
        require_mark(name)
        try:
            since_at = _in_utc(from_at) if from_at else datetime.now(UTC).replace(microsecond=0)
            until_at = _in_utc(to_at) if to_at else None
        except (OverflowError, ValueError) as error:
            raise InvalidSpan("from and to of a mark: expected moments with a time zone") from error
        if until_at is not None and until_at <= since_at:
            raise InvalidSpan(f"mark {name}: expected a span that begins before it ends")
        marked = Mark(name=name, from_at=since_at, to_at=until_at)
        await store.mark(self._postgres, entity, marked)
        return marked

    async def unmark(self, entity: str, name: str, *, from_at: datetime | None = None) -> int:
        """Delete all marks of a name, or the one that begins at `from_at`. Return how many.

        Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        require_ids([entity])
        require_mark(name)
        if from_at is not None and (not isinstance(from_at, datetime) or from_at.tzinfo is None):
            raise InvalidSpan("from of a mark: expected a moment with a time zone")
        return await store.unmark(self._postgres, entity, name, from_at=from_at)

    async def reclassify(
        self, entity: str, *, from_at: datetime, to_at: datetime, source: str, target: str
    ) -> int:
        """Enqueue the move of an item's views of whole hours to another class. Return the job id.

        Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        request = Reclassify(
            id=entity,
            from_at=from_at,
            to_at=to_at,
            source=require_traffic(source, counts=False),
            target=require_traffic(target, counts=False),
        )
        require_ids([entity])
        since_at, until_at = _span(from_at, to_at, default=HOURS_DEFAULT, longest=DAYS_MAX)
        if request.source == request.target:
            raise InvalidSpan(
                f"reclassify {request.source} to {request.target}: expected different classes"
            )
        kept_at = await store.hours_from(self._postgres)
        if kept_at is not None and since_at < kept_at:
            raise InvalidSpan(
                f"reclassify from {since_at.isoformat()}: hours before {kept_at.isoformat()} are"
                " replaced by their days (views.hours_kept) and cannot be moved"
            )
        for moment in (since_at, until_at):
            if moment != moment.replace(minute=0, second=0, microsecond=0):
                raise InvalidSpan(f"reclassify {moment.isoformat()}: expected a whole hour of UTC")
        job_id: int = await self._jobs.enqueue(NewJob(queue=RECLASSIFY_QUEUE, payload=request))
        return job_id

    async def move(self, request: Reclassify) -> None:
        """Move the views; the handler of the job. A repetition moves nothing more."""
        await self._shards.ready()
        shard = shard_of(request.id, self._shards.count)
        _, number = await store.reclassify(
            self._postgres, request, shard, shards=self._shards.count
        )
        correction = Correction(number, request.id, is_deleted=False)
        await self._valkey.correct(shard, [correction], after=number - 1)


def span_of(
    by: object, from_at: datetime | None, to_at: datetime | None, *, zone: ZoneInfo
) -> store.Span:
    """The span of a series. Raises: InvalidSpan."""
    if not isinstance(by, str) or by not in SPANS:
        raise InvalidSpan(f"series by {describe_value(by)}: expected one of {', '.join(SPANS)}")
    default, longest = SPANS[by]
    days_of = None if by == "hour" else zone
    ends = _span(from_at, to_at, default=default, longest=longest, days_of=days_of, by=by)
    return store.Span(by, *ends, "UTC" if by == "hour" else zone.key)


def _span(
    from_at: datetime | None,
    to_at: datetime | None,
    *,
    default: timedelta,
    longest: timedelta,
    days_of: ZoneInfo | None = None,
    by: str = "day",
) -> tuple[datetime, datetime]:
    """Both ends in UTC; a default beginning is midnight in `days_of`. Raises: InvalidSpan."""
    try:
        until_at = _in_utc(to_at) if to_at else datetime.now(UTC) + timedelta(hours=1)
        since_at = _in_utc(from_at) if from_at else until_at - default
        if days_of is not None and not from_at:
            day = since_at.astimezone(days_of).date()
            day = day.replace(day=1) if by == "month" else day
            since_at = datetime.combine(day, datetime.min.time(), days_of).astimezone(UTC)
        is_valid = timedelta() < until_at - since_at <= longest
    except (OverflowError, ValueError) as error:
        raise InvalidSpan(
            "from and to: expected moments with a time zone such as 2026-11-21T10:00:00Z"
        ) from error
    if not is_valid:
        raise InvalidSpan(
            f"from {since_at.isoformat()} to {until_at.isoformat()}: expected a span of at most"
            f" {longest.days} days that begins before it ends"
        )
    return since_at, until_at


def _in_utc(moment: datetime) -> datetime:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ValueError(moment)
    return moment.astimezone(UTC)


def _merged(by_period: dict[date, list[bytes]]) -> list[DayViewers]:
    return [
        DayViewers(day=first, viewers=estimate(merged(by_period[first])))
        for first in sorted(by_period)
    ]


def _days(from_day: date | None, to_day: date | None, today: date) -> tuple[date, date]:
    """First day, and the day after the last; by default today and 30 days. Raises: InvalidSpan."""
    for day in (from_day, to_day):
        if day is not None and (not isinstance(day, date) or isinstance(day, datetime)):
            raise InvalidSpan(f"viewers of {describe_value(day)}: expected days such as 2026-11-21")
    try:
        until = to_day or today + timedelta(days=1)
        since = from_day or min(today, until) - SPANS["day"][0]
    except OverflowError as error:
        raise InvalidSpan("viewers: expected days such as 2026-11-21") from error
    if not 0 < (until - since).days <= DAYS_MAX.days:
        raise InvalidSpan(
            f"viewers from {since} to {until}: expected a span of 1 to {DAYS_MAX.days} days"
        )
    return since, until
