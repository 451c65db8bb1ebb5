"""The connections of one event loop to PostgreSQL, kept open between statements.

The driver's pool opens and counts connections. This layer keeps idle connections, because a release
to the driver's pool and the next acquire cost a task and a third of the CPU of a single enqueue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

READ_ONLY: Final = (
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.exceptions.TargetServerAttributeNotMatched,
)
"""The server is a standby, or became one; a new connection may reach the primary."""
FULL: Final = (
    asyncpg.DiskFullError,
    asyncpg.exceptions.OutOfMemoryError,
    asyncpg.exceptions.PostgresIOError,
)
"""The server lacks disk space or memory, or its disk fails."""
DOWN: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    # The server was killed and its connection not yet closed.
    asyncpg.InternalClientError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    *READ_ONLY,
)
REFUSED: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ClientConfigurationError,
)
BUSY: Final = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
ELSEWHERE: Final = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
"""A prepared statement exists on another server connection than the current one."""
UNTRACKED: Final = "unsupported startup parameter"
"""PgBouncer's text for a refused start-up setting; its other errors share the SQLSTATE."""
MISSING: Final = (
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedFunctionError,
    asyncpg.InvalidSchemaNameError,
)
KEPT_S: Final = 60.0
_ARRAYS: Final = ("int2", "int4", "int8", "float8", "bool", "bytea", "timestamptz")
_LEARN_TYPES: Final = f"SELECT {', '.join(f'NULL::{name}[]' for name in _ARRAYS)}"


@dataclass(slots=True)
class Pool:
    """The connections of one event loop."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    opened: Any = None
    kept: list[Any] = field(default_factory=list)
    """Idle connections; the last one used is used first."""
    _releasing: set[asyncio.Task[None]] = field(default_factory=set)
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
        """Take a connection back after success."""
        if self._waiting or not is_fit(connection):
            await self.opened.release(connection)
            return
        self.kept.append(connection)
        if self._timer is None:
            self._schedule_release()

    def release_later(self, connection: Any, *, resets: bool) -> None:
        """Release the connection of a cancelled caller, in the background.

        The driver requests a cancellation from the server and rolls back.
        """
        self._start(self._release(connection, resets=resets))

    def terminate(self, connection: Any) -> None:
        """Terminate a connection on which the server did not respond."""
        with suppress(asyncpg.InterfaceError):  # the driver's pool has taken it back
            connection.terminate()
        self._start(self._release(connection, resets=False))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, connection: Any, *, resets: bool) -> None:
        # The driver's pool drops a connection that is lost here.
        with suppress(*DOWN, asyncpg.PostgresError):
            if resets:
                await clear_session(connection)
            await self.opened.release(connection)

    async def close(self) -> None:
        """Release every connection and close the pool."""
        if self._timer is not None:
            self._timer.cancel()
        while self.kept:
            await self.opened.release(self.kept.pop())
        await self.opened.close()

    def _schedule_release(self) -> None:
        self._kept_least = len(self.kept)
        self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._release_unused)

    def _release_unused(self) -> None:
        """Release connections that were idle since the last run."""
        unused = self.kept[: self._kept_least]
        del self.kept[: self._kept_least]
        for one in unused:
            self._start(self._release(one, resets=False))
        self._timer = None
        if self.kept:
            self._schedule_release()


def is_fit(connection: Any) -> bool:
    """Whether the next caller can use a connection as it is."""
    try:
        return not connection.is_closed() and not connection.is_in_transaction()
    except asyncpg.InterfaceError:
        return False


async def clear_session(connection: Any) -> None:
    """Reset the locks and settings of an open session."""
    if not connection.is_closed():
        await connection.reset()


async def learn_types(connection: Any) -> None:
    """Let a new connection read the array types that queries use, all at once.

    The driver reads unknown types with a recursive query of 2 ms, else once per statement.
    """
    await connection.fetchrow(_LEARN_TYPES)


async def reset_open_transaction(connection: Any) -> None:
    """Roll back a transaction that a cancelled block left open.

    It replaces the driver's reset, which takes a round trip per statement: single statements leave
    no state, and `Postgres.session` resets its own.
    """
    if connection.is_in_transaction():
        await connection.reset()
