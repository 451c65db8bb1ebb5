"""What is counted: the top of the last hours, an entity with its series, how far the flush is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from headrace.console.screens.words import same
from headrace.console.seeing import Ask, Chart, Found, Line, attempt
from headrace.views.model import (
    CLASSES,
    DayViewers,
    SeriesPoint,
    ShardLag,
    TopEntry,
    Total,
    Traffic,
)

WINDOWS: Final[dict[str, float]] = {
    "1h": 3_600.0,
    "24h": 86_400.0,
    "7d": 7 * 86_400.0,
    "31d": 31 * 86_400.0,
}
LIMITS: Final = ("20", "50", "100")
SPANS: Final[dict[str, tuple[str, timedelta]]] = {
    "2d": ("hour", timedelta(days=2)),
    "7d": ("hour", timedelta(days=7)),
    "31d": ("day", timedelta(days=31)),
    "1y": ("day", timedelta(days=365)),
}
TONES: Final = {
    Traffic.HUMAN: "",
    Traffic.BOT: "warn",
    Traffic.OWNER: "good",
    Traffic.STAFF: "",
}
LATE_S: Final = 60.0
"""A flush that is later is told as wrong: it is a second or two where all is well."""

NOTHING: Final[Found[Any]] = Found()
"""Where nothing was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """How far the flush is, of all shards together."""

    pending: int
    oldest_s: float
    shards: int
    alone: int
    """Shards that no flusher carries."""

    @property
    def tone(self) -> str:
        """How that is."""
        return "bad" if self.alone or self.oldest_s > LATE_S else "good"

    @property
    def word(self) -> str:
        """The same in a word or two."""
        if self.tone == "bad":
            return "flush is late"
        return "flushing" if self.pending else "flushed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopView:
    """A top list."""

    window: str
    windows: Sequence[tuple[str, str]]
    traffic: str
    classes: Sequence[tuple[str, str]]
    limit: str
    limits: Sequence[tuple[str, str]]
    top: Found[list[TopEntry]]
    most: int
    totals: dict[str, Total]
    """Totals as they stand now, of those entities that they are known of."""
    flush: Found[Flush]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntityView:
    """One entity; without one: where one is asked for."""

    entity: str
    span: str
    spans: Sequence[tuple[str, str]] = tuple(same(SPANS))
    total: Found[Total] = NOTHING
    by: str = ""
    chart: Chart | None = None
    error: str | None = None
    sums: Sequence[tuple[str, int]] = ()
    zone: str = ""
    viewers: Found[list[DayViewers]] = NOTHING
    """By day, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagView:
    """How far the flush of each shard is."""

    shards: Found[list[ShardLag]]
    flush: Found[Flush]
    durability: str
    late_s: float


async def see_top(ask: Ask) -> TopView:
    """The most viewed entities of a window."""
    views = ask.service("views")
    window = ask.query.choice("window", tuple(WINDOWS), "24h")
    traffic = ask.query.choice("class", CLASSES, Traffic.HUMAN)
    limit = ask.query.choice("limit", LIMITS, LIMITS[0])
    top, lag = await asyncio.gather(
        attempt(views.analytics.top(WINDOWS[window], int(limit), traffic=traffic)),
        attempt(views.analytics.lag()),
    )
    found = top.value or []
    totals = await attempt(views.totals([entry.id for entry in found])) if found else Found([])
    return TopView(
        window=window,
        windows=same(WINDOWS),
        traffic=traffic,
        classes=same(CLASSES),
        limit=limit,
        limits=same(LIMITS),
        top=top,
        most=max((entry.views for entry in found), default=0),
        totals={total.id: total for total in totals.value or ()},
        flush=flush_of(lag),
    )


async def see_entity(ask: Ask) -> EntityView:
    """One entity: its totals, and its views over time."""
    views, entity = ask.service("views"), ask.query.text("id", most=128).strip()
    span = ask.query.choice("span", tuple(SPANS), "7d")
    if not entity:
        return EntityView(entity=entity, span=span)
    by, length = SPANS[span]
    from_at = ask.now_at - length
    total, series, viewers = await asyncio.gather(
        _total(views, entity),
        attempt(views.analytics.series(entity, by, from_at=from_at)),
        attempt(views.analytics.viewers(entity)),
    )
    zone = ZoneInfo(views.config.time_zone)
    points = series.value
    chart = None if points is None else chart_of(points, by, from_at, ask.now_at, zone=zone)
    sums = [(str(each), sum(getattr(p, each.value) for p in points or ())) for each in Traffic]
    return EntityView(
        entity=entity,
        total=total,
        span=span,
        by=by,
        chart=chart,
        error=series.error,
        sums=sums,
        zone=views.config.time_zone,
        viewers=Found(viewers.value and viewers.value[::-1], error=viewers.error),
    )


async def see_lag(ask: Ask) -> LagView:
    """How far the flush is, shard by shard."""
    views = ask.service("views")
    lag = await attempt(views.analytics.lag())
    return LagView(
        shards=lag,
        flush=flush_of(lag),
        durability=views.config.durability,
        late_s=LATE_S,
    )


def flush_of(lag: Found[list[ShardLag]]) -> Found[Flush]:
    """All shards together."""
    shards = lag.value
    if shards is None:
        return Found(error=lag.error)
    flush = Flush(
        pending=sum(shard.pending for shard in shards),
        oldest_s=max((shard.oldest_s for shard in shards), default=0.0),
        shards=len(shards),
        alone=sum(shard.flusher is None for shard in shards),
    )
    return Found(flush)


def chart_of(
    points: Sequence[SeriesPoint], by: str, from_at: datetime, to_at: datetime, *, zone: ZoneInfo
) -> Chart:
    """Views of each class over time; an hour or day that has no point has none, so it is drawn as 0."""
    known = {point.start_at: point for point in points}
    starts = list(_hours(from_at, to_at) if by == "hour" else _days(from_at, to_at, zone))
    starts = sorted({*starts, *known})
    lines = [
        Line(
            label=traffic.value,
            values=[getattr(known[at], traffic.value) if at in known else 0 for at in starts],
            tone=TONES[traffic],
        )
        for traffic in Traffic
        if traffic is Traffic.HUMAN or any(getattr(point, traffic.value) for point in points)
    ]
    return Chart(xs=[at.timestamp() for at in starts], lines=lines, unit="views", kind="bars")


async def _total(views: Any, entity: str) -> Found[Total]:
    fields = ("total", "today", "unique", "classes")
    found = await attempt(views.totals([entity], fields=fields))
    return Found(found.value[0] if found.value else None, found.error)


def _hours(from_at: datetime, to_at: datetime) -> Iterator[datetime]:
    at = from_at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    while at <= to_at:
        yield at
        at += timedelta(hours=1)


def _days(from_at: datetime, to_at: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    """Midnights of the deployment's zone, in which days have 23 to 25 hours."""
    day = from_at.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    while day <= to_at:
        yield day.astimezone(UTC)
        day = (day.replace(tzinfo=None) + timedelta(days=1)).replace(tzinfo=zone)
