"""PostgreSQL through asyncpg, the source of truth: pools, transactions and named queries.

Rooms pass `Query` values from their `sql/` folder with plain parameters. A driver's error never
leaves this module: `postgres_errors` translates it. Use `transaction()` for statements that must
commit together; a single statement needs none.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import asyncpg

from headrace.engines.endpoints import server_of
from headrace.engines.postgres_errors import PostgresDown, translated_errors
from headrace.engines.postgres_pool import (
    DOWN,
    Pool,
    clear_session,
    learn_types,
    reset_open_transaction,
)
from headrace.engines.postgres_servers import Connection, Servers
from headrace.engines.sql import Query, load_queries
from headrace.kernel.config import parse_count, parse_duration_s, parse_text, parse_url, setting
from headrace.kernel.errors import Unavailable

if TYPE_CHECKING:
    from headrace.engines.remote import RemoteStatements
    from headrace.engines.replica import Replica

Row: TypeAlias = Any
"""A record: fields by name (`row["id"]`) and by position."""
Value = TypeVar("Value")


def from_row(kind: type[Value], row: Row, /, **computed: Any) -> Value:
    """A struct of type `kind` with the fields of `row` that it has; `computed` values win."""
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    known = set(row.keys())
    found = {name: row[name] for name in names if name in known and name not in computed}
    return kind(**found, **computed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresConfig:
    """Section `postgres`."""

    url: str | None = setting(
        None,
        "URL of PostgreSQL; unset: the embedded server in the data folder.",
        parse_url("postgresql", "postgres"),
        secret=True,
    )
    direct_url: str | None = setting(
        None,
        "URL of the server itself if `url` is a pooler in transaction mode; for LISTEN and session"
        " locks.",
        parse_url("postgresql", "postgres"),
        secret=True,
    )
    replica_url: str | None = setting(
        None,
        "URL of a hot standby that serves series, top lists and lists of the console;"
        " unset: the primary.",
        parse_url("postgresql", "postgres"),
        secret=True,
    )
    replica_lag_max_s: float = setting(
        "30s", "If the standby lags more than this, the primary serves its reads.", parse_duration_s
    )
    connections_max: int = setting("10", "Maximum of connections per process.", parse_count)
    slot_connections_max: int = setting(
        "3", "Maximum of connections per slot (worker process); a host has many slots.", parse_count
    )
    connect_timeout_s: float = setting(
        "5s",
        "Longest wait for a new connection, and for a server that its network no longer reaches.",
        parse_duration_s,
    )
    statement_timeout_s: float = setting("10s", "Time limit of one statement.", parse_duration_s)
    bin: str | None = setting(
        None,
        "Folder of the programs of the embedded PostgreSQL, such as"
        " /usr/lib/postgresql/15/bin; unset: those of the Python package.",
        parse_text,
    )


ANSWER_GRACE_S: Final = 2.0
"""Extra wait for a response after the server's statement timeout."""
IDLE_CHECKS: Final = 2
"""Checks in a row that must find a backend idle: the response may be on its way at the first."""
SQL: Final = load_queries("headrace.engines")


class Runner(ABC):
    """Runs queries: the pool (each statement commits) or a transaction.

    The four ways to run a query use one call in the words of asyncpg.
    """

    @abstractmethod
    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """What asyncpg's `fetch`, `fetchrow`, `fetchval` or `execute` returns for the query."""

    async def all(self, query: Query, **parameters: Any) -> list[Row]:
        """Every row."""
        return list(await self.call("fetch", query, parameters))

    async def one(self, query: Query, **parameters: Any) -> Row | None:
        """The first row, or None."""
        return await self.call("fetchrow", query, parameters)

    async def value(self, query: Query, **parameters: Any) -> Any:
        """The first field of the first row, or None."""
        return await self.call("fetchval", query, parameters)

    async def run(self, query: Query, **parameters: Any) -> int:
        """Run the query for its effect; return the number of rows it touched."""
        status = await self.call("execute", query, parameters)
        last = str(status).rpartition(" ")[2]
        return int(last) if last.isdigit() else 0


