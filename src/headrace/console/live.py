"""Live updates of pages: one sampler per process for all subscribers.

While a page has subscribers, the sampler renders it every `console.live_every`, once for all of
them. A sample holds the page's named fragments and a digest of the layout around them. Each
subscriber receives the fragments that changed since its last update, the longest waiting first and
of one sample figures before charts, within BYTES_PER_S. On a page where everything moves, each
number updates less often instead of costing more. If the layout differs, because rows or buttons
changed, the subscriber gets `stale` and reloads the page. The reload is charged to the tab's byte
budget, which outlives the stream.

A client that reconnects with the same page may have missed updates, so it receives every fragment
again. Without changes, a heartbeat goes out every HEARTBEAT_S with the time of the sample. A
session that ended is detected within CHECK_S. The first subscriber starts the sampler, and the
last one stops it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

import msgspec

from headrace.console.model import TooManyViewers, live_bytes, live_viewers
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.resilience import require_not_cancelled, wait_event

BYTES_PER_S: Final = 5_000.0
"""Mean rate of updates to one subscriber; a burst may use twice as much."""
SUBSCRIBERS_MAX: Final = 500
FIGURE_CHARACTERS: Final = 1_000
"""Fragments up to this length are figures; longer ones are charts and lists."""
RENDER_S_MAX: Final = 10.0
PAGES_KEPT: Final = 512
TABS_KEPT: Final = 4_096
HEARTBEAT_S: Final = 4.0
"""Pages treat the stream as dead after three missed heartbeats."""
CHECK_S: Final = 3.0
LIFE_S: Final = 3_600.0
"""Maximum lifetime of a stream; the browser reconnects."""
_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class WatchedPage:
    """A URL and the scopes it is rendered with, as fewer scopes may show less."""

    url: str
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class ClientState:
    """What a tab reports: id and layout digest of its page, and the id of the tab's first page."""

    page: str
    layout: str
    tab: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Fragments of a page, digest of its layout, and its size to send; or the error."""

    parts: Mapping[str, str]
    layout: str
    page_bytes: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """A server-sent event: `changes`, `stale`, `unavailable`, `heartbeat` or `logged_out`."""

    event: str
    data: str = "{}"
    at: str = ""
    """Time of the sample, as ISO 8601."""


@dataclass(slots=True)
class _Watch:
    """A watched page with its newest sample; `at` keeps its value while rendering fails."""

    subscribers: int = 0
    sample: Sample | None = None
    at: str = ""
    began_s: float = 0.0
    """Monotonic time at which rendering of the sample began."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced with each sample."""


class Sampler:
    """Renders watched pages with `render` and streams their changes."""

    def __init__(
        self, render: Callable[[WatchedPage], Awaitable[Sample]], *, every_s: float
    ) -> None:
        self._render = render
        self._every_s = every_s
        self._watches: dict[WatchedPage, _Watch] = {}
        self._pages: OrderedDict[str, Mapping[str, str]] = OrderedDict()
        self._budgets: OrderedDict[str, Budget] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether any page is watched."""
        return self._task is not None and not self._task.done()

    def remember(self, page_id: str, parts: Mapping[str, str]) -> None:
        """Store the fragments of a sent page, so its subscriber receives later changes only."""
        self._pages[page_id] = parts
        if len(self._pages) > PAGES_KEPT:
            self._pages.popitem(last=False)

    def require_room(self) -> None:
        """Refuse a subscriber over the limit. Raises: TooManyViewers."""
        if sum(watch.subscribers for watch in self._watches.values()) >= SUBSCRIBERS_MAX:
            raise TooManyViewers(
                f"all {SUBSCRIBERS_MAX} live streams are in use: close some pages, or reload this"
                " page by hand",
                retry_after_s=10,
            )

    async def watch(
        self, page: WatchedPage, state: ClientState, is_allowed: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[LiveEvent]:
        """Events for one subscriber, until it leaves, its session ends, or LIFE_S passed."""
        watch = self._watches.setdefault(page, _Watch())
        watch.subscribers += 1
        live_viewers.inc()
        if not self.is_running:
            self._task = asyncio.create_task(self._run())
        try:
            async for event in self._events(watch, state, is_allowed):
                live_bytes.inc(len(event.data))
                yield event
        finally:
            self._leave(page, watch)

    async def _events(
        self, watch: _Watch, state: ClientState, is_allowed: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[LiveEvent]:
        known = self._pages.pop(state.page, None)
        subscriber = Subscriber(known, state.layout, self._budget_of(state.tab))
        now_s = sent_s = checked_s = came_s = time.monotonic()
        ends_s = now_s + LIFE_S
        sample: Sample | None = None
        yield LiveEvent("heartbeat")
        while now_s < ends_s:
            await wait_event(watch.news, max(sent_s + HEARTBEAT_S - now_s, 0.01))
            now_s = time.monotonic()
            if now_s - checked_s >= CHECK_S:
                if not await is_allowed():
                    yield LiveEvent("logged_out")
                    return
                checked_s = now_s
            if watch.began_s >= came_s:
                # An older sample would show values from before the page was loaded.
                sample = watch.sample
            found = [] if sample is None else subscriber.next_events(sample, now_s)
            if not found and now_s - sent_s >= HEARTBEAT_S:
                found = [LiveEvent("heartbeat")]
            for event in found:
                sent_s = now_s
                yield replace(event, at=watch.at)

    async def close(self) -> None:
        """Stop the sampler."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _budget_of(self, tab: str) -> Budget:
        if not tab:
            return Budget()
        budget = self._budgets.setdefault(tab, Budget())
        self._budgets.move_to_end(tab)
        if len(self._budgets) > TABS_KEPT:
            self._budgets.popitem(last=False)
        return budget

    def _leave(self, page: WatchedPage, watch: _Watch) -> None:
        watch.subscribers -= 1
        live_viewers.dec()
        if not watch.subscribers:
            self._watches.pop(page, None)
        if not self._watches and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._watches:
            require_not_cancelled()
            began_s = time.monotonic()
            for page, watch in list(self._watches.items()):
                at, render_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
                watch.sample, watch.began_s = await self._sample(page), render_s
                watch.at = watch.at if watch.sample.error else at
                news, watch.news = watch.news, asyncio.Event()
                news.set()
            spent_s = time.monotonic() - began_s
            # Render at most half of the time, so slow pages refresh less often.
            await asyncio.sleep(max(self._every_s - spent_s, spent_s))

    async def _sample(self, page: WatchedPage) -> Sample:
        try:
            return await asyncio.wait_for(self._render(page), RENDER_S_MAX)
        except HeadraceError as error:
            return Sample({}, "", 0, error.public_text)
        except TimeoutError:
            return Sample({}, "", 0, f"no answer within {RENDER_S_MAX:.0f} s")
        except Exception as error:  # noqa: BLE001 - a page that fails must not stop the others
            _log.error("live_page_failed", url=page.url, exc_info=error)
            return Sample({}, "", 0, "internal error of the server on this page")


