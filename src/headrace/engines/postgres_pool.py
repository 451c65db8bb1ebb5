"""The connections of one event loop to PostgreSQL: kept between statements, given back, cut.

The driver's pool opens and counts them. This layer above it keeps those that are idle, since giving one back to the
driver's pool and taking it again costs a task and 70 us of Python, a third of a single enqueue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

DOWN: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    # A connection used between a dying server's last word and its end (seen under SIGKILL).
    asyncpg.InternalClientError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
)
KEPT_S: Final = 60.0


@dataclass(slots=True)
class Pool:
    """The connections of one event loop, once they are opened."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    opened: Any = None
    kept: list[Any] = field(default_factory=list)
    """The last one used is used first."""
    _giving_back: set[asyncio.Task[None]] = field(default_factory=set)
    _kept_least: int = 0
    _waiting: int = 0
    _timer: asyncio.TimerHandle | None = None

    async def take(self, timeout_s: float) -> Any:
        """A connection for one caller."""
        while self.kept:
            connection = self.kept.pop()
            self._kept_least = min(self._kept_least, len(self.kept))
            if is_fit(connection):
                return connection
            await self.opened.release(connection)
        self._waiting += 1
        try:
            return await self.opened.acquire(timeout=timeout_s)
        finally:
            self._waiting -= 1

    async def put(self, connection: Any) -> None:
        """Take it back from a caller for whom all went well."""
        if self._waiting or not is_fit(connection):
            await self.opened.release(connection)
            return
        self.kept.append(connection)
        if self._timer is None:
            self._plan_return()

    def give_back(self, connection: Any, *, resets: bool) -> None:
        """Take it from a caller who was cancelled, and does not wait for this either.

        The driver requests the server to stop the statement and rolls back; a frozen server takes that without an answer.
        """
        self._start(self._release(connection, resets=resets))

    def cut(self, connection: Any) -> None:
        """Take it from a caller whom the server did not answer: nothing more is sent there."""
        with suppress(asyncpg.InterfaceError):  # the driver's pool has it again already
            connection.terminate()
        self._start(self._release(connection, resets=False))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def _release(self, connection: Any, *, resets: bool) -> None:
        # A connection that is lost while it is given back is out of the driver's pool.
        with suppress(*DOWN, asyncpg.PostgresError):
            if resets:
                await clear_session(connection)
            await self.opened.release(connection)

    async def close(self) -> None:
        """Give everything back and close it."""
        if self._timer is not None:
            self._timer.cancel()
        while self.kept:
            await self.opened.release(self.kept.pop())
        await self.opened.close()

    def _plan_return(self) -> None:
        self._kept_least = len(self.kept)
        self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._return_unused)

    def _return_unused(self) -> None:
        """Give back those that nobody took since the last time."""
        unused = self.kept[: self._kept_least]
        del self.kept[: self._kept_least]
        for one in unused:
            self._start(self._release(one, resets=False))
        self._timer = None
        if self.kept:
            self._plan_return()


def is_fit(connection: Any) -> bool:
    """Whether the next caller can have it as it is; one that was cut is the driver's pool's again already."""
    try:
        return not connection.is_closed() and not connection.is_in_transaction()
    except asyncpg.InterfaceError:
        return False


async def clear_session(connection: Any) -> None:
    """Let a session forget its locks and settings; one that is closed has none."""
    if not connection.is_closed():
        await connection.reset()


async def reset_open_transaction(connection: Any) -> None:
    """Make a connection fit for the next caller; without the round trip of the driver's own reset.

    A statement leaves nothing behind and `session` cleans up itself, so only a transaction that is still
    open (its block was cancelled) needs it.
    """
    if connection.is_in_transaction():
        await connection.reset()