class _OnConnection(Runner):
    """Statements on a connection from `_connection`."""

    _wait_s: float | None = None
    """Longest wait for a response; None for the connection's default."""

    @abstractmethod
    def _connection(self) -> AbstractAsyncContextManager[Any]:
        """A connection for one statement, with errors translated."""

    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """As `Runner.call`."""
        async with self._connection() as connection:
            return await getattr(connection, method)(
                query.text, *query.arguments(parameters), timeout=self._wait_s
            )


class Tx(_OnConnection):
    """An open transaction or session; ends with its `async with` block."""

    def __init__(self, connection: Any, postgres: Postgres | None = None) -> None:
        self.connection = connection
        self._postgres = postgres
        """Its other connections check whether a long statement still runs."""
        self._backend: int | None = None

    async def allow_long_statements(self, longest_s: float) -> None:
        """Raise the statement timeout until this transaction or session ends."""
        is_local = self.connection.is_in_transaction()
        text = str(int(longest_s * 1000))
        parameters = {"milliseconds": text, "is_local": is_local}
        self._backend = await self.value(SQL.allow_long_statements, **parameters)
        self._wait_s = longest_s + ANSWER_GRACE_S

    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """As `Runner.call`; a lost response to a long statement is noticed after two checks."""
        if self._postgres is None or self._backend is None:
            return await super().call(method, query, parameters)
        watch = asyncio.create_task(self._watch(self._postgres, self._backend))
        try:
            return await super().call(method, query, parameters)
        finally:
            watch.cancel()

    async def _watch(self, postgres: Postgres, backend: int) -> None:
        """Close the connection once its backend was idle at two checks in a row.

        A proxy whose server is lost keeps the connection open, so that the kernel notices nothing.
        """
        checks_idle = 0
        while checks_idle < IDLE_CHECKS:
            await asyncio.sleep(postgres.usual_wait_s)
            with suppress(Unavailable):
                is_running = await postgres.value(SQL.is_running, backend=backend)
                checks_idle = 0 if is_running else checks_idle + 1
        self.connection.terminate()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        with translated_errors():
            try:
                yield self.connection
            except OSError:
                # No response in time: further statements must fail at once.
                self.connection.terminate()
                raise


