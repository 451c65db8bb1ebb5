"""Our queries on a connection of the caller's driver, so that a job commits with the caller's rows.

    await send_mail.enqueue(to="ann", tx=connection)

`runner_for` accepts asyncpg, psycopg 3 (async or not), psycopg2, SQLAlchemy (connections and
sessions, async or not) and Django's `connection`. It recognizes them by class names and imports
nothing that is not loaded.

A runner never commits, rolls back or changes a setting, and refuses a connection in autocommit. An
error in one of our statements fails the transaction, as any statement's error does; the caller
rolls back. A connection of a blocking driver runs in the thread that waits in `caller_thread`
(Django permits no other), or in the running thread. A proxy for the calling thread's connection
(Django, scoped sessions) is read only in that thread.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from headrace.engines.postgres import Runner, Tx
from headrace.engines.postgres_errors import (
    ConstraintViolated,
    PostgresBusy,
    PostgresDown,
    PostgresFull,
    SchemaBehind,
)
from headrace.engines.remote import Record
from headrace.engines.sql import Query, percent_text
from headrace.kernel.errors import Conflict, Forbidden, HeadraceError, InvalidInput

_BUSY: Final = frozenset({"40001", "40P01", "55P03", "57014"})
_DOWN: Final = frozenset({"57P01", "57P02", "57P03"})
_FULL: Final = frozenset({"53100", "53200", "58030"})
_MISSING: Final = frozenset({"3F000", "42883", "42P01"})
_FAILED: Final = frozenset({"PendingRollbackError", "TransactionManagementError"})
"""Errors of SQLAlchemy and Django for a statement in a failed transaction."""
_LOST: Final = frozenset({"OperationalError", "InternalClientError"})
"""Errors of psycopg, psycopg2 and asyncpg for a connection that closed during a statement."""
_ROLL_BACK: Final = "roll your transaction back"


class ConnectionUnknown(InvalidInput):
    """The value of `tx` is not a supported connection."""

    code = "postgres.connection_unknown"


class TransactionUnfit(Conflict):
    """The caller's connection has no usable transaction; nothing was written."""

    code = "postgres.transaction_unfit"


class SchemaDenied(Forbidden):
    """The caller's database user may not use the schema `headrace`."""

    code = "postgres.schema_denied"


@contextmanager
def translated_errors() -> Iterator[None]:
    """Translate errors of the caller's driver; unknown errors pass unchanged.

    Every PostgreSQL driver provides the server's SQLSTATE, and wrappers keep the driver's error as
    `orig` (SQLAlchemy) or as the cause (Django). One table of states serves all of them.
    """
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        ours = _translated(list(_chain(error)))
        if ours is None:
            raise
        raise ours from error


def _translated(errors: list[BaseException]) -> HeadraceError | None:
    """The HeadraceError for an error and its causes, or None if it is unknown."""
    state = _first(errors, "sqlstate", "pgcode") or ""
    kinds = {type(error).__name__ for error in errors}
    if state.startswith("23"):
        name = _constraint(errors)
        text = f"PostgreSQL refused the row: it violates {name}; {_ROLL_BACK}"
        return ConstraintViolated(text, name)
    if state in _BUSY:
        text = f"PostgreSQL stopped the statement ({state}): {_ROLL_BACK} and try again"
        return PostgresBusy(text, retry_after_s=1)
    if state in _FULL:
        return PostgresFull(
            f"PostgreSQL lacks disk space or memory ({state}): {_ROLL_BACK}, free some, then try"
            " again",
            retry_after_s=5,
        )
    if state.startswith("08") or state in _DOWN or (not state and _is_lost(errors, kinds)):
        return PostgresDown(
            "tx: the connection and its transaction are lost: check that PostgreSQL runs, then"
            " repeat the whole transaction",
            retry_after_s=2,
        )
    return _unusable_transaction(state, kinds)


