"""Boards of charts: what a room did over time, from the history and the minutes of queues.

A board is the charts of one page with a common time axis. Its range is in the URL: `range=6h`, or
`from` and `to` after a selection. `by=host` and `by=center` draw a line per host or data center.
Marks are starts of roles, outages of engines, alerts and changes of the slot plan.

A board changes once a minute, and the sampler renders it every few seconds, so the console keeps
each until the next minute is recorded.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from msgspec import structs

from headrace.console.chart_lines import busiest, colors_of, grouped, largest_queues
from headrace.console.chart_marks import (
    MARK_NAMES,
    OF_JOBS,
    BoardMark,
    alert_marks,
    is_in_charts,
    plan_marks,
)
from headrace.console.model import QueryInvalid
from headrace.console.views import Chart, Line, PanelData, ViewContext, attempt
from headrace.jobs.fleet.state import QueueStep
from headrace.web.history import ALL, InvalidSpan, SeriesHistory, Span, span_of

RANGES: Final = {"1h": 3_600, "6h": 21_600, "24h": 86_400, "7d": 604_800}
RECORDED_AFTER_S: Final = 15
"""A minute is in the history this long after its end."""
BOARDS_KEPT: Final = 128
DECISIONS_READ: Final = 300
MARKS_SHOWN: Final = 60
MINUTE_S: Final = 60
STEPS_MIN: Final = 15
"""Steps that a range shows at least, also of a site that is younger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The charts of a page, by name and label, with one time axis."""

    range: str
    """A key of RANGES; empty for a selection."""
    span: Span
    by: str
    parts: Sequence[str]
    """Values of `by` that make sense: with several hosts or data centers."""
    charts: Sequence[tuple[str, str, Chart]] = ()
    marks: Sequence[BoardMark] = ()
    error: str = ""
    is_empty: bool = False
    first_at: datetime | None = None
    """When the first minute appears, if there is no history yet."""

    @property
    def ranges(self) -> Sequence[str]:
        """The ranges to choose from."""
        return tuple(RANGES)

    @property
    def legend(self) -> Sequence[tuple[str, str]]:
        """Kinds of the marks in the charts, each with its name for people."""
        found = {mark.kind for mark in self.marks}
        return [(kind, text) for kind, text in MARK_NAMES.items() if kind in found]

    @property
    def events(self) -> str:
        """The number of the marks, which are the newest ones if there are more."""
        count = len(self.marks)
        return f"the newest {count}" if count == MARKS_SHOWN else str(count)

    @property
    def shaded(self) -> Sequence[str]:
        """Names of the kinds of which a mark lasted, so that its time is shaded."""
        found = {mark.kind for mark in self.marks if mark.until_at is not None}
        return [text for kind, text in MARK_NAMES.items() if kind in found]

    def marks_document(self) -> list[dict[str, Any]]:
        """The marks, as the page's script draws them."""
        return [
            {
                "at": mark.at.timestamp(),
                "until": mark.until_at.timestamp() if mark.until_at else None,
                "kind": mark.kind,
                "name": mark.name,
                "text": mark.text,
            }
            for mark in self.marks
        ]


class Boards:
    """Boards of all pages of one console, kept until the next minute is recorded."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[int, asyncio.Task[Board]]] = OrderedDict()

    async def get(self, key: tuple[Any, ...], load: Callable[[], Awaitable[Board]]) -> Board:
        """The board of `key`, loaded at most once a minute. One with an error is not kept."""
        minute = int((datetime.now(UTC).timestamp() - RECORDED_AFTER_S) // MINUTE_S)
        kept = self._kept.get(key)
        if kept is None or kept[0] != minute:
            kept = self._kept[key] = minute, asyncio.ensure_future(load())
            self._kept.move_to_end(key)
            if len(self._kept) > BOARDS_KEPT:
                self._kept.popitem(last=False)
        # A viewer that leaves must not cancel the load of another.
        board = await asyncio.shield(kept[1])
        if board.error and self._kept.get(key) is kept:
            del self._kept[key]
        return board


async def board_of(context: ViewContext, room: str) -> Board:
    """The board of a room for the range in the URL. Raises: QueryInvalid."""
    range_, span = span_in(context)
    by = context.query.choice("by", ("key", "host", "center"), "key")
    has_jobs = context.may("jobs:read")
    key = (room, range_ or (span.from_at, span.to_at), by, has_jobs)

    async def load() -> Board:
        board = Board(range=range_, span=span, by=by, parts=())
        loaded = _Loader(context, board, room, has_jobs=has_jobs)
        found = await attempt(loaded.load)
        return found.value or _failed(board, found)

    return await context.boards.get(key, load)


def span_in(context: ViewContext) -> tuple[str, Span]:
    """The name of the range in the URL, if any, and its span. Raises: QueryInvalid."""
    from_at, to_at = context.query.moment("from"), context.query.moment("to")
    recorded_at = context.now_at - timedelta(seconds=RECORDED_AFTER_S)
    if from_at is None and to_at is None:
        range_ = context.query.choice("range", tuple(RANGES), "1h")
        this = recorded_at.replace(second=0, microsecond=0)
        return range_, span_of(this - timedelta(seconds=RANGES[range_]), this, now_at=this)
    if from_at is None or to_at is None:
        raise QueryInvalid("from and to: expected both, or neither")
    try:
        return "", span_of(from_at, min(to_at, recorded_at), now_at=recorded_at)
    except InvalidSpan as error:
        raise QueryInvalid(error.text) from None


def _failed(board: Board, found: PanelData[Any]) -> Board:
    return Board(
        range=board.range, span=board.span, by=board.by, parts=(), error=found.error or "no data"
    )


@dataclass(frozen=True, slots=True)
class Spec:
    """A chart of a series: `groups` joins its keys to lines, with the tone of each."""

    series: str
    label: str
    kind: str = "stack"
    unit: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Label of the line by prefix of the key."""
    tones: Mapping[str, str] = field(default_factory=dict)
    factor: float = 1.0
    brush: str = ""
    """The list that a selection opens, below /console, and its name after `|`."""
    keys: Sequence[str] = ()
    """The keys to show; empty: all. Parts are sums of all keys, so they have no such chart."""


