"""Further starts that handlers ask for: those of one lane share a statement.

A lane is locked for each statement that takes of it, so whoever asks while one is under way is asked for
together with the others by the next. One by one, some hundred asks of a moment (a host that redirects, starts that
came too late) kept each other and the claims of their host waiting for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger

STATEMENTS_AT_ONCE: Final = 3
"""Of all lanes: claims need connections too."""
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)
Spend: TypeAlias = Callable[[int, str, int, float], Awaitable[float | None]]
"""Queue, lane, starts, longest wait -> how long to wait, or None where that is too long."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Wait so long and begin; None: refused, nothing was taken. Counts from `sent_s` (`time.monotonic`)."""

    wait_s: float | None
    sent_s: float | None


NOTHING: Final = Granted(None, None)


@dataclass(frozen=True, slots=True)
class _Ask:
    starts: int
    wait_max_s: float
    answer: asyncio.Future[Granted]


class Spending:
    """Asks for starts by `spend`, for many at a time."""

    def __init__(self, spend: Spend) -> None:
        self._spend = spend
        self._places = asyncio.Semaphore(STATEMENTS_AT_ONCE)
        self._asked: dict[tuple[int, str], list[_Ask]] = {}
        self._serving: dict[tuple[int, str], asyncio.Task[None]] = {}

    async def ask(self, queue_id: int, lane: str, *, starts: int, wait_max_s: float) -> Granted:
        """Take `starts`, together with whoever else asks for the lane meanwhile."""
        key = (queue_id, lane)
        answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(key, []).append(_Ask(starts, wait_max_s, answer))
        if key not in self._serving:
            self._serving[key] = asyncio.create_task(self._serve(key))
        return await answer

    async def _serve(self, key: tuple[int, str]) -> None:
        try:
            while asks := self._asked.pop(key, None):
                await self._answer(key, asks)
        finally:
            del self._serving[key]

    async def _answer(self, key: tuple[int, str], asks: Sequence[_Ask]) -> None:
        """What is too much together is asked for by halves."""
        granted = NOTHING
        starts, wait_max_s = sum(ask.starts for ask in asks), min(ask.wait_max_s for ask in asks)
        try:
            async with self._places:
                sent_s = time.monotonic()
                granted = Granted(await self._spend(*key, starts, wait_max_s), sent_s)
        except HeadraceError as error:
            _often.warning("spend_failed", lane=key[1], asks=len(asks), error=error.text)
        else:
            if granted.wait_s is None and len(asks) > 1:
                middle = len(asks) // 2
                await self._answer(key, asks[:middle])
                await self._answer(key, asks[middle:])
                return
        for ask in asks:
            if not ask.answer.done():
                ask.answer.set_result(granted)
