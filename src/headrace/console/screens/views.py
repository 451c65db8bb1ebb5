"""The views room: top lists, one item over time, flush lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from headrace.console.actions import Action, Field
from headrace.console.format import format_count
from headrace.console.history import board_of
from headrace.console.screens.health_rooms import VIEWS_LAG_S
from headrace.console.views import (
    Chart,
    Line,
    PanelData,
    Room,
    Screen,
    ViewContext,
    attempt,
    choices,
)
from headrace.kernel.config import parse_as, parse_moment
from headrace.kernel.terminal import pluralize
from headrace.views.errors import InvalidSpan
from headrace.views.model import (
    CLASSES,
    SeriesPoint,
    ShardLag,
    Total,
    Traffic,
)

WINDOWS: Final[dict[str, float]] = {
    "1h": 3_600.0,
    "24h": 86_400.0,
    "7d": 7 * 86_400.0,
    "31d": 31 * 86_400.0,
}
EXAMPLES_MAX: Final = 12
LIMITS: Final = ("20", "50", "100")
SPANS: Final[dict[str, tuple[str, timedelta]]] = {
    "2d": ("hour", timedelta(days=2)),
    "7d": ("hour", timedelta(days=7)),
    "31d": ("day", timedelta(days=31)),
    "1y": ("day", timedelta(days=365)),
    "5y": ("month", timedelta(days=1_825)),
}
TONES: Final = {
    Traffic.HUMAN: "",
    Traffic.BOT: "warn",
    Traffic.OWNER: "good",
    Traffic.STAFF: "",
}
PENDING_COUNTED: Final = 10_000
"""The calls of a shard are counted up to about this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Flush lag over all shards."""

    pending: int
    is_capped: bool
    """There are more pending calls than were counted."""
    oldest_s: float
    shards: int
    alone: int
    """Shards without a flusher."""

    @property
    def tone(self) -> str:
        """Tone of the state."""
        return "bad" if self.alone or self.oldest_s > VIEWS_LAG_S else "good"

    @property
    def word(self) -> str:
        """State in one or two words."""
        if self.oldest_s > VIEWS_LAG_S:
            return "flush is late"
        if self.alone:
            return "no flusher"
        return "flushing" if self.pending else "flushed"

    @property
    def pending_text(self) -> str:
        """The pending calls: `3`, or `10,000 or more`."""
        return format_count(self.pending) + (" or more" if self.is_capped else "")


async def view_top(context: ViewContext) -> dict[str, Any]:
    """The most viewed items of a time window."""
    views = context.views
    window = context.query.choice("window", tuple(WINDOWS), "24h")
    traffic = context.query.choice("class", CLASSES, Traffic.HUMAN)
    limit = context.query.choice("limit", LIMITS, LIMITS[0])
    history, top, lag = await asyncio.gather(
        board_of(context, "views"),
        attempt(views.analytics.top, WINDOWS[window], int(limit), traffic=traffic),
        attempt(views.analytics.lag),
    )
    found = top.value or []
    totals = await attempt(views.totals, [entry.id for entry in found]) if found else PanelData([])
    return {
        "history": history,
        "window": window,
        "windows": choices(WINDOWS),
        "since_at": (context.now_at - timedelta(seconds=WINDOWS[window])).replace(
            minute=0, second=0, microsecond=0
        ),
        "traffic": traffic,
        "classes": choices(CLASSES),
        "limit": limit,
        "limits": choices(LIMITS),
        "top": top,
        "most": max((entry.views for entry in found), default=0),
        "totals": {total.id: total for total in totals.value or ()},
        "flush": flush_of(lag),
        "reads": await _reads(context),
    }


async def view_entity(context: ViewContext) -> dict[str, Any]:
    """Totals of an item and its views over time."""
    views, entity = context.views, context.query.text("id", most=128).strip()
    span = context.query.choice("span", tuple(SPANS), "7d")
    if not entity:
        examples = await entity_examples(context)
        return {"entity": entity, "span": span, "spans": choices(SPANS), "examples": examples}
    by, length = SPANS[span]
    from_at = context.now_at - length
    total, series, viewers, marks, together = await asyncio.gather(
        _total(views, entity),
        attempt(views.analytics.series, entity, by, from_at=from_at),
        attempt(views.analytics.viewers, entity),
        attempt(views.analytics.marks, entity, from_at=from_at),
        attempt(views.analytics.viewers, entity, "all"),
    )
    zone = ZoneInfo(views.config.time_zone)
    points = series.value
    chart = None if points is None else chart_of(points, by, from_at, context.now_at, zone=zone)
    sums = [
        (f"{each}, last {span}", sum(getattr(p, each.value) for p in points or ()))
        for each in Traffic
    ]
    return {
        "entity": entity,
        "total": total,
        "span": span,
        "spans": choices(SPANS),
        "by": by,
        "chart": chart,
        "error": series.error,
        "sums": sums,
        "zone": views.config.time_zone,
        "marks": marks,
        "together": together.value[0].viewers if together.value else None,
        "viewers": PanelData(viewers.value and viewers.value[::-1], error=viewers.error),
        "reads": await _reads(context),
    }


async def entity_examples(context: ViewContext) -> list[str]:
    """Ids to start from: the most viewed of 31 days, then any."""
    analytics = context.views.analytics
    top = await attempt(analytics.top, WINDOWS["31d"], EXAMPLES_MAX)
    ids = [entry.id for entry in top.value or ()]
    if len(ids) < EXAMPLES_MAX:
        ids += (await attempt(analytics.find, "", rows_max=EXAMPLES_MAX)).value or []
    return list(dict.fromkeys(ids))[:EXAMPLES_MAX]


async def view_lag(context: ViewContext) -> dict[str, Any]:
    """Flush lag by shard."""
    views = context.views
    lag, hours_from = await asyncio.gather(
        attempt(views.analytics.lag), attempt(views.analytics.hours_from)
    )
    return {
        "shards": lag,
        "flush": flush_of(lag),
        "durability": views.config.durability,
        "late_s": VIEWS_LAG_S,
        "pending_counted": PENDING_COUNTED,
        "hours_from": hours_from,
        "changes_kept_s": views.config.changes_kept_s,
    }


def flush_of(lag: PanelData[list[ShardLag]]) -> PanelData[Flush]:
    """Flush lag over all shards."""
    shards = lag.value
    if shards is None:
        return PanelData(error=lag.error)
    flush = Flush(
        pending=sum(shard.pending for shard in shards),
        is_capped=any(shard.pending >= PENDING_COUNTED for shard in shards),
        oldest_s=max((shard.oldest_s for shard in shards), default=0.0),
        shards=len(shards),
        alone=sum(shard.flusher is None for shard in shards),
    )
    return PanelData(flush)


def chart_of(
    points: Sequence[SeriesPoint], by: str, from_at: datetime, to_at: datetime, *, zone: ZoneInfo
) -> Chart:
    """Views by class over time; missing hours and days count as 0."""
    known = {point.start_at: point for point in points}
    starts = list(_hours(from_at, to_at) if by == "hour" else _days(from_at, to_at, zone))
    if by == "month":
        starts = [at for at in starts if at.astimezone(zone).day == 1]
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
    return Chart(xs=[at.timestamp() for at in starts], lines=lines, unit="", kind="bars")


async def _reads(context: ViewContext) -> str:
    replica = context.house.engines.postgres.replica
    return (await replica.state()).text if replica else ""


async def _total(views: Any, entity: str) -> PanelData[Total]:
    fields = ("total", "today", "unique", "classes", "counters")
    found = await attempt(views.totals, [entity], fields=fields)
    return PanelData(found.value[0] if found.value else None, found.error)


def _hours(from_at: datetime, to_at: datetime) -> Iterator[datetime]:
    at = from_at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    while at <= to_at:
        yield at
        at += timedelta(hours=1)


def _days(from_at: datetime, to_at: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    """Midnights of the deployment's time zone; its days have 23 to 25 hours."""
    day = from_at.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    while day <= to_at:
        yield day.astimezone(UTC)
        day = (day.replace(tzinfo=None) + timedelta(days=1)).replace(tzinfo=zone)


