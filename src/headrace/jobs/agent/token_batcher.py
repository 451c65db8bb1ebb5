"""Handlers' requests for more tokens of a lane, batched: concurrent requests share one statement.

Each statement that takes tokens locks the lane. Requests that arrive while one is running are
therefore sent together in the next one. Sent one by one, hundreds of simultaneous requests would
delay each other and the claims of their host by seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from headrace.jobs.messages import Spend, SpendAnswer
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger

STATEMENTS_AT_ONCE: Final = 3
"""Over all lanes: claims need connections too."""
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)
TakeTokens: TypeAlias = Callable[[int, str, int, float], Awaitable[float | None]]
"""Queue id, lane, starts, longest wait -> seconds to wait; None: longer, nothing taken."""


class TokenBatcher:
    """Take lane tokens by `take_tokens`, one statement at a time per lane."""

    def __init__(self, take_tokens: TakeTokens) -> None:
        self._take_tokens = take_tokens
        self._permits = asyncio.Semaphore(STATEMENTS_AT_ONCE)
        self._lanes: WeakValueDictionary[tuple[int, str], Batcher[Spend, SpendAnswer]] = (
            WeakValueDictionary()
        )
        """By queue id and lane, while a caller waits."""

    async def take(self, queue_id: int, request: Spend) -> SpendAnswer:
        """Consume the tokens that a handler requests; concurrent requests share one statement."""
        key = (queue_id, request.lane)
        batcher = self._lanes.get(key)
        if batcher is None:
            batcher = Batcher(partial(self._answers, key), wait_s=0, runs_at_once=1)
            self._lanes[key] = batcher
        return await batcher.submit(request)

    async def _answers(self, key: tuple[int, str], requests: Sequence[Spend]) -> list[SpendAnswer]:
        """Answer all requests; if their sum is refused, try each half."""
        wait_s = sent_s = None
        starts = sum(request.starts for request in requests)
        wait_max_s = min(request.wait_max_s for request in requests)
        try:
            async with self._permits:
                sent_s = time.monotonic()
                wait_s = await self._take_tokens(*key, starts, wait_max_s)
        except HeadraceError as error:
            _often.warning("spend_failed", lane=key[1], requests=len(requests), error=error.text)
        else:
            if wait_s is None and len(requests) > 1:
                middle = len(requests) // 2
                halves = requests[:middle], requests[middle:]
                return [answer for half in halves for answer in await self._answers(key, half)]
        return [SpendAnswer(request.call, wait_s, sent_s) for request in requests]
