"""The minute history of every room: which series are kept, and how they are read.

One process per host (`web/recorder.py`) writes a row per minute: for each series of SERIES what
its counters grew by, how many values fell into each bucket of its histogram, or the greatest value
of its gauge. Minutes are kept for MINUTES_KEPT_S and hours for HOURS_KEPT_S.

A read chooses the step by its span, so an answer has at most POINTS_MAX points. For a step of one
minute, what was counted in it is returned, also if only a part of it was recorded. For a longer
step it is the mean per recorded minute, so a step that only half of was recorded is no dip. A step
without a row is a gap. Percentiles come from the summed buckets of all hosts, so they are those of
the whole; inside a bucket values are assumed to be spread evenly over the logarithm.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.errors import InvalidInput
from headrace.web.joined_outages import EngineOutage, join_outages, read_outages
from headrace.web.marks import CAUSES, KINDS, Mark, of_deaths, of_outage

SQL: Final = load_queries("headrace.web")
MINUTES_KEPT_S: Final = 48 * 3_600.0
HOURS_KEPT_S: Final = 30 * 86_400.0
STEPS: Final = ((2 * 3_600, 60), (8 * 3_600, 120), (int(MINUTES_KEPT_S), 600))
"""The longest span of each step in seconds; longer ones are read by hour."""
MINUTE_S: Final = 60
HOUR_S: Final = 3_600
POINTS_MAX: Final = 721
MARKS_MAX: Final = 200
SERIES_MAX: Final = 20
USUAL_SPAN: Final = timedelta(hours=1)
ALL: Final = "all"
"""The key of a series without a label."""
BY: Final = ("key", "host", "center")
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
DOWN: Final = "engines_down"
STARTS: Final = "role_starts"
SLOTS: Final = "slots_ended"
PROCESSES: Final = "media_deaths"
RESTARTS: Final = "role_restarts"
"""The starts among STARTS that followed a death or happened beside older roles."""


@dataclass(frozen=True, slots=True)
class Series:
    """A kept series: the metric it is made of, and the label whose values are its keys.

    `kind`: `count` keeps the growth of a counter, `time` the buckets of a histogram of seconds, and
    `peak` the greatest value of a gauge.
    """

    name: str
    metric: str
    unit: str
    kind: str = "count"
    label: str = ""


SERIES: Final[Mapping[str, Series]] = {
    one.name: one
    for one in (
        Series("jobs_ended", "jobs_finished_total", "jobs", label="outcome"),
        Series("jobs_wait", "jobs_wait_seconds", "s", "time"),
        Series("jobs_run", "jobs_run_seconds", "s", "time"),
        Series("fetch_photos", "fetch_photos_total", "photos", label="outcome"),
        Series("fetch_classes", "fetch_attempts_total", "requests", label="timeout_class"),
        Series("fetch_first_byte", "fetch_first_byte_seconds", "s", "time"),
        Series("fetch_bytes", "fetch_received_bytes_total", "bytes"),
        Series("views_hits", "views_hits_total", "hits", label="outcome"),
        Series("views_flushed", "views_flushed_total", "views"),
        Series("views_lag", "views_flush_lag_seconds", "s", "peak"),
        Series("feed_posts", "feed_posts_total", "posts"),
        Series("feed_pages", "feed_pages_total", "pages", label="source"),
        Series("feed_page_time", "feed_page_seconds", "s", "time"),
        Series("feed_lag", "feed_sweep_lag_seconds", "s", "peak"),
        Series("media_requests", "media_requests_total", "requests", label="status"),
        Series("media_blocks", "media_blocks_total", "blocks", label="outcome"),
        Series("media_bytes", "media_bytes_total", "bytes", label="source"),
        Series("media_ttfb", "media_ttfb_seconds", "s", "time"),
        Series("media_reads", "media_fills_total", "blocks", label="outcome"),
        Series("media_connections", "media_connections", "clients", "peak"),
        Series(SLOTS, "agent_slots_ended_total", "slots", label="how"),
        Series(PROCESSES, "media_child_deaths_total", "processes", label="child"),
        Series("http_requests", "web_requests_total", "requests", label="status"),
        Series("http_time", "web_request_seconds", "s", "time"),
        Series(DOWN, "", "s", label="engine"),
        Series(STARTS, "", "starts", label="role"),
        Series(RESTARTS, "", "starts", label="role"),
    )
}


class InvalidSpan(InvalidInput):
    """The span of a history, its series or its parts are not valid."""

    code = "web.invalid_history"


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a key of the series, a part, or a percentile; null where nothing was recorded."""

    label: str
    values: list[float | None]


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a histogram for each step: values up to each bound, above the one before it.

    The last count is of values over the last bound.
    """

    bounds_s: list[float]
    counts: list[list[float] | None]


class SeriesHistory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One series. Lines are per minute for counts, else in the unit.

    In steps of one minute, counts are what was counted in it; in longer ones, means per minute.
    """

    series: str
    kind: str
    unit: str
    lines: list[HistoryLine]
    buckets: Buckets | None = None


class HistoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Series over time, in equal steps from `from_at` on."""

    from_at: datetime
    to_at: datetime
    step_s: int
    is_recorded: list[bool]
    """Whether any host recorded the step."""
    hosts: list[str]
    centers: list[str]
    """Data centers of the hosts, if they are set."""
    series: list[SeriesHistory]


@dataclass(frozen=True, slots=True)
class Span:
    """A span of whole steps."""

    from_at: datetime
    to_at: datetime
    step_s: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int((self.to_at - self.from_at).total_seconds()) // self.step_s

    def index(self, at: datetime) -> int:
        """The step that contains `at`."""
        return int((at - self.from_at).total_seconds()) // self.step_s

    def start_of(self, index: int) -> datetime:
        """When a step begins."""
        return self.from_at + timedelta(seconds=index * self.step_s)


def span_of(from_at: datetime | None, to_at: datetime | None, *, now_at: datetime) -> Span:
    """The span to read, in steps that fit its length. Raises: InvalidSpan."""
    until_at = to_at or now_at
    since_at = from_at or until_at - USUAL_SPAN
    if since_at.tzinfo is None or until_at.tzinfo is None:
        raise InvalidSpan("from and to are moments with a time zone such as 2026-11-21T10:00:00Z")
    length_s = (until_at - since_at).total_seconds()
    if not 60 <= length_s <= HOURS_KEPT_S:
        raise InvalidSpan(
            f"history from {since_at.isoformat()} to {until_at.isoformat()}: request a span from"
            " one minute to 30 days that begins before it ends"
        )
    is_old = (now_at - since_at).total_seconds() > MINUTES_KEPT_S
    step_s = HOUR_S if is_old else next((s for most, s in STEPS if length_s <= most), HOUR_S)
    first = math.floor(since_at.timestamp() / step_s) * step_s
    last = math.ceil(until_at.timestamp() / step_s) * step_s
    return Span(datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(last, UTC), step_s)


class History:
    """Reads the history of all hosts."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def begin(self) -> datetime | None:
        """Since when there is history. Raises: PostgresDown."""
        found: datetime | None = await self._postgres.value(SQL.history_begin)
        return found

    async def read(
        self,
        series: Sequence[str],
        *,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
        by: str = "key",
    ) -> HistoryAnswer:
        """Up to 20 series in a span of up to 30 days, by default the last hour.

        Counts are those of each minute, or the mean per recorded minute of longer steps.

        `by="host"` and `by="center"` return a line per host or data center: the sum over the keys,
        or the p99 of times. Minutes are kept for 48 hours; a span that begins before them is read
        by hour. Raises: InvalidSpan.
        """
        names = list(dict.fromkeys(series))
        unknown = [name for name in names if name not in SERIES]
        if unknown or not 0 < len(names) <= SERIES_MAX:
            raise InvalidSpan(
                f"series {', '.join(unknown)[:80] or len(names)}: name 1 to {SERIES_MAX} of"
                f" {', '.join(SERIES)}"
            )
        if by not in BY:
            raise InvalidSpan(f"by: expected one of {', '.join(BY)}, got {by[:40]!r}")
        span = span_of(from_at, to_at, now_at=datetime.now(UTC))
        table = await self._table(span, names, by)
        return HistoryAnswer(
            from_at=span.from_at,
            to_at=span.to_at,
            step_s=span.step_s,
            is_recorded=[seconds > 0 for seconds in table.recorded_s()],
            hosts=sorted(table.hosts),
            centers=sorted(table.centers - {""}),
            series=[table.series(SERIES[name], is_by_part=by != "key") for name in names],
        )

    async def marks(
        self, *, from_at: datetime | None = None, to_at: datetime | None = None, kind: str = ""
    ) -> list[Mark]:
        """Starts of roles, changes of their versions, deaths and outages, oldest first.

        The span is that of `read`. With `kind`, only those; the newest 200. Raises: InvalidSpan.
        """
        if kind and kind not in KINDS:
            raise InvalidSpan(f"kind: expected one of {', '.join(KINDS)}, got {kind[:40]!r}")
        span = span_of(from_at, to_at, now_at=datetime.now(UTC))
        table = await self._table(span, [STARTS, RESTARTS, SLOTS, PROCESSES], "host")
        outages = await read_outages(self._postgres, from_at=span.from_at, to_at=span.to_at)
        found = [
            *_starts(span, table.values[STARTS], table.values[RESTARTS]),
            *(of_outage(one) for one in join_outages(outages, table.witness_of(outages))),
            *_deaths(span, table.values),
        ]
        shown = [mark for mark in found if kind in ("", mark.kind)]
        return sorted(shown, key=lambda mark: mark.order)[-MARKS_MAX:]

    async def _table(self, span: Span, names: list[str], by: str) -> _Table:
        given = {
            "is_hourly": span.step_s >= HOUR_S,
            "from_at": span.from_at,
            "to_at": span.to_at,
            "step_s": float(span.step_s),
        }
        table = _Table(span)
        for row in await self._postgres.all(SQL.recorded_seconds, **given):
            steps = table.seconds["" if by == "key" else row[by]]
            index = span.index(row["at"])
            # Hosts record at the same time, so the one that recorded most is used.
            steps[index] = max(steps[index], row["seconds"])
            table.hosts.add(row["host"])
            table.centers.add(row["center"])
        for row in await self._postgres.all(SQL.read_history, series=names, by=by, **given):
            table.values[row["series"]][row["part"]][row["key"]][span.index(row["at"])] = row[
                "value"
            ]
        return table


