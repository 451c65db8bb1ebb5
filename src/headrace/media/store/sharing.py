"""Calls that many want at once and that are made once: a herd on one cold object is one question, and one read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Sharing(Generic[K, T]):
    """Calls under way, by what they are for."""

    def __init__(self) -> None:
        self._under_way: dict[K, asyncio.Task[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, key: K) -> bool:
        return key in self._under_way

    async def call(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `make()` gives, or the call of that key gives that is under way; who is cancelled ends no other's."""
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(make())
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(task)

    async def wait_ended(self) -> None:
        """Wait for all that are under way."""
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def cancel(self) -> None:
        """End all that are under way."""
        for task in self._under_way.values():
            task.cancel()
        await self.wait_ended()

    def _end(self, key: K, done: asyncio.Task[T]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            # All who asked may have left; then nobody else looks at it.
            done.exception()