def _unusable_transaction(state: str, kinds: set[str]) -> HeadraceError | None:
    """The error for an unusable transaction, user or database, or None."""
    if state == "25P02" or kinds & _FAILED:
        return TransactionUnfit(f"tx: this transaction has already failed: {_ROLL_BACK}")
    if state == "25006":
        return TransactionUnfit("tx: this transaction is read-only: pass a read-write transaction")
    if state in _MISSING:
        return SchemaBehind(
            f"the database of this connection lacks tables or functions of this version ({state}):"
            f" {_ROLL_BACK}, then run `headrace migrate` on that database"
        )
    if state == "42501":
        return SchemaDenied(
            "the database user of this connection may not use the schema headrace: grant it USAGE"
            " on the schema and its sequences, and SELECT, INSERT, UPDATE and DELETE on its tables"
        )
    return None


def _is_lost(errors: list[BaseException], kinds: set[str]) -> bool:
    """Whether errors without a SQLSTATE mean a lost connection."""
    is_closed = "InterfaceError" in kinds and "closed" in str(errors[-1])
    return is_closed or bool(kinds & _LOST) or isinstance(errors[0], OSError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, the error that SQLAlchemy wraps in it, and their causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "orig", None) or error.__cause__


def _constraint(errors: list[BaseException]) -> str | None:
    """The name of the violated constraint; psycopg has it in the error's details."""
    details = [getattr(error, "diag", None) for error in errors]
    return _first([*errors, *details], "constraint_name")


def _first(causes: list[Any], *names: str) -> str | None:
    """The first text in an attribute of `names` of one of `causes`."""
    found = (getattr(cause, name, None) for cause in causes for name in names)
    return next((text for text in found if isinstance(text, str) and text), None)


Transaction: TypeAlias = Any
"""An object with the caller's open transaction; see `runner_for`."""
RunHere: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
caller_thread: ContextVar[RunHere | None] = ContextVar("caller_thread", default=None)
"""Runs a function in the thread that waits for this coroutine; the sync bridge sets it."""
_IDLE: Final = 0
"""libpq's status of a connection without a transaction."""
_SQLALCHEMY_DRIVERS: Final = ("asyncpg", "psycopg", "psycopg_async", "psycopg2")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a statement."""

    records: list[Any]
    rows_touched: int

    @classmethod
    def of(cls, names: Sequence[str], rows: Sequence[Any], rowcount: int) -> Result:
        """A result from tuples; a driver's row count of -1 means unknown."""
        return cls([Record(names, row) for row in rows], max(0, rowcount))


class AsyncpgRunner(Tx):
    """A connection of asyncpg, also from a pool."""

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        if not self.connection.is_in_transaction():
            raise _unfit("asyncpg connection is in no transaction", "async with c.transaction():")
        with translated_errors():
            yield self.connection


class CallerRunner(Runner):
    """Queries over `_run` of a connection kind."""

    def __init__(self, connection: Transaction) -> None:
        self._given = connection

    @abstractmethod
    async def _run(self, query: Query, parameters: dict[str, Any]) -> Result:
        """Run a query. Raises: TransactionUnfit, ConnectionUnknown, or the driver's errors."""

    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """As `Runner.call`."""
        with translated_errors():
            result = await self._run(query, parameters)
        first = result.records[0] if result.records else None
        match method:
            case "fetch":
                return result.records
            case "fetchrow":
                return first
            case "fetchval":
                return None if first is None else first[0]
            case _:
                return result.rows_touched


class AsyncPsycopgRunner(CallerRunner):
    """An AsyncConnection of psycopg 3."""

    async def _run(self, query: Query, parameters: dict[str, Any]) -> Result:
        _require_libpq_transaction(self._given)
        psycopg = sys.modules["psycopg"]
        # The plain class: the caller's may use other placeholders or row types.
        plain = psycopg.AsyncCursor(self._given, row_factory=psycopg.rows.tuple_row)
        async with plain as cursor:
            await cursor.execute(percent_text(query), query.named_arguments(parameters))
            rows = await cursor.fetchall() if cursor.description else []
            return Result.of(_names(cursor), rows, cursor.rowcount)


