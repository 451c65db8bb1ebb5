"""How long callers wait for PostgreSQL where there is something to say without it: once, not each of them.

One that does not answer in time is left alone for REST_S, and everybody is told so at once; then one caller asks again
while the others are still told. Seen with a PostgreSQL that was stopped (SIGSTOP): connections are taken by the system and
nothing comes, so that each question took its whole time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from headrace.engines.postgres import PostgresDown
from headrace.kernel.errors import Unavailable

REST_S: Final = 2.0
"""So long PostgreSQL is left alone after it did not answer."""
Answer = TypeVar("Answer")


class Patience:
    """Shared by all that can do without an answer."""

    def __init__(self) -> None:
        self._rests_until_s = float("-inf")
        self._is_away = False

    def require_awake(self) -> None:
        """Go on where PostgreSQL is not left alone just now. Raises: PostgresDown."""
        if time.monotonic() < self._rests_until_s:
            raise _silent()

    async def ask(self, question: Callable[[], Awaitable[Answer]], *, wait_s: float) -> Answer:
        """The answer, if it comes within `wait_s`. Raises: PostgresDown, and what the question raises."""
        self.require_awake()
        if self._is_away:
            # This caller tries; those that come meanwhile do not.
            self._rests_until_s = time.monotonic() + wait_s
        try:
            async with asyncio.timeout(wait_s):
                answer = await question()
        except (Unavailable, TimeoutError) as error:
            self._is_away = True
            self._rests_until_s = time.monotonic() + REST_S
            if isinstance(error, Unavailable):
                raise
            raise _silent() from error
        self._is_away = False
        self._rests_until_s = float("-inf")
        return answer


def _silent() -> PostgresDown:
    return PostgresDown(
        "PostgreSQL did not answer in time and is left alone for a moment: check that it runs with"
        " `headrace doctor`, then try again",
        retry_after_s=REST_S,
    )
