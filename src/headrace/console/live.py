"""What keeps pages live: one sampler a process for all viewers.

A viewer watches an address. While anybody does, the sampler looks at each watched address every `console.live_every`, once
however many watch it, and renders its page: the named fragments, and the frame around them. A viewer is sent the fragments
that are not what he was sent last, the longest waiting first, within BYTES_PER_S: with 150 queues on a page that all move,
numbers change less often instead of costing more. Where the frame is not the one that his page was sent with, rows came or
went, or a button is another one: he is told to fetch the page. That counts as well, packed, and its debt outlives the stream,
since the tab comes again with the page that it fetched.

Who comes again with the same page may have missed anything: he is sent every fragment anew. Whoever is sent nothing is told
every BEAT_S that he still listens, and of when what he sees is; who may not look any more is told so within CHECK_S.
The first viewer starts the sampler, the last one ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from headrace.kernel.resilience import require_not_cancelled

BYTES_PER_S: Final = 5_000.0
"""What a viewer is sent at most, in the mean; twice of it may be saved up."""
VIEWERS_MAX: Final = 500
LOOK_S_MAX: Final = 10.0
PAGES_KEPT: Final = 512
TABS_KEPT: Final = 4_096
BEAT_S: Final = 4.0
"""Pages hold the stream to be dead after three of them without a word."""
CHECK_S: Final = 3.0
LIFE_S: Final = 3_600.0
"""A stream ends after so long; its page comes again."""
_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class Watched:
    """An address as somebody sees it: who may do less may see less."""

    url: str
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a tab says of the page that it shows: its id, the digest of its frame, and the first page of the tab."""

    page: str
    frame: str
    tab: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The fragments of a page at a moment, the digest of what is around them, and what the whole costs to send; or why not."""

    parts: Mapping[str, str]
    frame: str
    page_bytes: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """An event for a viewer: `changes`, `stale` (fetch the page), `trouble`, `beat` (nothing new) or `over` (log in again)."""

    event: str
    data: str = "{}"
    at: str = ""
    """Of when it is, as ISO 8601."""


@dataclass(slots=True)
class _Place:
    """An address with its newest sample; `news` is replaced with each sample, `at` stays while looking fails."""

    viewers: int = 0
    sample: Sample | None = None
    at: str = ""
    began_s: float = 0.0
    """When the look that gave the sample began, on the monotonic clock."""
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Sampler:
    """Looks at what is watched; `look` renders an address."""

    def __init__(self, look: Callable[[Watched], Awaitable[Sample]], *, every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._places: dict[Watched, _Place] = {}
        self._pages: OrderedDict[str, Mapping[str, str]] = OrderedDict()
        self._budgets: OrderedDict[str, Budget] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether somebody watches."""
        return self._task is not None and not self._task.done()

    def remember(self, page_id: str, parts: Mapping[str, str]) -> None:
        """What a page was sent with, so that its viewer is sent changes of it only."""
        self._pages[page_id] = parts
        if len(self._pages) > PAGES_KEPT:
            self._pages.popitem(last=False)

    def require_room(self) -> None:
        """Refuse one viewer too many. Raises: TooManyViewers."""
        if sum(place.viewers for place in self._places.values()) >= VIEWERS_MAX:
            raise TooManyViewers(
                f"{VIEWERS_MAX} pages are kept live already: close some, or reload this one by hand",
                retry_after_s=10,
            )

    async def watch(
        self, watched: Watched, seen: Seen, is_welcome: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[Told]:
        """Events for one viewer, until he goes, is welcome no more, or LIFE_S are over."""
        place = self._places.setdefault(watched, _Place())
        place.viewers += 1
        live_viewers.inc()
        if not self.is_running:
            self._task = asyncio.create_task(self._run())
        try:
            async for told in self._tell(place, seen, is_welcome):
                live_bytes.inc(len(told.data))
                yield told
        finally:
            self._leave(watched, place)

    async def _tell(
        self, place: _Place, seen: Seen, is_welcome: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[Told]:
        viewer = Viewer(self._pages.pop(seen.page, None), seen.frame, self._budget_of(seen.tab))
        now_s = said_s = checked_s = came_s = time.monotonic()
        ends_s = now_s + LIFE_S
        sample: Sample | None = None
        yield Told("beat")
        while now_s < ends_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(place.news.wait(), max(said_s + BEAT_S - now_s, 0.01))
            now_s = time.monotonic()
            if now_s - checked_s >= CHECK_S:
                if not await is_welcome():
                    yield Told("over")
                    return
                checked_s = now_s
            if place.began_s >= came_s:
                # An older one would lead the page back to before it was loaded.
                sample = place.sample
            found = [] if sample is None else viewer.next_told(sample, now_s)
            if not found and now_s - said_s >= BEAT_S:
                found = [Told("beat")]
            for told in found:
                said_s = now_s
                yield replace(told, at=place.at)

    async def close(self) -> None:
        """End the sampler."""
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

    def _leave(self, watched: Watched, place: _Place) -> None:
        place.viewers -= 1
        live_viewers.dec()
        if not place.viewers:
            self._places.pop(watched, None)
        if not self._places and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._places:
            require_not_cancelled()
            began_s = time.monotonic()
            for watched, place in list(self._places.items()):
                at, look_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
                place.sample, place.began_s = await self._sample(watched), look_s
                place.at = place.at if place.sample.error else at
                news, place.news = place.news, asyncio.Event()
                news.set()
            spent_s = time.monotonic() - began_s
            # Never more than half of the time: a page that is slow to look at is looked at less often.
            await asyncio.sleep(max(self._every_s - spent_s, spent_s))

    async def _sample(self, watched: Watched) -> Sample:
        try:
            return await asyncio.wait_for(self._look(watched), LOOK_S_MAX)
        except HeadraceError as error:
            return Sample({}, "", 0, error.public_text)
        except TimeoutError:
            return Sample({}, "", 0, f"no answer within {LOOK_S_MAX:.0f} s")
        except Exception as error:  # noqa: BLE001 - one page that cannot be shown must not end the others
            _log.error("live_page_failed", url=watched.url, exc_info=error)
            return Sample({}, "", 0, "the server failed on this page, which is our mistake")


class Budget:
    """How many bytes a tab may be sent now: BYTES_PER_S, and at most twice of it saved up."""

    def __init__(self) -> None:
        self._bytes = BYTES_PER_S
        self._at_s: float | None = None

    def grow(self, now_s: float) -> None:
        """Add what the time since the last call is worth."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._bytes = min(2 * BYTES_PER_S, self._bytes + BYTES_PER_S * passed_s)

    def is_enough(self, cost_bytes: int) -> bool:
        """Whether so much may be sent; what is more than a second's worth goes into debt."""
        return self._bytes >= min(cost_bytes, BYTES_PER_S)

    def spend(self, cost_bytes: int) -> None:
        """Take so much away."""
        self._bytes -= cost_bytes


class Viewer:
    """What one viewer was sent. Pure: the caller tells the time."""

    def __init__(self, known: Mapping[str, str] | None, frame: str, budget: Budget) -> None:
        self._sent: dict[str, str] = dict(known or {})
        self._names = None if known is None else set(known)
        self._frame = frame
        self._budget = budget
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._error: str | None = None

    def next_told(self, sample: Sample, now_s: float) -> list[Told]:
        """What he is told of `sample`."""
        self._budget.grow(now_s)
        if sample.error is not None:
            return self._trouble(sample.error)
        told = self._trouble(None)
        if self._frame != sample.frame and self._budget.is_enough(sample.page_bytes):
            self._budget.spend(sample.page_bytes)
            self._frame = sample.frame
            return [*told, Told("stale")]
        changes = self._changes(sample.parts)
        if changes:
            told.append(Told("changes", msgspec.json.encode(changes).decode()))
        return told

    def _changes(self, parts: Mapping[str, str]) -> dict[str, str]:
        for name, html in parts.items():
            # A fragment that his page has not is none of his until he has fetched it.
            if self._sent.get(name) != html and (self._names is None or name in self._names):
                self._waiting.setdefault(name)
        changes: dict[str, str] = {}
        for name in list(self._waiting):
            newest = parts.get(name)
            if newest is None or self._sent.get(name) == newest:
                del self._waiting[name]
                continue
            # As JSON: quotes, colon, comma, and a sign before each quote within.
            cost = len(name) + len(newest) + newest.count('"') + 6
            if not self._budget.is_enough(cost):
                break
            self._budget.spend(cost)
            del self._waiting[name]
            changes[name] = self._sent[name] = newest
        return changes

    def _trouble(self, error: str | None) -> list[Told]:
        if error == self._error:
            return []
        self._error = error
        return [Told("trouble", msgspec.json.encode({"text": error or ""}).decode())]