class AsyncSqlalchemyRunner(CallerRunner):
    """An AsyncConnection of SQLAlchemy."""

    async def _run(self, query: Query, parameters: dict[str, Any]) -> Result:
        connection = await self._opened()
        text, arguments = _for_sqlalchemy(connection.sync_connection, query, parameters)
        return _sqlalchemy_answer(await connection.exec_driver_sql(text, arguments))

    async def _opened(self) -> Any:
        return self._given


class AsyncSessionRunner(AsyncSqlalchemyRunner):
    """An AsyncSession, scoped or not."""

    async def _opened(self) -> Any:
        return await self._given.connection()


class BlockingRunner(CallerRunner):
    """A connection of a blocking driver, which runs in the caller's thread."""

    async def _run(self, query: Query, parameters: dict[str, Any]) -> Result:
        work = partial(self._run_now, query, parameters)
        run_here = caller_thread.get()
        answer: Result = work() if run_here is None else await run_here(work)
        return answer

    @abstractmethod
    def _run_now(self, query: Query, parameters: dict[str, Any]) -> Result:
        """As `_run`."""


class CursorRunner(BlockingRunner):
    """A connection with plain cursors."""

    def _run_now(self, query: Query, parameters: dict[str, Any]) -> Result:
        with self._cursor() as cursor:
            cursor.execute(percent_text(query), query.named_arguments(parameters))
            rows = cursor.fetchall() if cursor.description else []
            return Result.of(_names(cursor), rows, cursor.rowcount)

    @abstractmethod
    def _cursor(self) -> Any:
        """A cursor of the transaction with rows as tuples. Raises: as `_run`."""


class PsycopgRunner(CursorRunner):
    """A Connection of psycopg 3."""

    def _cursor(self) -> Any:
        _require_libpq_transaction(self._given)
        psycopg = sys.modules["psycopg"]
        return psycopg.Cursor(self._given, row_factory=psycopg.rows.tuple_row)


class Psycopg2Runner(CursorRunner):
    """A connection of psycopg2."""

    def _cursor(self) -> Any:
        _require_libpq_transaction(self._given)
        return self._given.cursor(cursor_factory=sys.modules["psycopg2"].extensions.cursor)


class DjangoRunner(CursorRunner):
    """Django's connection, or its proxy for the calling thread."""

    def _cursor(self) -> Any:
        connection = self._opened()
        vendor = getattr(connection, "vendor", type(connection).__name__)
        if vendor != "postgresql":
            raise ConnectionUnknown(
                f"tx leads to {vendor!r}: pass the Django connection whose ENGINE is"
                " django.db.backends.postgresql"
            )
        if not connection.in_atomic_block and connection.get_autocommit():
            raise _unfit("Django connection is in autocommit", "with transaction.atomic():")
        return connection.cursor()

    def _opened(self) -> Any:
        return self._given


class DjangoAliasRunner(DjangoRunner):
    """The name of one of Django's databases."""

    def _opened(self) -> Any:
        connections = sys.modules["django.db"].connections
        if self._given not in connections:
            raise ConnectionUnknown(
                f"tx {self._given!r} is not a database of Django: expected one of"
                f" {', '.join(connections)}"
            )
        return connections[self._given]


class SqlalchemyRunner(BlockingRunner):
    """A Connection of SQLAlchemy."""

    def _run_now(self, query: Query, parameters: dict[str, Any]) -> Result:
        connection = self._opened()
        text, arguments = _for_sqlalchemy(connection, query, parameters)
        return _sqlalchemy_answer(connection.exec_driver_sql(text, arguments))

    def _opened(self) -> Any:
        return self._given