Steps = list[float]
Parts = Mapping[str, Mapping[str, Steps]]
"""Values of a series by part and key."""


class _Table:
    """The values of a span as read, 0 where there are none."""

    def __init__(self, span: Span) -> None:
        def steps() -> Steps:
            return [0.0] * span.steps

        self._span = span
        self.hosts: set[str] = set()
        self.centers: set[str] = set()
        self.seconds: defaultdict[str, Steps] = defaultdict(steps)
        """Recorded time of each step by part."""
        self.values: defaultdict[str, defaultdict[str, defaultdict[str, Steps]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(steps))
        )

    def recorded_s(self) -> Steps:
        """Recorded time of each step, of the part that recorded most."""
        parts = self.seconds.values()
        return [max((part[n] for part in parts), default=0.0) for n in range(self._span.steps)]

    def witness_of(self, outages: Sequence[EngineOutage]) -> Callable[[EngineOutage], bool]:
        """Whether a host ran during an outage and recorded none of its engine; parts are hosts.

        A host that was lost with the engine lacks the time of the outage. Steps that nobody has
        recorded yet decide nothing.
        """
        recorded_s = self.recorded_s()

        def is_reached(outage: EngineOutage) -> bool:
            first = max(0, self._span.index(outage.began_at))
            last = min(self._span.steps - 1, self._span.index(outage.until_at))
            steps = range(first, last + 1)
            missed = {
                one.host
                for one in outages
                if one.engine == outage.engine and one.overlap(outage) > timedelta(0)
            }
            lasted_s = (outage.until_at - outage.began_at).total_seconds()
            return any(
                sum(seconds[n] for n in steps) > 0
                and sum(recorded_s[n] - seconds[n] for n in steps) < lasted_s / 2
                for host, seconds in self.seconds.items()
                if host not in missed
            )

        return is_reached

    def series(self, series: Series, *, is_by_part: bool) -> SeriesHistory:
        """One series, with a line per key or per part."""
        parts, steps = self.values[series.name], self._span.steps
        lines: dict[str, list[float | None]]
        buckets = None
        if series.kind == "time":
            if is_by_part:
                lines = {
                    part: _percentiles(*_buckets(parts[part], steps), PERCENTILES["p99"])
                    for part in sorted(parts)
                }
            else:
                bounds_s, counts = _buckets(parts[""], steps)
                lines = {
                    label: _percentiles(bounds_s, counts, share)
                    for label, share in PERCENTILES.items()
                }
                seen = [one if s else None for one, s in zip(counts, self.seconds[""], strict=True)]
                buckets = Buckets(bounds_s=bounds_s, counts=seen)
        elif is_by_part:
            lines = {part: self._line(series, part, parts[part].values()) for part in self.seconds}
        else:
            lines = {
                key: self._line(series, "", [steps]) for key, steps in sorted(parts[""].items())
            }
            lines = lines or {ALL: self._line(series, "", [])}
        found = [HistoryLine(label=label, values=values) for label, values in lines.items()]
        unit = f"{series.unit}/min" if series.kind == "count" else series.unit
        return SeriesHistory(
            series=series.name, kind=series.kind, unit=unit, lines=found, buckets=buckets
        )

    def _line(self, series: Series, part: str, keys: Iterable[Steps]) -> list[float | None]:
        combine = max if series.kind == "peak" else sum
        whole = [combine(found) for found in zip(*keys, strict=True)] or [0.0] * self._span.steps
        found = zip(whole, self.seconds[part], strict=True)
        if series.kind == "count" and self._span.step_s == MINUTE_S:
            return [round(value, 3) if s else None for value, s in found]
        # A step with less than one recorded minute is not extrapolated.
        return [
            (_short(value if series.kind == "peak" else value / max(1.0, s / MINUTE_S)))
            if s
            else None
            for value, s in found
        ]


