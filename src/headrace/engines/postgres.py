"""PostgreSQL through asyncpg: the truth. A pool, transactions, named queries, and its errors in our words.

asyncpg was measured 1.1 to 7 times psycopg on the batches this product lives on (prototypes of 2026-11-21,
PostgreSQL 18, 2 cores). Rooms pass `Query` values from their own `sql/` folder and plain parameters; a
driver's error never leaves this file. Whoever needs several statements to hold together opens
`transaction()`; a single statement needs none.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import asyncpg

from headrace.engines.endpoints import server_of
from headrace.engines.postgres_pool import DOWN, Pool, clear_session, reset_open_transaction
from headrace.engines.sql import Query, load_queries
from headrace.kernel.config import parse_count, parse_duration_s, parse_url, setting
from headrace.kernel.errors import Conflict, HeadraceError, Unavailable

Row: TypeAlias = Any
"""A record: fields by name (`row["id"]`) and by position."""

_REFUSED: Final = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)
_BUSY: Final = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
_ELSEWHERE: Final = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
"""A prepared statement is on another server connection than the one that runs it now."""
_UNTRACKED: Final = "unsupported startup parameter"
"""How PgBouncer refuses a setting of a new connection; its other faults have the same SQLSTATE."""
_MISSING: Final = (
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedFunctionError,
    asyncpg.InvalidSchemaNameError,
)


class PostgresDown(Unavailable):
    """PostgreSQL does not answer; nothing is known of a statement that was under way."""

    code = "postgres.unavailable"

    @property
    def public_text(self) -> str:
        """Without the server's address, which is no caller's business."""
        return (
            "PostgreSQL does not answer: check that it runs with `headrace doctor`, then try again"
        )


class PostgresRefused(PostgresDown):
    """PostgreSQL answers and does not let us in: a wrong user, password or database in the URL."""

    code = "postgres.refused"


class PostgresPooled(Conflict):
    """The URL leads to a pooler in transaction mode, which offers no LISTEN, session locks or prepared statements."""

    code = "postgres.pooled"

    @property
    def public_text(self) -> str:
        """Without the server's address, which is no caller's business."""
        return "PostgreSQL is behind a pooler that keeps no sessions: run `headrace doctor` there"


class PostgresBusy(Unavailable):
    """A lock or a time limit stopped the statement; it had no effect."""

    code = "postgres.busy"


class SchemaBehind(Conflict):
    """The database lacks migrations that this code needs."""

    code = "engines.schema_behind"


class ConstraintViolated(Conflict):
    """A row breaks a rule of the schema; `constraint` names it, and rooms translate it."""

    code = "postgres.constraint"

    def __init__(self, text: str, constraint: str | None) -> None:
        super().__init__(text)
        self.constraint = constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresConfig:
    """Section `postgres`."""

    url: str | None = setting(
        None,
        "Where PostgreSQL answers; unset: the embedded one in the data folder.",
        parse_url("postgresql", "postgres"),
        secret=True,
    )
    direct_url: str | None = setting(
        None,
        "The server itself, where `url` leads to a pooler in transaction mode; for LISTEN and locks of sessions.",
        parse_url("postgresql", "postgres"),
        secret=True,
    )
    connections_max: int = setting("10", "Connections a process may hold.", parse_count)
    slot_connections_max: int = setting(
        "3", "Connections a slot may hold: there are many slots on a host.", parse_count
    )
    connect_timeout_s: float = setting("5s", "Longest wait for a new connection.", parse_duration_s)
    statement_timeout_s: float = setting("10s", "Longest run of one statement.", parse_duration_s)


ANSWER_GRACE_S: Final = 2.0
"""An answer is awaited that much longer than the server lets its statement run."""
SQL: Final = load_queries("headrace.engines")


class Runner(Protocol):
    """What runs a query: the pool itself (one statement, its own commit) or a transaction."""

    async def all(self, query: Query, **parameters: Any) -> list[Row]: ...

    async def one(self, query: Query, **parameters: Any) -> Row | None: ...

    async def value(self, query: Query, **parameters: Any) -> Any: ...

    async def run(self, query: Query, **parameters: Any) -> int: ...


class _Statements(ABC):
    """The four ways to run a query, over whatever connection `_connection` hands out."""

    _wait_s: float | None = None
    """Longest wait for an answer; None: what the connection was opened with."""

    @abstractmethod
    def _connection(self) -> AbstractAsyncContextManager[Any]:
        """A connection to run one statement on, with errors translated."""

    async def all(self, query: Query, **parameters: Any) -> list[Row]:
        """Every row."""
        return list(await self._ask("fetch", query, parameters))

    async def one(self, query: Query, **parameters: Any) -> Row | None:
        """The first row, or None."""
        return await self._ask("fetchrow", query, parameters)

    async def value(self, query: Query, **parameters: Any) -> Any:
        """The first field of the first row, or None."""
        return await self._ask("fetchval", query, parameters)

    async def run(self, query: Query, **parameters: Any) -> int:
        """Run it for its effect; return how many rows it touched."""
        status = await self._ask("execute", query, parameters)
        last = str(status).rpartition(" ")[2]
        return int(last) if last.isdigit() else 0

    async def _ask(self, way: str, query: Query, parameters: dict[str, Any]) -> Any:
        """What the driver's method `way` answers to the query."""
        async with self._connection() as connection:
            return await getattr(connection, way)(
                query.text, *query.arguments(parameters), timeout=self._wait_s
            )


