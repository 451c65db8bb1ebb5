"""Single-flight: concurrent identical calls share one execution.

One instance uses one of three ways to execute:

- `call` starts a task. A caller that is cancelled does not cancel the execution.
- `join` runs in the task of the first caller, which saves a task. If that caller is cancelled, a
  waiting caller takes over.
- `begin`, `finish` and `fail` are for an execution driven by callbacks; `join` waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class _LeaderCancelled(Exception):
    """The caller that executed for all was cancelled: a waiting caller must take over."""


class SingleFlight(Generic[K, T]):
    """Executions in progress by key. A result is given to all waiting callers and not kept."""

    def __init__(self) -> None:
        self._in_progress: dict[K, asyncio.Future[T]] = {}

    def __len__(self) -> int:
        return len(self._in_progress)

    def __contains__(self, key: K) -> bool:
        return key in self._in_progress

    async def call(self, key: K, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the execution in progress for `key`, or start `make()` as a task.

        Raises: what `make` raises.
        """
        future = self._in_progress.get(key)
        if future is None:
            future = asyncio.get_running_loop().create_task(make())
            self._in_progress[key] = future
            future.add_done_callback(partial(self._forget, key))
        return await asyncio.shield(future)

    async def join(self, key: K, make: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the execution in progress for `key`, or await `make()` here.

        Raises: what `make` raises.
        """
        while (future := self._in_progress.get(key)) is not None:
            try:
                return await asyncio.shield(future)
            except _LeaderCancelled:
                continue
        self.begin(key)
        try:
            result = await make()
        except BaseException as error:
            self.fail(key, error)
            raise
        self.finish(key, result)
        return result

    def begin(self, key: K) -> None:
        """Register an execution that the caller ends with `finish` or `fail`."""
        self._in_progress[key] = asyncio.get_running_loop().create_future()

    def finish(self, key: K, result: T) -> None:
        """End the execution of `key` and give `result` to all waiting callers."""
        self._in_progress.pop(key).set_result(result)

    def fail(self, key: K, error: BaseException) -> None:
        """End the execution of `key` with `error`.

        After a cancellation a waiting caller retries.
        """
        future = self._in_progress.pop(key)
        is_cancelled = isinstance(error, asyncio.CancelledError)
        future.set_exception(_LeaderCancelled() if is_cancelled else error)
        # Retrieved here, or asyncio logs an error that no caller waited for.
        future.exception()

    async def wait_idle(self) -> None:
        """Wait for the executions that are in progress now."""
        await asyncio.gather(*self._in_progress.values(), return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel the executions in progress and wait for their end."""
        for future in self._in_progress.values():
            future.cancel()
        await self.wait_idle()

    def _forget(self, key: K, done: asyncio.Future[T]) -> None:
        del self._in_progress[key]
        if not done.cancelled():
            # Retrieved here, because all callers may have been cancelled.
            done.exception()