def _short(value: float) -> float:
    """The value with four digits, which is what a chart can show."""
    return float(f"{value:.4g}")


def _buckets(keys: Mapping[str, Steps], steps_count: int) -> tuple[list[float], list[list[float]]]:
    """The bounds of a histogram, and its counts by step; the last counts are over all bounds."""
    by_bound = {float(bound): steps for bound, steps in keys.items()}
    over = by_bound.pop(math.inf, [0.0] * steps_count)
    bounds_s = sorted(by_bound)
    counts = [[by_bound[bound][n] for bound in bounds_s] for n in range(steps_count)]
    return bounds_s, [[*row, over[n]] for n, row in enumerate(counts)]


def _percentiles(
    bounds_s: Sequence[float], counts: Sequence[Sequence[float]], share: float
) -> list[float | None]:
    return [percentile_s(bounds_s, row, share) for row in counts]


def percentile_s(bounds_s: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The time that `share` of the values do not exceed; None without values.

    Inside a bucket values are spread evenly over the logarithm, so the error is less than the ratio
    of its bounds. Values over the last bound count as that bound.
    """
    wanted = sum(counts) * share
    if wanted <= 0:
        return None
    below = 0.0
    for index, bound_s in enumerate(bounds_s):
        if below + counts[index] >= wanted and counts[index]:
            inside = (wanted - below) / counts[index]
            if not index:
                return _short(bound_s * inside)
            return _short(bounds_s[index - 1] * (bound_s / bounds_s[index - 1]) ** inside)
        below += counts[index]
    return bounds_s[-1] if bounds_s else None


def _starts(span: Span, parts: Parts, restarts: Parts) -> Iterable[Mark]:
    """Marks for each host and step in which roles started, one for each kind.

    A role that started with its host and died in the same step is in two of them.
    """
    for host, keys in parts.items():
        again_of = restarts.get(host, {})
        version_of: dict[str, str] = {}
        for index in range(span.steps):
            found: dict[str, dict[str, Counter[str]]] = {"start": {}, "deploy": {}, "restart": {}}
            before = dict(version_of)
            for key, steps in sorted(keys.items()):
                if not (starts := round(steps[index])):
                    continue
                role, _, version = key.partition(" ")
                version_of[role] = version
                again = round(again_of[key][index]) if key in again_of else 0
                is_new = before.get(role, version) != version
                counts = {"deploy": starts} if is_new else {"start": starts - again}
                for kind, count in {"restart": 0 if is_new else again, **counts}.items():
                    if count:
                        found[kind].setdefault(version, Counter())[role] += count
            for kind, by_version in found.items():
                if by_version:
                    yield _of_starts(span, index, by_version, host=host, kind=kind)


def _of_starts(
    span: Span, index: int, by_version: Mapping[str, Counter[str]], *, host: str, kind: str
) -> Mark:
    """The mark of the starts of one kind in a step, counted by version and role."""
    is_again = kind == "restart"
    count_of = sum(by_version.values(), Counter[str]())
    roles = sorted(count_of)
    named = [
        f"{role} ({count_of[role]} times)" if is_again and count_of[role] > 1 else role
        for role in roles
    ]
    verb = "started again" if is_again else "started"
    return Mark(
        at=span.start_of(index),
        within_s=span.step_s,
        kind=kind,
        text=f"{', '.join(named)} {verb} on {host}, version {', '.join(sorted(by_version))}",
        host=host,
        role=roles[0] if len(roles) == 1 else "",
        count=count_of.total() if is_again else 0,
        causes={role: count_of[role] for role in roles} if is_again else {},
    )


def _deaths(span: Span, values: Mapping[str, Parts]) -> Iterable[Mark]:
    """A mark for each host and step in which slots or processes of a media node died."""
    for series, role in ((SLOTS, "agent"), (PROCESSES, "media")):
        for host, keys in values[series].items():
            known = {how: text for how, text in CAUSES.items() if how in keys}
            names = known if series == SLOTS else {child: child for child in sorted(keys)}
            for index in range(span.steps):
                counts = {text: round(keys[key][index]) for key, text in names.items()}
                causes = {text: count for text, count in counts.items() if count}
                if causes:
                    yield of_deaths(
                        span.start_of(index), span.step_s, host=host, role=role, causes=causes
                    )
