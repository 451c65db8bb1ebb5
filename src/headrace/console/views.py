"""Screens and what their view functions receive and return.

Each room exports one `ROOM`. A view function takes a `ViewContext`, calls public services and
returns the values that its template reads as `view`. It has no side effects. The live stream calls
the same function every few seconds, so it must be cheap.

    async def view_hosts(context: ViewContext) -> dict[str, Any]:
        hosts = await attempt(context.fetch.hosts.page)
        return {"hosts": hosts, "sort": context.query.choice("sort", ("name", "speed"), "name")}

`Rates` of this machine's metrics are differences of two readings. Each series is compared with
itself, so roles that start or stop between readings cause no error. A counter that fell was reset
and counts from 0. The first reading gives no rates.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar
from urllib.parse import urlencode

from headrace.console.actions import Action
from headrace.console.kept_reads import KeptReads
from headrace.console.model import PREFIX, QueryInvalid, RoomMissing
from headrace.kernel.config import parse_moment
from headrace.kernel.errors import HeadraceError
from headrace.kernel.metrics import merged_metrics
from headrace.web.model import Application
from headrace.web.tokens import Caller

READ_EVERY_S: Final = 1.5
SPAN_S: Final = 12.0
"""Time span that rates are averaged over."""
HISTORY_MAX: Final = 60
GAP_S_MAX: Final = 20.0
"""Older readings are not used for rates."""
LEAST_S: Final = 3.0
"""Roles write metrics every two seconds; a shorter span would be noise."""
GONE_S_MAX: Final = 3_600.0
"""A role that wrote nothing for longer is assumed to be stopped on purpose."""
RECENT_S: Final = 600.0
"""Time span of `Rates.grown`."""
MARK_EVERY_S: Final = 60.0
WATCHED: Final = frozenset({"media_cuts_total", "media_requests_total"})
"""The counters of `Rates.grown`."""
_ROLE: Final = re.compile(r'role="(\w+)"')
_SERIES: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
Series = Mapping[tuple[str, str], float]


class Rates(KeptReads):
    """Recent readings of the metrics folder, shared by all pages of one console."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._readings: deque[tuple[float, Series]] = deque()
        self._history: dict[str, deque[tuple[float, float | None]]] = {}
        self._reading = asyncio.Lock()
        self._roles: dict[str, float] = {}
        self._marks: deque[tuple[float, Series, frozenset[str]]] = deque()
        """Readings of WATCHED with the roles that wrote them; the last one is the newest."""

    async def read(self) -> None:
        """Take a reading in a thread, unless the last one is recent."""
        async with self._reading:
            now_s = time.monotonic()
            if self._readings and now_s - self._readings[-1][0] < READ_EVERY_S:
                return
            text = await asyncio.to_thread(merged_metrics, self._folder, "api")
            self.add(now_s, parse_series(text.decode()))

    def add(self, at_s: float, series: Series) -> None:
        """Add a reading taken at `at_s` and drop readings that are too old."""
        while self._readings and at_s - self._readings[0][0] > GAP_S_MAX:
            self._readings.popleft()
        self._readings.append((at_s, series))
        found = {match[1] for _, labels in series if (match := _ROLE.search(labels))}
        if len(self._marks) > 1 and at_s - self._marks[-2][0] < MARK_EVERY_S:
            self._marks.pop()
        watched = {key: value for key, value in series.items() if key[0] in WATCHED}
        self._marks.append((at_s, watched, frozenset(found)))
        while self._marks[0][0] < at_s - RECENT_S:
            self._marks.popleft()
        self._roles.update(dict.fromkeys(found, at_s))
        while len(self._readings) > 2 and at_s - self._readings[1][0] >= SPAN_S:
            self._readings.popleft()

    @property
    def is_measuring(self) -> bool:
        """Whether no two readings are far enough apart yet."""
        return not self._readings or self._readings[-1][0] - self._readings[0][0] < LEAST_S

    def gone(self) -> dict[str, float]:
        """Roles that stopped writing metrics, with the seconds since their last."""
        at_s = self._readings[-1][0] if self._readings else 0.0
        return {r: at_s - s for r, s in self._roles.items() if 0 < at_s - s < GONE_S_MAX}

    def rate_per_s(self, name: str, *labels: str) -> float | None:
        """Growth per second of counter `name` over series with all `labels`; None if unknown."""
        grown: list[float] = []
        for (_, before), (_, now) in pairwise(self._readings):
            for key in now.keys() & before.keys():
                if key[0] == name and all(one in key[1] for one in labels):
                    # A counter that fell was reset to 0.
                    by = now[key] - before[key]
                    grown.append(by if by >= 0 else now[key])
        if not grown or self.is_measuring:
            return None
        return sum(grown) / (self._readings[-1][0] - self._readings[0][0])

    def grown(self, name: str, *labels: str) -> float:
        """Growth of a counter of WATCHED in the last RECENT_S, as far as it was observed.

        A series that a known role starts to write began at 0.
        """
        grown = 0.0
        for (_, before, roles), (_, now, _) in pairwise(self._marks):
            for key, value in now.items():
                if key[0] == name and all(one in key[1] for one in labels):
                    role = _ROLE.search(key[1])
                    is_known = role is not None and role[1] in roles
                    by = value - before.get(key, 0.0 if is_known else value)
                    grown += by if by >= 0 else value
        return grown

    def note(self, name: str, per_s: float | None) -> list[float | None]:
        """Record a rate under `name` once per reading; return the history, with None for gaps."""
        noted = self._history.setdefault(name, deque(maxlen=HISTORY_MAX))
        at_s = self._readings[-1][0] if self._readings else 0.0
        if not noted or noted[-1][0] != at_s:
            if noted and at_s - noted[-1][0] > SPAN_S:
                noted.append((noted[-1][0], None))
            noted.append((at_s, per_s))
        return [value for _, value in noted]

    def total(self, name: str, *labels: str) -> float | None:
        """Sum of the newest values of `name`; None if there is no such series."""
        found = self._newest(name, labels)
        return sum(found) if found else None

    def greatest(self, name: str, *labels: str) -> float | None:
        """Maximum of the newest values of `name`; None if there is no such series."""
        return max(self._newest(name, labels), default=None)

    def _newest(self, name: str, labels: Sequence[str]) -> list[float]:
        return [
            value
            for (series, given), value in (self._readings[-1][1] if self._readings else {}).items()
            if series == name and all(one in given for one in labels)
        ]