class SessionRunner(SqlalchemyRunner):
    """A Session, scoped or not."""

    def _opened(self) -> Any:
        return self._given.connection()


def _names(cursor: Any) -> tuple[str, ...]:
    return tuple(column[0] for column in cursor.description or ())


def _unfit(what: str, remedy: str) -> TransactionUnfit:
    return TransactionUnfit(
        f"tx: this {what}, so a job would not commit with your rows: pass it inside `{remedy}`"
    )


def _require_libpq_transaction(connection: Any) -> None:
    """Refuse a connection in autocommit. Raises: TransactionUnfit."""
    if connection.autocommit and connection.info.transaction_status == _IDLE:
        raise _unfit("connection is in autocommit", "with c.transaction():")


def _for_sqlalchemy(
    connection: Any, query: Query, parameters: dict[str, Any]
) -> tuple[str, tuple[Any, ...] | dict[str, Any]]:
    """The query and its arguments in the style of the underlying driver.

    Raises: ConnectionUnknown, TransactionUnfit.
    """
    dialect = connection.dialect
    if dialect.name != "postgresql" or dialect.driver not in _SQLALCHEMY_DRIVERS:
        raise ConnectionUnknown(
            f"tx is a SQLAlchemy connection over {dialect.name}+{dialect.driver}: use postgresql"
            " with asyncpg, psycopg or psycopg2"
        )
    # SQLAlchemy begins a transaction at the first statement, except in AUTOCOMMIT.
    if connection.connection.dbapi_connection.autocommit:
        raise _unfit("SQLAlchemy connection is in AUTOCOMMIT", "with engine.begin() as c:")
    if dialect.driver == "asyncpg":
        return query.text, tuple(query.arguments(parameters))
    return percent_text(query), query.named_arguments(parameters)


def _sqlalchemy_answer(result: Any) -> Result:
    names, rows = (list(result.keys()), result.fetchall()) if result.returns_rows else ([], [])
    return Result.of(names, rows, result.rowcount)


_RUNNERS: Final[dict[tuple[str, str], Callable[[Transaction], Runner]]] = {
    ("asyncpg", "Connection"): AsyncpgRunner,
    ("asyncpg", "PoolConnectionProxy"): AsyncpgRunner,
    ("psycopg", "AsyncConnection"): AsyncPsycopgRunner,
    ("psycopg", "Connection"): PsycopgRunner,
    ("psycopg2", "connection"): Psycopg2Runner,
    ("sqlalchemy", "AsyncConnection"): AsyncSqlalchemyRunner,
    ("sqlalchemy", "AsyncSession"): AsyncSessionRunner,
    ("sqlalchemy", "async_scoped_session"): AsyncSessionRunner,
    ("sqlalchemy", "Connection"): SqlalchemyRunner,
    ("sqlalchemy", "Session"): SessionRunner,
    ("sqlalchemy", "scoped_session"): SessionRunner,
    ("django", "ConnectionProxy"): DjangoRunner,
    ("django", "BaseDatabaseWrapper"): DjangoRunner,
}
"""By package and class name, most derived class first."""


def runner_for(connection: Transaction) -> Runner:
    """A runner of our queries on the caller's connection, within the caller's transaction.

    Each query checks that the connection is in a transaction. Raises: ConnectionUnknown.
    """
    if isinstance(connection, Tx | CallerRunner):
        return connection
    for kind in type(connection).__mro__:
        runner = _RUNNERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if runner is not None:
            return runner(connection)
    if isinstance(connection, str) and "django.db" in sys.modules:
        return DjangoAliasRunner(connection)
    kind = type(connection)
    raise ConnectionUnknown(
        f"tx is a {kind.__module__}.{kind.__qualname__}: pass, inside its transaction, an asyncpg,"
        " psycopg, psycopg2 or SQLAlchemy connection, a SQLAlchemy session or Django's connection"
    )
