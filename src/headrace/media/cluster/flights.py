"""One question for all who ask it at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Abandoned(Exception):
    """Whoever asked for all was cancelled: one of the others must."""


class Flights(Generic[T]):
    """The first asks, the others wait for its answer; nothing is kept once it came.

    The first runs in its own task, so that a question that nobody shares costs one future.
    """

    def __init__(self) -> None:
        self._flying: dict[Hashable, asyncio.Future[T]] = {}

    async def join(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer of `ask`, or of somebody's that is under way. Raises: what `ask` raises."""
        while (flying := self._flying.get(key)) is not None:
            try:
                return await asyncio.shield(flying)
            except _Abandoned:
                continue
        self.open(key)
        try:
            answer = await ask()
        except BaseException as error:
            self.fail(key, error)
            raise
        self.land(key, answer)
        return answer

    def __contains__(self, key: Hashable) -> bool:
        return key in self._flying

    def open(self, key: Hashable) -> None:
        """Begin a flight that the caller ends by `land` or `fail`."""
        self._flying[key] = asyncio.get_running_loop().create_future()

    def land(self, key: Hashable, answer: T) -> None:
        """The answer, for all who wait."""
        self._flying.pop(key).set_result(answer)

    def fail(self, key: Hashable, error: BaseException) -> None:
        """There is none; whoever waits for one that was cancelled asks himself."""
        future = self._flying.pop(key)
        is_cancelled = isinstance(error, asyncio.CancelledError)
        future.set_exception(_Abandoned() if is_cancelled else error)
        future.exception()  # seen: perhaps nobody else waits