def parse_series(text: str) -> dict[tuple[str, str], float]:
    """Every series of a Prometheus exposition, by name and labels as written."""
    return {(name, labels): float(value) for name, labels, value in _SERIES.findall(text)}


if TYPE_CHECKING:
    from headrace.console.history import Boards
    from headrace.engines.backup.service import Backups
    from headrace.feed import Feed
    from headrace.fetch import Fetch
    from headrace.jobs import Jobs
    from headrace.media import Media
    from headrace.views import Views
    from headrace.web.history import History
    from headrace.web.sessions import Audit

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
Changed = TypeVar("Changed")
PANEL_S: Final = 3.0
"""Timeout of one panel; the rest of the page does not wait longer for it."""
NO_ANSWER: Final = f"no answer within {PANEL_S:.0f} s"


@dataclass(frozen=True, slots=True)
class Query:
    """The query parameters of a page, read with validation."""

    given: Mapping[str, str]

    def text(self, name: str, default: str = "", *, most: int = 256) -> str:
        """A text of up to `most` characters. Raises: QueryInvalid."""
        found = self.given.get(name, default)
        if "\0" in found:
            raise QueryInvalid(f"{name}: expected characters other than NUL")
        if len(found) > most:
            raise QueryInvalid(f"{name}: expected at most {most} characters, got {len(found)}")
        return found

    def number(self, name: str, default: int, *, least: int = 0, most: int = 2**63 - 1) -> int:
        """A whole number. Raises: QueryInvalid."""
        found = self.given.get(name, "")
        if not found:
            return default
        if is_digits(found) and least <= int(found) <= most:
            return int(found)
        raise QueryInvalid(
            f"{name}: expected a whole number from {least} to {most}, got {found[:40]!r}"
        )

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """One of `allowed`. Raises: QueryInvalid."""
        found = self.given.get(name) or default
        if found not in allowed and found != default:
            raise QueryInvalid(f"{name}: expected one of {', '.join(allowed)}, got {found[:40]!r}")
        return found

    def moment(self, name: str) -> datetime | None:
        """A moment, in UTC if it has no offset. Raises: QueryInvalid."""
        found = self.text(name).strip()
        try:
            return parse_moment(found) if found else None
        except (ValueError, OverflowError) as error:
            raise QueryInvalid(f"{name}: expected {error}, got {found[:40]!r}") from None

    def flag(self, name: str) -> bool:
        """Whether the parameter is given and not `0`."""
        return self.given.get(name, "") not in ("", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewContext:
    """One request and the public services of the rooms, as view functions and actions see them."""

    jobs: Jobs
    views: Views
    feed: Feed
    media: Media
    audit: Audit
    installed_fetch: Fetch | None
    path: str
    """Path of the page, with `/console`."""
    params: Mapping[str, str]
    query: Query
    caller: Caller
    now_at: datetime
    rates: Rates
    history: History
    backups: Backups
    boards: Boards
    house: Application
    rooms: Sequence[Room] = ()
    """All rooms, in menu order."""
    media_origin: str = ""
    origin: str = ""
    """Scheme and host of the console, in an action."""

    @property
    def fetch(self) -> Fetch:
        """The service of the fetch room. Raises: RoomMissing."""
        if self.installed_fetch is None:
            raise RoomMissing(
                "room fetch is not installed on this machine: install the extra fetch where the"
                " API runs"
            )
        return self.installed_fetch

    def may(self, scope: str) -> bool:
        """Whether the caller has `scope`."""
        return self.caller.may(scope)

    def url(self, **changes: Any) -> str:
        """The URL of this page with parameters changed; None or empty removes one."""
        given = {**self.query.given, **changes}
        kept = {name: str(value) for name, value in given.items() if value not in (None, "")}
        return f"{self.path}?{urlencode(kept)}" if kept else self.path

    def cut(
        self, rows: Sequence[Value], rows_max: int, **cursor: str
    ) -> tuple[Sequence[Value], str | None]:
        """Up to `rows_max` rows, and the URL of the next page if there are more.

        `cursor` names an attribute of the last row for each parameter of that URL.
        """
        shown = rows[:rows_max]
        if len(shown) == len(rows):
            return shown, None
        last = shown[-1]
        return shown, self.url(**{name: getattr(last, given) for name, given in cursor.items()})


@dataclass(frozen=True, slots=True)
class Screen:
    """A page: `path` is below `/console`; `tab` is its label in the room's tabs, if it has one."""

    path: str
    title: str
    template: str
    view: Callable[[ViewContext], Awaitable[dict[str, Any]]]
    _: KW_ONLY
    scope: str | None = None
    """A scope that replaces the room's."""
    tab: str = ""
    live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The screens and actions of a room; the keys `g` and `key` open it."""

    name: str
    title: str
    key: str
    scope: str | None
    """The scope that its screens need, if any."""
    screens: tuple[Screen, ...]
    actions: tuple[Action, ...] = ()

    @property
    def href(self) -> str:
        """URL of the room's first screen."""
        return PREFIX + self.screens[0].path.rstrip("/")

    @property
    def tabs(self) -> list[Screen]:
        """The screens that have a tab."""
        return [screen for screen in self.screens if screen.tab]


@dataclass(frozen=True, slots=True)
class PanelData(Generic[Value]):
    """Data of one panel, or the error that the panel shows instead.

    `is_hidden`: the caller lacks the scope, so the error is no fault of the deployment. `is_slow`:
    there was no answer in time, which a busy machine may cause.
    """

    value: Value | None = None
    error: str | None = None
    is_hidden: bool = False
    is_slow: bool = False
    at: datetime | None = None
    """When the value was read that is shown beside the error."""

    def map(self, change: Callable[[Value], Changed]) -> PanelData[Changed]:
        """The panel with its value changed by `change`, if it has one."""
        value = None if self.value is None else change(self.value)
        return PanelData(value, self.error, self.is_hidden, self.is_slow, self.at)


NO_DATA: Final[PanelData[Any]] = PanelData()
"""The data of a panel that was not requested."""


async def no_data() -> PanelData[Any]:
    """`NO_DATA`, for use beside awaited panels."""
    return NO_DATA


async def attempt(
    call: Callable[Arguments, Awaitable[Value]],
    /,
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> PanelData[Value]:
    """Await `call` for up to PANEL_S. Return an error as text, so it affects one panel only.

    It takes no coroutine: one whose page is cancelled before it starts would never be awaited.
    """
    try:
        return PanelData(value=await asyncio.wait_for(call(*args, **kwargs), PANEL_S))
    except TimeoutError:
        return PanelData(error=NO_ANSWER, is_slow=True)
    except HeadraceError as error:
        return PanelData(error=error.public_text)


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; None is a gap."""

    label: str
    values: Sequence[float | None]
    tone: str = ""
    color: int = 0
    """Its color of the charts, from 1; 0 for that of its place."""

    @property
    def latest(self) -> float | None:
        """The last known value."""
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over time: `xs` are seconds since 1970; with `labels`, positions in this list."""

    xs: Sequence[float]
    lines: Sequence[Line]
    unit: str = ""
    kind: str = "line"
    """line, bars, stack: lines on each other, or heat: a column of counts for each x."""
    labels: Sequence[str] = ()
    step_s: int = 0
    """Length of the step that begins at an x; 0 for single points."""
    brush: str = ""
    """The list that a selected time opens, as path and name, `/fetch/photos|photos`."""
    bounds_s: Sequence[float] = ()
    """Upper bounds of the counts of a heat map; the last count is over all of them."""
    top: float | None = None
    """The highest value that can be measured: a value there may be greater."""
    counts: Sequence[Sequence[float] | None] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether every value is 0 or missing."""
        counts = (count for column in self.counts for count in column or ())
        return not any(counts) and not any(any(line.values) for line in self.lines)

    def since(self, index: int) -> Chart:
        """The chart without the points before `index`."""
        lines = [replace(line, values=line.values[index:]) for line in self.lines]
        return replace(self, xs=self.xs[index:], lines=lines, counts=self.counts[index:])

    def document(self) -> dict[str, Any]:
        """The data that the page's script draws."""
        return {
            "xs": list(self.xs),
            "unit": self.unit,
            "kind": self.kind,
            "labels": list(self.labels),
            "step": self.step_s,
            **({"top": self.top} if self.top is not None else {}),
            **({"bounds": list(self.bounds_s), "counts": list(self.counts)} if self.counts else {}),
            "lines": [
                {"label": line.label, "tone": line.tone, "color": line.color, "values": line.values}
                for line in self.lines
            ],
        }


def is_digits(text: str) -> bool:
    """Whether `text` is a whole number of up to 19 digits, as of 63 bits."""
    return text.isascii() and text.isdecimal() and len(text) <= 19


def row_id(text: str) -> int:
    """The id in a URL or form; 0, which no row has, for any other text."""
    return int(text) if is_digits(text) and int(text) < 2**63 else 0


def choices(words: Iterable[str]) -> list[tuple[str, str]]:
    """Options of a filter whose labels are their values."""
    return [(str(word), str(word)) for word in words]
