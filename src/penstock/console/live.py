"""What keeps pages live: one sampler a process for all viewers.

A viewer watches an address. While anybody does, the sampler looks at each watched address every `console.live_every`, once
however many watch it, and renders the named fragments of its page. A viewer is sent those that are not what he was
sent last, the longest waiting first, within BYTES_PER_S: with 150 queues on a page that all move, numbers change less
often instead of costing more. Where fragments come or go he is told to fetch the page, and that counts as well.
The first viewer starts the sampler, the last one ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.console.model import TooManyViewers, live_bytes, live_viewers
from penstock.kernel.errors import PenstockError
from penstock.kernel.logs import logger

BYTES_PER_S: Final = 5_000.0
"""What a viewer is sent at most, in the mean; twice of it may be saved up."""
VIEWERS_MAX: Final = 500
LOOK_S_MAX: Final = 10.0
PAGES_KEPT: Final = 512
BEAT_S: Final = 15.0
LIFE_S: Final = 600.0
"""A stream ends after so long; its page comes again, and its session is looked at again."""
_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class Watched:
    """An address as somebody sees it: who may do less may see less."""

    url: str
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Sample:
    """The fragments of a page at a moment, or why there are none."""

    parts: Mapping[str, str]
    page_bytes: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """An event for a viewer: `changes`, `stale` (fetch the page) or `trouble`; an empty name is a sign of life."""

    event: str
    data: str = ""


@dataclass(slots=True)
class _Place:
    """An address with its newest sample; `news` is replaced with each sample."""

    viewers: int = 0
    sample: Sample | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Sampler:
    """Looks at what is watched; `look` renders an address."""

    def __init__(self, look: Callable[[Watched], Awaitable[Sample]], *, every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._places: dict[Watched, _Place] = {}
        self._pages: OrderedDict[str, Mapping[str, str]] = OrderedDict()
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

    async def watch(self, watched: Watched, page_id: str) -> AsyncIterator[Told]:
        """Events for one viewer, until he goes or LIFE_S are over."""
        place = self._places.setdefault(watched, _Place())
        place.viewers += 1
        live_viewers.inc()
        if not self.is_running:
            self._task = asyncio.create_task(self._run())
        try:
            viewer = Viewer(self._pages.pop(page_id, None))
            ends_s = time.monotonic() + LIFE_S
            yield Told("")
            while (now_s := time.monotonic()) < ends_s:
                news = place.news
                try:
                    await asyncio.wait_for(news.wait(), min(BEAT_S, ends_s - now_s))
                except TimeoutError:
                    yield Told("")
                    continue
                if place.sample is not None:
                    for told in viewer.next_told(place.sample, time.monotonic()):
                        live_bytes.inc(len(told.data))
                        yield told
        finally:
            self._leave(watched, place)

    async def close(self) -> None:
        """End the sampler."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

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
            began_s = time.monotonic()
            for watched, place in list(self._places.items()):
                place.sample = await self._sample(watched)
                news, place.news = place.news, asyncio.Event()
                news.set()
            spent_s = time.monotonic() - began_s
            # Never more than half of the time: a page that is slow to look at is looked at less often.
            await asyncio.sleep(max(self._every_s - spent_s, spent_s))

    async def _sample(self, watched: Watched) -> Sample:
        try:
            return await asyncio.wait_for(self._look(watched), LOOK_S_MAX)
        except PenstockError as error:
            return Sample({}, 0, error.public_text)
        except TimeoutError:
            return Sample({}, 0, f"no answer within {LOOK_S_MAX:.0f} s")
        except Exception as error:  # noqa: BLE001 - one page that cannot be shown must not end the others
            _log.error("live_page_failed", url=watched.url, exc_info=error)
            return Sample({}, 0, "the server failed on this page, which is our mistake")


class Viewer:
    """What one viewer was sent, and how much he may be sent now. Pure: the caller tells the time."""

    def __init__(self, known: Mapping[str, str] | None) -> None:
        self._sent: dict[str, str] = dict(known or {})
        self._names = None if known is None else set(known)
        self._budget_bytes = BYTES_PER_S
        self._at_s: float | None = None
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._error: str | None = None

    def next_told(self, sample: Sample, now_s: float) -> list[Told]:
        """What he is told of `sample`."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._budget_bytes = min(2 * BYTES_PER_S, self._budget_bytes + BYTES_PER_S * passed_s)
        if sample.error is not None:
            return self._trouble(sample.error)
        told = self._trouble(None)
        if self._names is not None and self._names != sample.parts.keys():
            if self._budget_bytes >= min(sample.page_bytes, BYTES_PER_S):
                self._budget_bytes -= sample.page_bytes
                self._names = set(sample.parts)
                self._sent, self._waiting = dict(sample.parts), OrderedDict()
                return [*told, Told("stale", "{}")]
            return told
        self._names = set(sample.parts)
        changes = self._changes(sample.parts)
        if changes:
            told.append(Told("changes", msgspec.json.encode(changes).decode()))
        return told

    def _changes(self, parts: Mapping[str, str]) -> dict[str, str]:
        for name, html in parts.items():
            if self._sent.get(name) != html:
                self._waiting.setdefault(name)
        changes: dict[str, str] = {}
        for name in list(self._waiting):
            newest = parts.get(name)
            if newest is None or self._sent.get(name) == newest:
                del self._waiting[name]
                continue
            # As JSON: quotes, colon, comma, and a sign before each quote within.
            cost = len(name) + len(newest) + newest.count('"') + 6
            if self._budget_bytes < min(cost, BYTES_PER_S):
                break
            self._budget_bytes -= cost
            del self._waiting[name]
            changes[name] = self._sent[name] = newest
        return changes

    def _trouble(self, error: str | None) -> list[Told]:
        if error == self._error:
            return []
        self._error = error
        return [Told("trouble", msgspec.json.encode({"text": error or ""}).decode())]
