"""Wall, monotonic and virtual time, kept apart by type.

PostgreSQL's `now()` alone decides what is due and what has expired. These clocks serve waits and
durations inside a Python process. A test passes a `VirtualClock` and moves it by hand instead of
sleeping.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import NewType, Protocol

MonotonicS = NewType("MonotonicS", float)
"""Seconds of a monotonic clock; only differences have a meaning."""


class Clock(Protocol):
    """A source of time for code that waits."""

    def monotonic_s(self) -> MonotonicS: ...

    def now(self) -> datetime: ...

    async def sleep(self, delay_s: float) -> None: ...


class SystemClock:
    """The clocks of the machine."""

    def monotonic_s(self) -> MonotonicS:
        return MonotonicS(time.monotonic())

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class VirtualClock:
    """A clock for tests that only `advance` moves; sleepers wake in order of their time."""

    def __init__(self, start: datetime | None = None) -> None:
        self._start = start or datetime(2026, 1, 1, tzinfo=UTC)
        self._elapsed_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic_s(self) -> MonotonicS:
        return MonotonicS(self._elapsed_s)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._start.timestamp() + self._elapsed_s, UTC)

    async def sleep(self, delay_s: float) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._elapsed_s + delay_s, waiter))
        await waiter

    def advance(self, seconds: float) -> None:
        """Move time forward and wake the sleepers that are due."""
        self._elapsed_s += seconds
        due = sorted((s for s in self._sleepers if s[0] <= self._elapsed_s), key=lambda s: s[0])
        self._sleepers = [s for s in self._sleepers if s[0] > self._elapsed_s]
        for _, waiter in due:
            if not waiter.done():
                waiter.set_result(None)