class Tx(_Statements):
    """An open transaction; ends with the `async with` block that made it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def allow_long_statements(self, longest_s: float) -> None:
        """Let statements run that long, until this transaction or session ends."""
        is_local = self.connection.is_in_transaction()
        text = str(int(longest_s * 1000))
        await self.one(SQL.allow_long_statements, milliseconds=text, is_local=is_local)
        self._wait_s = longest_s + ANSWER_GRACE_S

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        with translated_errors():
            try:
                yield self.connection
            except OSError:
                # No answer in time: whatever the caller sends next fails at once.
                self.connection.terminate()
                raise


class Postgres(_Statements):
    """A pool of connections to one PostgreSQL: one for each event loop that uses it.

    Connections cannot leave the loop that opened them, and a process may have several: the loop of
    sync callers beside its own, or one loop after another (each `asyncio.run`, each test).
    """

    def __init__(self, url: str, config: PostgresConfig) -> None:
        self._url, self._direct_url = url, config.direct_url or url
        self._server, self._direct_server = map(_server_of, (url, self._direct_url))
        self._config = config
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}

    async def open(self) -> None:
        """Connect once, so that a wrong URL is told at once. Raises: PostgresDown."""
        async with self._connection():
            pass

    async def close(self) -> None:
        """Give this loop's connections back, waiting at most 5 s for statements under way."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is None or pool.opened is None:
            return
        try:
            await asyncio.wait_for(pool.close(), 5)
        except (TimeoutError, *DOWN):
            pool.opened.terminate()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        async with self._connection() as connection:
            transaction = connection.transaction()
            await transaction.start()
            try:
                yield Tx(connection)
            except (PostgresDown, asyncio.CancelledError):
                # `_connection` rolls back, or cuts it: nobody waits for a frozen server twice.
                raise
            except BaseException:
                await transaction.rollback()
                raise
            await transaction.commit()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Tx]:
        """One connection without a transaction, for session locks and long reads."""
        if self._config.direct_url is not None:
            connection = await self.connect_alone()
            try:
                with translated_errors(self._direct_server):
                    yield Tx(connection)
            finally:
                connection.terminate()
            return
        async with self._connection(resets=True) as connection:
            yield Tx(connection)

    async def connect_alone(self, **options: Any) -> Any:
        """Open a connection outside the pool, to the server itself, for LISTEN; the caller closes it.

        `options` are the driver's. Raises: PostgresDown.
        """
        with translated_errors(self._direct_server):
            return await asyncpg.connect(self._direct_url, **self._options(), **options)

    def _options(self) -> dict[str, Any]:
        timeout_ms = str(int(self._config.statement_timeout_s * 1000))
        return {
            "timeout": self._config.connect_timeout_s,
            # The server ends a statement that takes too long; this ends the wait for one that is frozen.
            "command_timeout": self._config.statement_timeout_s + ANSWER_GRACE_S,
            "server_settings": {"application_name": "headrace", "statement_timeout": timeout_ms},
        }

    def _pool_options(self) -> dict[str, Any]:
        """As `_options`, without what a pooler in transaction mode cannot keep from one statement to the next."""
        if self._config.direct_url is None:
            return self._options()
        settings = {"application_name": "headrace"}
        return {**self._options(), "server_settings": settings, "statement_cache_size": 0}

    def _longest_wait_s(self) -> float:
        """For a connection: another caller's statement ends within its own bounds, and then one is opened at worst."""
        config = self._config
        return config.statement_timeout_s + ANSWER_GRACE_S + config.connect_timeout_s

    async def _open_pool(self) -> Pool:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            # Connections of a loop that was closed are cut when they are collected, here at the latest.
            for closed in [other for other in list(self._pools) if other.is_closed()]:
                self._pools.pop(closed, None)
            self._pools[loop] = Pool()
        pool = self._pools[loop]
        async with pool.opening:
            if pool.opened is None:
                pool.opened = await asyncpg.create_pool(
                    self._url,
                    min_size=0,
                    max_size=max(1, self._config.connections_max),
                    max_inactive_connection_lifetime=60,
                    reset=reset_open_transaction,
                    **self._pool_options(),
                )
            return pool

    @asynccontextmanager
    async def _connection(self, *, resets: bool = False) -> AsyncIterator[Any]:
        """A connection of the pool; with `resets` it forgets its session afterwards.

        Where the server does not answer, a call ends after the one wait: a statement's, or that for a connection.
        """
        with translated_errors(self._server):
            pool = self._pools.get(asyncio.get_running_loop())
            if pool is None or pool.opened is None:
                pool = await self._open_pool()
            connection = await pool.take(self._longest_wait_s())
            try:
                yield connection
                if resets:
                    await clear_session(connection)
            except asyncio.CancelledError:
                pool.give_back(connection, resets=resets)
                raise
            except (PostgresDown, *DOWN):
                pool.cut(connection)
                raise
            except BaseException:
                if resets:
                    await clear_session(connection)
                await pool.opened.release(connection)
                raise
            await pool.put(connection)


