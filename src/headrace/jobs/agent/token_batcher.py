"""Handlers' requests for more tokens of a lane, batched: concurrent requests share one statement.

Each statement that takes tokens locks the lane. Requests that arrive while one is running are
therefore sent together in the next one. Sent one by one, hundreds of simultaneous requests would
delay each other and the claims of their host by seconds.
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
"""Over all lanes: claims need connections too."""
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)
Spend: TypeAlias = Callable[[int, str, int, float], Awaitable[float | None]]
"""Queue id, lane, starts, longest wait -> seconds to wait; None: longer, nothing taken."""


@dataclass(frozen=True, slots=True)
class SpendResult:
    """How long to wait before starting, counted from `sent_s`; None: refused, nothing was taken."""

    wait_s: float | None
    sent_s: float | None
    """`time.monotonic` when the statement was sent."""


REFUSED: Final = SpendResult(None, None)


@dataclass(frozen=True, slots=True)
class _SpendRequest:
    starts: int
    wait_max_s: float
    answer: asyncio.Future[SpendResult]


class TokenBatcher:
    """Take lane tokens by `spend`, one statement at a time per lane."""

    def __init__(self, spend: Spend) -> None:
        self._spend = spend
        self._permits = asyncio.Semaphore(STATEMENTS_AT_ONCE)
        self._requests: dict[tuple[int, str], list[_SpendRequest]] = {}
        self._serving: dict[tuple[int, str], asyncio.Task[None]] = {}

    async def take(
        self, queue_id: int, lane: str, *, starts: int, wait_max_s: float
    ) -> SpendResult:
        """Consume `starts` tokens; concurrent callers share one statement."""
        key = (queue_id, lane)
        answer: asyncio.Future[SpendResult] = asyncio.get_running_loop().create_future()
        self._requests.setdefault(key, []).append(_SpendRequest(starts, wait_max_s, answer))
        if key not in self._serving:
            self._serving[key] = asyncio.create_task(self._serve(key))
        return await answer

    async def _serve(self, key: tuple[int, str]) -> None:
        try:
            while requests := self._requests.pop(key, None):
                await self._answer(key, requests)
        finally:
            del self._serving[key]

    async def _answer(self, key: tuple[int, str], requests: Sequence[_SpendRequest]) -> None:
        """Answer all requests; if their sum is refused, try each half."""
        result = REFUSED
        starts = sum(request.starts for request in requests)
        wait_max_s = min(request.wait_max_s for request in requests)
        try:
            async with self._permits:
                sent_s = time.monotonic()
                result = SpendResult(await self._spend(*key, starts, wait_max_s), sent_s)
        except HeadraceError as error:
            _often.warning("spend_failed", lane=key[1], requests=len(requests), error=error.text)
        else:
            if result.wait_s is None and len(requests) > 1:
                middle = len(requests) // 2
                await self._answer(key, requests[:middle])
                await self._answer(key, requests[middle:])
                return
        for request in requests:
            if not request.answer.done():
                request.answer.set_result(result)