READ: Final = "views:read"
ENTITY: Final = Field("id", "Item")
CHOICES: Final = tuple((name.value, name.value) for name in CLASSES)


async def delete_entity(context: ViewContext, given: dict[str, Any]) -> str:
    """Delete the counts of an item."""
    found = await context.views.delete(given["id"])
    until = f"{found.until_at:%Y-%m-%d %H:%M} UTC"
    gone = pluralize(found.total, f"view of {found.id} is", f"views of {found.id} are")
    return f"{gone} deleted; it is not counted until {until}"


async def preview_delete(context: ViewContext, given: dict[str, Any]) -> str:
    """Number of views that would be deleted."""
    [total] = await context.views.totals([given["id"]])
    known = "an unknown number of views"
    if total.total is not None:
        known = pluralize(total.total, "view")
    return f"{known} of {given['id']} and their series would be deleted."


async def mark(context: ViewContext, given: dict[str, Any]) -> str:
    """Mark a span of an item's time."""
    ends = _moment("to", given["to"]) if given["to"] else None
    begins = _moment("from", given["from"]) if given["from"] else None
    found = await context.views.corrections.mark(
        given["id"], given["name"], from_at=begins, to_at=ends
    )
    return f"{given['id']} is marked as {found.name} from {found.from_at:%Y-%m-%d %H:%M} UTC"


