"""A circuit breaker for PostgreSQL, for callers that can answer without it.

After a timeout or an error the breaker opens for REST_S: calls fail at once. Then one caller tries
while the others still fail. Otherwise every caller would wait its full timeout for a stopped
server, because the system still accepts its connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from headrace.engines.postgres import PostgresDown
from headrace.kernel.errors import Unavailable

REST_S: Final = 2.0
"""How long the breaker stays open after a failure."""
Answer = TypeVar("Answer")


class CircuitBreaker:
    """State shared by all callers that can answer without PostgreSQL."""

    def __init__(self) -> None:
        self._open_until_s = float("-inf")
        self._has_failed = False

    def require_closed(self) -> None:
        """Raise PostgresDown while the breaker is open."""
        if time.monotonic() < self._open_until_s:
            raise _no_answer()

    async def call(self, query: Callable[[], Awaitable[Answer]], *, wait_s: float) -> Answer:
        """The answer of `query` within `wait_s`. Raises: PostgresDown, and errors of `query`."""
        self.require_closed()
        if self._has_failed:
            # This caller tries. Concurrent callers fail until it has finished.
            self._open_until_s = time.monotonic() + wait_s
        try:
            async with asyncio.timeout(wait_s):
                answer = await query()
        except (Unavailable, TimeoutError) as error:
            self._has_failed = True
            self._open_until_s = time.monotonic() + REST_S
            if isinstance(error, Unavailable):
                raise
            raise _no_answer() from error
        self._has_failed = False
        self._open_until_s = float("-inf")
        return answer


def _no_answer() -> PostgresDown:
    return PostgresDown(
        "PostgreSQL did not answer in time, and further queries are skipped for 2 s: check it with"
        " `headrace doctor`, then try again",
        retry_after_s=REST_S,
    )