BYTES_PER_S: Final = 1 / 60
HTTP_TONES: Final = {"4xx": "warn", "5xx": "bad"}
HTTP: Final = (
    Spec("http_requests", "Requests to the API and the console",
         groups={c: c for c in ("2xx", "3xx", "4xx", "5xx")}, tones=HTTP_TONES),
    Spec("http_time", "Latency of the API and the console", "line"),
)  # fmt: skip
STATUS_GROUPS: Final = {"2": "2xx", "3": "3xx", "4": "4xx", "5": "5xx"}
SPECS: Final[Mapping[str, Sequence[Spec]]] = {
    "overview": HTTP,
    "jobs": (
        # The first job of each lease is measured.
        Spec("jobs_wait", "Wait from due to leased", "line"),
        Spec("jobs_run", "Run time of handler calls", "line"),
        Spec("jobs_run", "Run time of each handler call", "heat"),
    ),
    "fetch": (
        Spec(
            "fetch_photos",
            "Photos by outcome",
            groups={"stored": "stored", "unchanged": "unchanged", "known": "known",
                    "refused": "refused", "failed": "failed"},
            tones={"failed": "bad", "refused": "warn"},
            brush="/fetch/photos|photos",
        ),
        Spec("fetch_classes", "Photo requests by timeout class"),
        Spec("fetch_bytes", "Bytes of photos received", "line", "bytes/s", factor=BYTES_PER_S),
        Spec("fetch_first_byte", "Time to first byte of photo requests", "line"),
        Spec("fetch_first_byte", "Time to first byte of each photo request", "heat"),
    ),
    "views": (
        # Every hit passes a flusher, whichever process counted it. Only roles record refused hits.
        Spec("views_flushed", "Views written to PostgreSQL"),
        Spec(
            "views_hits",
            "Hits refused by the API and jobs",
            keys=("refused",),
            tones={"refused": "bad"},
        ),
        Spec("views_lag", "Oldest hit not yet in PostgreSQL", "line"),
    ),
    "feed": (
        Spec("feed_pages", "Pages by source, API and jobs", tones={"postgres": "warn"}),
        Spec("feed_posts", "New posts, API and jobs"),
        Spec("feed_page_time", "Page latency", "line"),
        Spec("feed_page_time", "Latency of each page", "heat"),
        Spec("feed_lag", "Oldest unconfirmed change", "line"),
    ),
    "media": (
        Spec("media_requests", "Requests by status", groups=STATUS_GROUPS, tones=HTTP_TONES),
        Spec("media_blocks", "Blocks by cache result", tones={"miss": "warn"}),
        Spec("media_bytes", "Bytes sent by source", "stack", "bytes/s", factor=BYTES_PER_S),
        Spec("media_ttfb", "Time to first byte", "line"),
        Spec("media_ttfb", "Time to first byte of each request", "heat"),
        Spec("media_reads", "Blocks read from the object store", tones={"failed": "bad"}),
    ),
}  # fmt: skip
OF_CACHES: Final = ("media_blocks", "media_reads")
ENDS: Final = (
    ("done", "done", ""), ("failed", "failed", "bad"), ("cancelled", "cancelled", "muted"),
    ("retried", "run again later", "warn"), ("lost", "cut off, run again", ""),
)  # fmt: skip
"""Counts of a step, with the label and tone of their lines."""