class Postgres(_OnConnection):
    """Connections to one PostgreSQL server, with a pool per event loop.

    A connection works only in the loop that opened it, and a process may have several loops: one
    for synchronous callers, or one per `asyncio.run` or test.
    """

    def __init__(self, url: str, config: PostgresConfig, *, role: str = "read-write") -> None:
        direct_url = config.direct_url or url
        self._url = url
        self.servers = Servers(url, role=role, is_shared=config.direct_url is not None)
        self.direct_servers = Servers(direct_url, role=role)
        self._server, self._direct_server = map(_server_of, (url, direct_url))
        self._config = config
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        self.failed_s = float("-inf")
        """Monotonic: when a call of this process failed last because PostgreSQL was down."""
        self.remote: RemoteStatements | None = None
        """In a slot: its agent, which runs statements of jobs outside of a transaction."""
        self.replica: Replica | None = None
        self.reads: Runner = self
        """Runs reads that may lag: on `postgres.replica_url` if it is set."""
        if config.replica_url is not None:
            from headrace.engines.replica import Replica

            self.reads = self.replica = Replica(self, config.replica_url, config)

    async def open(self) -> None:
        """Connect once, to report a wrong URL early. Raises: PostgresDown."""
        async with self._connection():
            pass

    async def close(self) -> None:
        """Close this loop's connections, waiting at most 5 s for running statements."""
        if self.replica is not None:
            await self.replica.close()
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is None or pool.opened is None:
            return
        try:
            await asyncio.wait_for(pool.close(), 5)
        except (TimeoutError, *DOWN):
            pool.opened.terminate()

    def with_own_pool(self, connections_max: int) -> Postgres:
        """The same server with connections of its own."""
        config = replace(self._config, connections_max=connections_max, replica_url=None)
        return Postgres(self._url, config)

    @property
    def remote_timeout_s(self) -> float:
        """Longest wait for `remote`, whose own limits are half of it."""
        return 2 * (self._longest_wait_s() + self.usual_wait_s)

    @property
    def usual_wait_s(self) -> float:
        """Longest wait for the response to a statement without a limit of its own."""
        return self._config.statement_timeout_s + ANSWER_GRACE_S

    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """As `Runner.call`, by the agent of a slot if it takes the statement."""
        if self.remote is not None and self.remote.takes(query, parameters):
            timeout_s = self.remote_timeout_s
            return await self.remote.call(method, query, parameters, timeout_s=timeout_s)
        return await super().call(method, query, parameters)

    @asynccontextmanager
    async def transaction(self, *, is_snapshot: bool = False) -> AsyncIterator[Tx]:
        """Run a block in a transaction: commit at its end, roll back if it raises.

        `is_snapshot`: it only reads, and all its statements see the rows of one moment.
        """
        options = {"isolation": "repeatable_read", "readonly": True} if is_snapshot else {}
        async with self._connection() as connection:
            transaction = connection.transaction(**options)
            await transaction.start()
            try:
                yield Tx(connection, self)
            except (PostgresDown, asyncio.CancelledError):
                # `_connection` rolls back or terminates: wait for a frozen server only once.
                raise
            except BaseException:
                await transaction.rollback()
                raise
            await transaction.commit()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Tx]:
        """One connection without a transaction, for session locks and long reads."""
        if self._config.direct_url is not None:
            connection = await self.connect_unpooled()
            try:
                with translated_errors(self._direct_server):
                    yield Tx(connection, self)
            finally:
                connection.terminate()
            return
        async with self._connection(resets=True) as connection:
            yield Tx(connection, self)

    async def connect_unpooled(self, **options: Any) -> Any:
        """Open a connection to the server outside the pool, for LISTEN; the caller closes it.

        `options` are passed to the driver. Raises: PostgresDown.
        """
        with translated_errors(self._direct_server):
            return await self.direct_servers.connect(**self._options(), **options)

    def _options(self) -> dict[str, Any]:
        timeout_ms = str(int(self._config.statement_timeout_s * 1000))
        return {
            "timeout": self._config.connect_timeout_s,
            # Ends the wait for a frozen server; the server itself ends a slow statement.
            "command_timeout": self.usual_wait_s,
            "server_settings": {"application_name": "headrace", "statement_timeout": timeout_ms},
        }

    def _pool_options(self) -> dict[str, Any]:
        """As `_options`, without settings that a pooler in transaction mode loses."""
        if self._config.direct_url is None:
            return self._options()
        settings = {"application_name": "headrace"}
        return {**self._options(), "server_settings": settings, "statement_cache_size": 0}

    def _longest_wait_s(self) -> float:
        """Longest wait for a connection: one statement of another caller, then one connect."""
        return self.usual_wait_s + self._config.connect_timeout_s

    async def _open_pool(self) -> Pool:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            # Drop the pools of closed loops; collecting them closes their connections.
            for closed in [other for other in list(self._pools) if other.is_closed()]:
                self._pools.pop(closed, None)
            self._pools[loop] = Pool()
        pool = self._pools[loop]
        async with pool.opening:
            if pool.opened is None:
                pool.opened = await asyncpg.create_pool(
                    self._url,
                    connect=self.servers.connect,
                    connection_class=Connection,
                    min_size=0,
                    max_size=max(1, self._config.connections_max),
                    max_inactive_connection_lifetime=60,
                    init=learn_types,
                    reset=reset_open_transaction,
                    **self._pool_options(),
                )
            return pool

    @asynccontextmanager
    async def _connection(self, *, resets: bool = False) -> AsyncIterator[Any]:
        """A connection of the pool; `resets` clears its session state afterwards.

        If the server does not respond, a call ends after one timeout.
        """
        with translated_errors(self._server):
            try:
                pool = self._pools.get(asyncio.get_running_loop())
                if pool is None or pool.opened is None:
                    pool = await self._open_pool()
                connection = await pool.take(self._longest_wait_s())
            except (PostgresDown, *DOWN):
                self.failed_s = time.monotonic()
                raise
            try:
                yield connection
                if resets:
                    await clear_session(connection)
            except asyncio.CancelledError:
                pool.release_later(connection, resets=resets)
                raise
            except (PostgresDown, *DOWN):
                self.failed_s = time.monotonic()
                pool.terminate(connection)
                raise
            except BaseException:
                if resets:
                    await clear_session(connection)
                await pool.opened.release(connection)
                raise
            await pool.put(connection)


def _server_of(url: str) -> str:
    return server_of(url, port=5432, socket=".s.PGSQL.5432")
