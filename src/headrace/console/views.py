"""Screens and what their view functions receive and return.

Each room exports one `ROOM`. A view function takes a `ViewContext`, calls public services and
returns a frozen dataclass for the template. It has no side effects. The live stream calls the same
function every few seconds, so it must be cheap.

    async def view_hosts(context: ViewContext) -> HostsView:
        hosts = await attempt(context.fetch.hosts.page())
        return HostsView(hosts=hosts, sort=context.query.choice("sort", ("name", "speed"), "name"))
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from headrace.console.actions import Action
from headrace.console.model import PREFIX, QueryInvalid, RoomMissing
from headrace.console.rates import Rates
from headrace.kernel.errors import HeadraceError
from headrace.web.model import Application
from headrace.web.tokens import Caller, Tokens

if TYPE_CHECKING:
    from headrace.feed import Feed
    from headrace.fetch import Fetch
    from headrace.jobs import Jobs
    from headrace.media import Media
    from headrace.views import Views
    from headrace.web.sessions import Audit

Value = TypeVar("Value")
PANEL_S: Final = 3.0
"""Timeout of one panel; the rest of the page does not wait longer for it."""


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
        if found.isascii() and found.isdecimal() and least <= int(found[:20]) <= most:
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

    def flag(self, name: str) -> bool:
        """Whether the parameter is given and not `0`."""
        return self.given.get(name, "") not in ("", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The public services of the rooms, typed; None for a room that is not installed."""

    jobs: Jobs
    views: Views
    feed: Feed
    media: Media
    audit: Audit
    tokens: Tokens
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewContext:
    """One request, as view functions and actions see it."""

    path: str
    """Path of the page, with `/console`."""
    params: Mapping[str, str]
    query: Query
    services: Services
    caller: Caller
    now_at: datetime
    rates: Rates
    house: Application
    media_origin: str = ""

    @property
    def jobs(self) -> Jobs:
        """The service of the jobs room."""
        return self.services.jobs

    @property
    def views(self) -> Views:
        """The service of the views room."""
        return self.services.views

    @property
    def feed(self) -> Feed:
        """The service of the feed room."""
        return self.services.feed

    @property
    def media(self) -> Media:
        """The service of the media room."""
        return self.services.media

    @property
    def fetch(self) -> Fetch:
        """The service of the fetch room. Raises: RoomMissing."""
        if self.services.fetch is None:
            raise RoomMissing(
                "room fetch is not installed on this machine: install the extra fetch where the"
                " API runs"
            )
        return self.services.fetch

    @property
    def audit(self) -> Audit:
        """The audit log."""
        return self.services.audit

    def may(self, scope: str) -> bool:
        """Whether the caller has `scope`."""
        return self.caller.may(scope)

    def url(self, **changes: Any) -> str:
        """The URL of this page with parameters changed; None or empty removes one."""
        given = {**self.query.given, **changes}
        kept = {name: str(value) for name, value in given.items() if value not in (None, "")}
        return f"{self.path}?{urlencode(kept)}" if kept else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A page: `path` is below `/console`; `tab` is its label in the room's tabs, if it has one."""

    path: str
    title: str
    template: str
    scope: str | None
    view: Callable[[ViewContext], Awaitable[Any]]
    tab: str = ""
    live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The screens and actions of a room; the keys `g` and `key` open it."""

    name: str
    title: str
    key: str
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

    `is_hidden`: the caller lacks the scope, so the error is no fault of the deployment.
    """

    value: Value | None = None
    error: str | None = None
    is_hidden: bool = False


NO_DATA: Final[PanelData[Any]] = PanelData()
"""The data of a panel that was not requested."""


async def no_data() -> PanelData[Any]:
    """`NO_DATA`, for use beside awaited panels."""
    return NO_DATA


async def attempt(answer: Awaitable[Value]) -> PanelData[Value]:
    """Await `answer` for up to PANEL_S. Return an error as text, so it affects one panel only."""
    try:
        return PanelData(value=await asyncio.wait_for(answer, PANEL_S))
    except TimeoutError:
        return PanelData(error=f"no answer within {PANEL_S:.0f} s")
    except HeadraceError as error:
        return PanelData(error=error.public_text)


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; None is a gap."""

    label: str
    values: Sequence[float | None]
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over time: `xs` are seconds since 1970."""

    xs: Sequence[float]
    lines: Sequence[Line]
    unit: str = ""
    kind: str = "line"

    def document(self) -> dict[str, Any]:
        """The data that the page's script draws."""
        return {
            "xs": list(self.xs),
            "unit": self.unit,
            "kind": self.kind,
            "lines": [
                {"label": line.label, "tone": line.tone, "values": list(line.values)}
                for line in self.lines
            ],
        }


def choices(words: Iterable[str]) -> list[tuple[str, str]]:
    """Options of a filter whose labels are their values."""
    return [(str(word), str(word)) for word in words]