def mark_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    return {
        "name": given["name"],
        "from_at": given["from"] or None,
        "to_at": given["to"] or None,
    }


def reclassify_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    return {
        "id": given["id"],
        "from_at": given["from"],
        "to_at": given["to"],
        "source": given["source"],
        "target": given["target"],
    }


async def verify(context: ViewContext, given: dict[str, Any]) -> str:  # noqa: ARG001 - signature of actions
    """Check that totals equal the sums of their hours."""
    found = await context.views.analytics.verify()
    all_of_it = f"{found.entities:,} totals of {found.views:,} views"
    if not found.differences:
        return f"{all_of_it}: all match their hourly counts"
    first = found.differences[0]
    return (
        f"{all_of_it}: {len(found.differences)} differ from their hourly counts, such as {first.id}"
        f" ({first.traffic}): total {first.total:,}, hours {first.hours:,}"
    )


def _moment(name: str, text: str) -> datetime:
    return parse_as(parse_moment, name, text, InvalidSpan)


ACTIONS: Final = (
    Action(
        name="views-verify",
        title="Verify totals",
        what="Compares every total with the sum of its hourly counts in one snapshot. Changes"
        " nothing.",
        command="headrace views verify",
        http="GET /v1/views/verify",
        run=verify,
    ),
    Action(
        name="views-delete",
        title="Delete views",
        what="Deletes totals and series of {id}. It is not counted for 30 days. This cannot be"
        " undone.",
        command="headrace views rm {id}",
        http="DELETE /v1/views/items/{id}",
        run=delete_entity,
        fields=(ENTITY,),
        is_danger=True,
        preview=preview_delete,
    ),
    Action(
        name="views-mark",
        title="Mark a span",
        what="Shows a mark beside the series of {id}, such as promoted or paid. The same name and"
        " begin changes the end.",
        command="headrace views mark {id} {name} [--from {from}] [--to {to}]",
        http="POST /v1/views/items/{id}/marks",
        run=mark,
        body=mark_body,
        fields=(
            ENTITY,
            Field("name", "Mark", hint="a-z 0-9 _, such as promoted."),
            Field("from", "From", hint="In UTC; empty: now.", required=False),
            Field("to", "To", hint="In UTC; empty: not ended.", required=False),
        ),
    ),
    Action(
        name="views-reclassify",
        title="Reclassify views",
        what="Moves views of {id} in full hours from one traffic class to another, in a job.",
        command="headrace views reclassify {id} --from {from} --to {to} --source {source}"
        " --target {target}",
        http="POST /v1/views/reclassify",
        run=lambda context, given: context.views.corrections.reclassify(
            given["id"],
            from_at=_moment("from", given["from"]),
            to_at=_moment("to", given["to"]),
            source=given["source"],
            target=given["target"],
        ),
        done="job {found} moves the views",
        body=reclassify_body,
        fields=(
            ENTITY,
            Field("from", "From", hint="A full hour in UTC, such as 2026-11-21T10:00Z."),
            Field("to", "To", hint="A full hour in UTC, exclusive."),
            Field("source", "From class", kind="select", options=CHOICES),
            Field("target", "To class", kind="select", options=CHOICES),
        ),
    ),
)


ROOM: Final = Room(
    name="views",
    title="Views",
    key="v",
    scope=READ,
    screens=(
        Screen("/views", "Top", "views/top.html", view_top, tab="Top"),
        Screen("/views/entity", "Views of an item", "views/entity.html", view_entity, tab="Item"),
        Screen("/views/lag", "Flush", "views/lag.html", view_lag, tab="Flush"),
    ),
    actions=ACTIONS,
)
