"""What a screen is: an address, a function that looks, a template that shows.

A room exports one `ROOM`. A view function gets an `Ask`, which is the request in the console's words, calls
public verbs of services, and gives back a frozen dataclass; it writes nothing. The same function serves the page and its live
changes, so it must be cheap.

    async def see_hosts(ask: Ask) -> HostsView:
        hosts = await attempt(ask.service("fetch").hosts.page())
        return HostsView(hosts=hosts, sort=ask.query.choice("sort", ("name", "speed"), "name"))
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from headrace.console.actions import Action
from headrace.console.model import PREFIX, QueryInvalid, RoomMissing
from headrace.console.rates import Rates
from headrace.kernel.errors import HeadraceError
from headrace.web.tokens import Caller

Value = TypeVar("Value")
PANEL_S: Final = 3.0
"""A panel waits so long for its engine, so that the rest of the page is not kept waiting."""


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a page's address. Every reader says what it takes."""

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
        """Whether it is given and not `0`."""
        return self.given.get(name, "") not in ("", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, as views and actions see it."""

    path: str
    """Of the page, with `/console`."""
    params: Mapping[str, str]
    query: Query
    services: Mapping[str, Any]
    caller: Caller
    now_at: datetime
    rates: Rates
    media_origin: str = ""
    house: Any = None

    def service(self, name: str) -> Any:
        """The public service of a room. Raises: RoomMissing."""
        if name not in self.services:
            raise RoomMissing(
                f"room {name} is not installed here: install the extra {name} where the API runs"
            )
        return self.services[name]

    def may(self, scope: str) -> bool:
        """Whether the caller may do what needs `scope`."""
        return self.caller.may(scope)

    def url(self, **changes: Any) -> str:
        """The address of this page with parameters changed; None or empty leaves one out."""
        given = {**self.query.given, **changes}
        kept = {name: str(value) for name, value in given.items() if value not in (None, "")}
        return f"{self.path}?{urlencode(kept)}" if kept else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A page: `path` is below `/console`; `tab` is its name among the room's tabs, none: it has no tab."""

    path: str
    title: str
    template: str
    scope: str | None
    view: Callable[[Ask], Awaitable[Any]]
    tab: str = ""
    live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The screens and actions of a room; `key` leads there after `g`."""

    name: str
    title: str
    key: str
    screens: tuple[Screen, ...]
    actions: tuple[Action, ...] = ()
    service: str | None = None

    @property
    def href(self) -> str:
        """Where the room begins."""
        return PREFIX + self.screens[0].path.rstrip("/")

    @property
    def tabs(self) -> list[Screen]:
        """The screens that have a tab."""
        return [screen for screen in self.screens if screen.tab]


@dataclass(frozen=True, slots=True)
class Found(Generic[Value]):
    """A service's answer, or why there is none: `error` is for a panel of its own.

    `is_hidden`: the caller may not see it, so the error is no fault of the deployment.
    """

    value: Value | None = None
    error: str | None = None
    is_hidden: bool = False


async def attempt(answer: Awaitable[Value]) -> Found[Value]:
    """What `answer` gives within PANEL_S, or its refusal as text: one engine that is down empties one panel."""
    try:
        return Found(value=await asyncio.wait_for(answer, PANEL_S))
    except TimeoutError:
        return Found(error=f"no answer within {PANEL_S:.0f} s")
    except HeadraceError as error:
        return Found(error=error.public_text)


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; None is a gap: not known."""

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
        """What the page's script draws."""
        return {
            "xs": list(self.xs),
            "unit": self.unit,
            "kind": self.kind,
            "lines": [
                {"label": line.label, "tone": line.tone, "values": list(line.values)}
                for line in self.lines
            ],
        }
