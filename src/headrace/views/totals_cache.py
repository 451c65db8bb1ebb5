"""Totals in the memory of a process for `views.cache_ms`, so that hot pages need no Valkey call.

Entries are kept in one window, which ends `cache_ms` after it began; then all of them are dropped.
This needs no time per entry, and a read of cached totals is one dictionary access per id. A window
with ENTRIES_MAX entries ends early, which bounds the memory.

Concurrent reads share the loads of their window: an id is loaded once, however many wait for it.
Stale and unavailable totals are not kept.

A process sees its own hits at once. The total that a hit returned is put into the window, where a
load that began earlier does not replace it, and a new window joins no load of the window before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from headrace.views.model import Total

ENTRIES_MAX: Final = 100_000
"""About 20 MB."""


class _Window:
    """Totals, and the loads in progress, of one period."""

    __slots__ = ("ends_s", "kept", "loads")

    def __init__(self, ends_s: float) -> None:
        self.ends_s = ends_s
        self.kept: dict[str, Total] = {}
        self.loads: dict[str, asyncio.Task[dict[str, Total]]] = {}


class TotalsCache:
    """The totals that this process has read or counted within the last `keep_s`.

    `load` reads totals of ids, in order.
    """

    def __init__(
        self, load: Callable[[list[str]], Awaitable[list[Total]]], *, keep_s: float
    ) -> None:
        self._load = load
        self._keep_s = keep_s
        self._window = _Window(0.0)

    def find(self, names: Sequence[str]) -> list[Total] | None:
        """The totals if all are cached."""
        window = self._window
        if time.monotonic() >= window.ends_s:
            return None
        kept = window.kept
        try:
            return [kept[name] for name in names]
        except KeyError:
            return None

    async def read(self, names: Sequence[str]) -> list[Total]:
        """The totals; missing ones are loaded. Raises: what `load` raises."""
        window = self._current()
        kept, loads = window.kept, window.loads
        missing = [name for name in dict.fromkeys(names) if name not in kept]
        if new := [name for name in missing if name not in loads]:
            task = asyncio.create_task(self._load_into(window, new))
            # Retrieved here, because all callers may have been cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            loads.update(dict.fromkeys(new, task))
        found: dict[str, Total] = {}
        for task in {loads[name] for name in missing}:
            # Shielded: a cancelled caller must not cancel the load of the others.
            found |= await asyncio.shield(task)
        return [kept.get(name) or found[name] for name in names]

    def note(self, totals: Iterable[Total]) -> None:
        """Keep the totals that counted hits returned."""
        kept = self._current().kept
        for total in totals:
            if total.stale or total.total is None:
                kept.pop(total.id, None)
                continue
            older = kept.get(total.id)
            # Replies of concurrent hits may arrive in another order.
            if older is None or older.total is None or older.total < total.total:
                kept[total.id] = total

    def clear(self) -> None:
        """Begin a new window."""
        self._window = _Window(0.0)

    def _current(self) -> _Window:
        now_s = time.monotonic()
        if now_s >= self._window.ends_s or len(self._window.kept) >= ENTRIES_MAX:
            self._window = _Window(now_s + self._keep_s)
        return self._window

    async def _load_into(self, window: _Window, names: list[str]) -> dict[str, Total]:
        try:
            found = {total.id: total for total in await self._load(names)}
        finally:
            for name in names:
                window.loads.pop(name, None)
        for name, total in found.items():
            if not total.stale and total.total is not None:
                window.kept.setdefault(name, total)
        return found