class Budget:
    """Bytes that a tab may receive now: BYTES_PER_S, up to twice as much saved up."""

    def __init__(self) -> None:
        self._bytes = BYTES_PER_S
        self._at_s: float | None = None

    def grow(self, now_s: float) -> None:
        """Add the bytes earned since the last call."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._bytes = min(2 * BYTES_PER_S, self._bytes + BYTES_PER_S * passed_s)

    def is_enough(self, cost_bytes: int) -> bool:
        """Whether `cost_bytes` may be sent; a cost over one second's rate creates debt."""
        return self._bytes >= min(cost_bytes, BYTES_PER_S)

    def spend(self, cost_bytes: int) -> None:
        """Subtract `cost_bytes`."""
        self._bytes -= cost_bytes


class Subscriber:
    """State of one stream: what was sent, what waits. Pure: the caller passes the time."""

    def __init__(self, known: Mapping[str, str] | None, layout: str, budget: Budget) -> None:
        self._sent: dict[str, str] = dict(known or {})
        self._names = None if known is None else set(known)
        self._layout = layout
        self._budget = budget
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._error: str | None = None

    def next_events(self, sample: Sample, now_s: float) -> list[LiveEvent]:
        """The events to send for `sample`."""
        self._budget.grow(now_s)
        if sample.error is not None:
            return self._error_events(sample.error)
        events = self._error_events(None)
        if self._layout != sample.layout and self._budget.is_enough(sample.page_bytes):
            self._budget.spend(sample.page_bytes)
            self._layout = sample.layout
            return [*events, LiveEvent("stale")]
        changes = self._changes(sample.parts)
        if changes:
            events.append(LiveEvent("changes", msgspec.json.encode(changes).decode()))
        return events

    def _changes(self, parts: Mapping[str, str]) -> dict[str, str]:
        # Small ones first: no chart separates the figures of tiles and rows of one sample.
        for name, html in sorted(parts.items(), key=lambda part: len(part[1]) > FIGURE_CHARACTERS):
            # Fragments that the client's page lacks arrive with its next reload.
            if self._sent.get(name) != html and (self._names is None or name in self._names):
                self._waiting.setdefault(name)
        changes: dict[str, str] = {}
        for name in list(self._waiting):
            newest = parts.get(name)
            if newest is None or self._sent.get(name) == newest:
                del self._waiting[name]
                continue
            # Size as JSON: quotes, colon, comma, and a backslash before each inner quote.
            cost = len(name) + len(newest) + newest.count('"') + 6
            if not self._budget.is_enough(cost):
                break
            self._budget.spend(cost)
            del self._waiting[name]
            changes[name] = self._sent[name] = newest
        return changes

    def _error_events(self, error: str | None) -> list[LiveEvent]:
        if error == self._error:
            return []
        self._error = error
        return [LiveEvent("unavailable", msgspec.json.encode({"text": error or ""}).decode())]