class _Loader:
    """Reads and draws one board."""

    def __init__(self, context: ViewContext, board: Board, room: str, *, has_jobs: bool) -> None:
        self._context, self._board, self._room = context, board, room
        self._span, self._by = board.span, board.by
        self._has_jobs = has_jobs

    async def load(self) -> Board:
        """The board with its charts."""
        span, specs = self._span, SPECS[self._room]
        names = list(dict.fromkeys(spec.series for spec in specs))
        given = {"from_at": span.from_at, "to_at": span.to_at}
        found, marks, steps = await asyncio.gather(
            self._context.history.read(names, **given, by=self._by),
            self._marks(),
            self._steps(),
        )
        by_name = {one.series: one for one in found.series}
        charts = []
        if steps is not None:
            charts = self._job_charts(steps, self._unknown_steps(steps, found.is_recorded, marks))
        for spec in specs:
            chart = self._chart(spec, by_name[spec.series])
            if chart is not None and not self._is_of_no_cache(spec, chart):
                charts.append((f"{spec.series}-{spec.kind}", spec.label, chart))
        begin = await self._context.history.begin()
        cut = self._steps_before_begin(begin, steps or [])
        parts = [
            name
            for name, values in (("host", found.hosts), ("center", found.centers))
            if len(values) > 1
        ]
        return Board(
            range=self._board.range,
            span=replace(span, from_at=span.from_at + cut * timedelta(seconds=span.step_s)),
            by=self._by,
            parts=parts,
            charts=[(name, label, chart.since(cut)) for name, label, chart in charts],
            marks=marks,
            is_empty=not any(found.is_recorded) and not steps,
            first_at=self._next_minute_at() if begin is None or begin >= span.to_at else None,
        )

    def _is_of_no_cache(self, spec: Spec, chart: Chart) -> bool:
        """Whether no node has a cache, so that a chart of caches would always be empty."""
        return spec.series in OF_CACHES and chart.is_quiet and not self._context.media.config.disks

    def _next_minute_at(self) -> datetime:
        """When the minute that passes now is in the history."""
        after = timedelta(seconds=RECORDED_AFTER_S)
        ended_at = (self._context.now_at - after).replace(second=0, microsecond=0)
        return ended_at + timedelta(seconds=MINUTE_S) + after

    def _steps_before_begin(self, begin: datetime | None, steps: Sequence[QueueStep]) -> int:
        """Steps to leave out, so that a range does not begin before a young site's history."""
        if not self._board.range or begin is None:
            return 0
        first = min([begin, *(step.at for step in steps)])
        return max(0, min(self._span.index(first) - 1, self._span.steps - STEPS_MIN))

    async def _steps(self) -> list[QueueStep] | None:
        """Counts of queues, on boards that show them to callers who may see them."""
        if self._room not in OF_JOBS or not self._has_jobs:
            return None
        span = self._span
        return await self._context.jobs.fleet.history(
            from_at=span.from_at, to_at=span.to_at, step_s=span.step_s
        )

    async def _marks(self) -> list[BoardMark]:
        span = self._span
        found = [
            BoardMark(**structs.asdict(one))
            for one in await self._context.history.marks(from_at=span.from_at, to_at=span.to_at)
            if is_in_charts(one, self._room)
        ]
        if self._has_jobs:
            fleet = self._context.jobs.fleet
            alerts, decisions = await asyncio.gather(
                fleet.alerts(), fleet.decisions(decisions_max=DECISIONS_READ)
            )
            found += alert_marks(alerts, self._room)
            if self._room in OF_JOBS:
                found += plan_marks(span, decisions)
        inside = [
            mark
            for mark in found
            if mark.at < span.to_at and (mark.until_at or mark.at) >= span.from_at
        ]
        return sorted(inside, key=lambda mark: mark.order)[-MARKS_SHOWN:]

    def _unknown_steps(
        self, steps: Sequence[QueueStep], is_recorded: Sequence[bool], marks: Sequence[BoardMark]
    ) -> set[int]:
        """Steps without counts that no host recorded, or that PostgreSQL was down throughout."""
        span = self._span
        step = timedelta(seconds=span.step_s)
        down = [(one.at, one.until_at) for one in marks if "postgres" in one.engines]

        def is_down(start_at: datetime) -> bool:
            return any(at <= start_at and until and until >= start_at + step for at, until in down)

        counted = {span.index(one.at) for one in steps}
        return {
            n
            for n in range(span.steps)
            if n not in counted and (not is_recorded[n] or is_down(span.start_of(n)))
        }

    def _job_charts(
        self, steps: Sequence[QueueStep], unknown: set[int]
    ) -> list[tuple[str, str, Chart]]:
        per_min = [MINUTE_S / seconds for seconds in self._elapsed_s()]

        def line(label: str, tone: str, rows: Iterable[tuple[QueueStep, float]]) -> Line:
            values = [0.0] * self._span.steps
            for step, value in rows:
                values[self._span.index(step.at)] += value
            return Line(label, [None if n in unknown else v for n, v in enumerate(values)], tone)

        def rate(label: str, tone: str, rows: Iterable[tuple[QueueStep, float]]) -> Line:
            found = line(label, tone, rows)
            scaled = zip(found.values, per_min, strict=True)
            return Line(label, [_scaled(value, by, is_rate=True) for value, by in scaled], tone)

        ends = [
            rate(label, tone, ((step, getattr(step, name)) for step in steps))
            for name, label, tone in ENDS
        ]
        shown = [one for index, one in enumerate(ends) if index < 2 or any(one.values)]
        queues = defaultdict[str, list[QueueStep]](list)
        for step in steps:
            queues[step.queue].append(step)
        by_queue = largest_queues(
            rate(queue, "", ((s, s.done + s.failed + s.cancelled) for s in some))
            for queue, some in queues.items()
        )
        waiting = largest_queues(
            line(queue, "", ((s, s.ready) for s in some)) for queue, some in queues.items()
        )
        colors = colors_of([[one.label for one in chart] for chart in (by_queue, waiting)])
        by_queue, waiting = (
            [replace(one, color=colors.get(one.label, 0)) for one in chart]
            for chart in (by_queue, waiting)
        )
        ended = self._stack(shown, "runs/min", "/jobs/jobs?state=failed|failed jobs")
        charts = [("jobs-ended", "Runs of jobs by outcome", ended)]
        if self._room == "jobs":
            charts.append(
                ("jobs-queues", "Finished jobs by queue", self._stack(by_queue, "jobs/min"))
            )
            charts.append(("jobs-waiting", "Waiting jobs by queue", self._stack(waiting, "jobs")))
        return charts

    def _elapsed_s(self) -> list[float]:
        """Seconds of each step that have passed."""
        span, now_at = self._span, self._context.now_at
        passed = [(now_at - span.start_of(n)).total_seconds() for n in range(span.steps)]
        return [max(float(MINUTE_S), min(float(span.step_s), one)) for one in passed]

    def _stack(self, lines: Sequence[Line], unit: str, brush: str = "") -> Chart:
        return Chart(
            xs=self._xs(), lines=lines or [Line("all", [0.0] * self._span.steps)], unit=unit,
            kind="stack", step_s=self._span.step_s, brush=brush,
        )  # fmt: skip

    def _xs(self) -> list[float]:
        return [self._span.start_of(n).timestamp() for n in range(self._span.steps)]

    def _chart(self, spec: Spec, found: SeriesHistory) -> Chart | None:
        """The chart of a series; None for parts of a heat map or of some keys."""
        unit = spec.unit or found.unit
        if spec.keys and self._by != "key":
            return None
        if spec.kind == "heat":
            if found.buckets is None:
                return None
            return Chart(
                xs=self._xs(),
                lines=[],
                unit=unit,
                kind="heat",
                step_s=self._span.step_s,
                bounds_s=found.buckets.bounds_s,
                counts=found.buckets.counts,
            )
        whole = "highest" if found.kind == "peak" else "total"
        lines = [
            Line(whole if one.label == ALL else one.label, one.values)
            for one in found.lines
            if not spec.keys or one.label in spec.keys
        ]
        if self._by == "key":
            lines = grouped(lines, spec.groups, spec.tones)
        if found.kind == "time" and self._by == "key":
            lines = lines[::-1]
        is_rate = found.kind == "count" and spec.factor == 1
        lines = [
            Line(
                one.label, [_scaled(v, spec.factor, is_rate=is_rate) for v in one.values], one.tone
            )
            for one in busiest(lines)
        ]
        kind = "line" if found.kind != "count" else spec.kind
        return Chart(
            xs=self._xs(),
            lines=lines,
            unit=unit,
            kind=kind,
            step_s=self._span.step_s,
            brush=spec.brush if self._by == "key" else "",
            top=max(found.buckets.bounds_s, default=None) if found.buckets else None,
        )


def _scaled(value: float | None, factor: float, *, is_rate: bool = False) -> float | None:
    if value is None:
        return None
    # Two recorded minutes have 119.9 or 120.1 s, and 10 photos are 5 photos/min.
    scaled = value * factor
    return round(scaled, 1) if is_rate and scaled >= 1 else _digits(scaled)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