def _server_of(url: str) -> str:
    return server_of(url, port=5432, socket=".s.PGSQL.5432")


@contextmanager
def _kept_cancellation() -> Iterator[None]:
    """Go on with a task's cancellation where the driver put an error of its own in its place.

    Giving a cancelled connection back to a silent server ends in a TimeoutError. As an error worth a
    retry it would keep a loop alive that was told to end.
    """
    try:
        yield
    except (*DOWN, *_BUSY) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise asyncio.CancelledError from error
        raise


@contextmanager
def translated_errors(server: str = "") -> Iterator[None]:
    """Raise a driver's error as ours, naming `server` where nothing answers.

    The server's own text stays in the cause, not in the message.
    """
    at = f" at {server}" if server else ""
    try:
        with _kept_cancellation():
            yield
    except HeadraceError:
        raise
    except asyncpg.IntegrityConstraintViolationError as error:
        raise ConstraintViolated(
            f"PostgreSQL refused the row: it breaks {error.constraint_name}", error.constraint_name
        ) from error
    except _BUSY as error:
        raise PostgresBusy(
            f"PostgreSQL gave up ({type(error).__name__}): nothing was done, try again",
            retry_after_s=1,
        ) from error
    except _MISSING as error:
        if not any(ours in str(error) for ours in ("headrace.", '"headrace"')):
            raise
        raise SchemaBehind(
            f"the database lacks what this version needs ({type(error).__name__}):"
            " run `headrace migrate`"
        ) from error
    except _REFUSED as error:
        raise PostgresRefused(
            f"PostgreSQL{at} takes no connection ({type(error).__name__}): correct user, password and"
            " database in postgres.url (HEADRACE_POSTGRES_URL)",
            retry_after_s=5,
        ) from error
    except _ELSEWHERE as error:
        raise pooled(at) from error
    except DOWN as error:
        if _UNTRACKED in str(error):
            raise pooled(at) from error
        raise PostgresDown(
            f"PostgreSQL{at} does not answer ({type(error).__name__}): check that it runs with"
            " `headrace doctor`, then try again",
            retry_after_s=2,
        ) from error


def pooled(at: str) -> PostgresPooled:
    """Return the error for a pooler that keeps no sessions; `at` is empty or ` at SERVER`."""
    return PostgresPooled(
        f"PostgreSQL{at} is behind a pooler that keeps no sessions: set postgres.direct_url"
        " (HEADRACE_POSTGRES_DIRECT_URL) to the server itself; or use the pooler's session mode, with"
        " ignore_startup_parameters = statement_timeout"
    )
