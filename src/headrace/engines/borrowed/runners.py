"""Our queries on a caller's connection: a class a kind of connection, all with the four ways to run one.

Each looks for the transaction whenever it runs a query. Of proxies that lead to the calling thread's
connection (Django's `connection`, scoped sessions) nothing is read before, and only in that thread.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from headrace.engines.borrowed.faults import ConnectionUnknown, TransactionUnfit, translated_errors
from headrace.engines.postgres import Tx
from headrace.engines.sql import Query, percent_text

Transaction: TypeAlias = Any
"""Whatever holds the caller's open transaction: see `borrow`."""
RunHere: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
callers_thread: ContextVar[RunHere | None] = ContextVar("callers_thread", default=None)
"""Runs a function in the thread that waits for this coroutine; set by whoever lets a thread wait so."""
_IDLE: Final = 0
"""libpq's word for a connection in no transaction."""
_SQLALCHEMY_DRIVERS: Final = ("asyncpg", "psycopg", "psycopg_async", "psycopg2")


class _Record:
    """A row: fields by name and by position."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self._names = names
        self._values = values

    def __getitem__(self, key: str | int) -> Any:
        return self._values[self._names.index(key) if isinstance(key, str) else key]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a statement brought."""

    records: list[Any]
    rows_touched: int

    @classmethod
    def of(cls, names: Sequence[str], rows: Sequence[Any], rowcount: int) -> Answer:
        """From rows as plain tuples; drivers say -1 where they do not know how many were touched."""
        return cls([_Record(names, row) for row in rows], max(0, rowcount))


class OfAsyncpg(Tx):
    """A connection of asyncpg, of its own or out of a pool."""

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        if not self.connection.is_in_transaction():
            raise _unfit("asyncpg connection is in no transaction", "async with c.transaction():")
        with translated_errors():
            yield self.connection


class Borrowed(ABC):
    """A runner over one way to get a statement's answer."""

    def __init__(self, connection: Transaction) -> None:
        self._lent = connection

    @abstractmethod
    async def _answer(self, query: Query, parameters: dict[str, Any]) -> Answer:
        """Run it. Raises: TransactionUnfit, ConnectionUnknown, or the driver's errors."""

    async def all(self, query: Query, **parameters: Any) -> list[Any]:
        """Every row."""
        with translated_errors():
            return (await self._answer(query, parameters)).records

    async def one(self, query: Query, **parameters: Any) -> Any | None:
        """The first row, or None."""
        rows = await self.all(query, **parameters)
        return rows[0] if rows else None

    async def value(self, query: Query, **parameters: Any) -> Any:
        """The first field of the first row, or None."""
        row = await self.one(query, **parameters)
        return None if row is None else row[0]

    async def run(self, query: Query, **parameters: Any) -> int:
        """Run it for its effect; return how many rows it touched."""
        with translated_errors():
            return (await self._answer(query, parameters)).rows_touched


class OfAsyncPsycopg(Borrowed):
    """An AsyncConnection of psycopg 3."""

    async def _answer(self, query: Query, parameters: dict[str, Any]) -> Answer:
        _require_libpq_transaction(self._lent)
        psycopg = sys.modules["psycopg"]
        # Of the plain class: the caller's may number its placeholders or make rows of another shape.
        plain = psycopg.AsyncCursor(self._lent, row_factory=psycopg.rows.tuple_row)
        async with plain as cursor:
            await cursor.execute(percent_text(query), query.named_arguments(parameters))
            rows = await cursor.fetchall() if cursor.description else []
            return Answer.of(_names(cursor), rows, cursor.rowcount)


class OfAsyncSqlalchemy(Borrowed):
    """An AsyncConnection of SQLAlchemy."""

    async def _answer(self, query: Query, parameters: dict[str, Any]) -> Answer:
        connection = await self._opened()
        text, arguments = _for_sqlalchemy(connection.sync_connection, query, parameters)
        return _sqlalchemy_answer(await connection.exec_driver_sql(text, arguments))

    async def _opened(self) -> Any:
        return self._lent


class OfAsyncSession(OfAsyncSqlalchemy):
    """An AsyncSession, scoped or not."""

    async def _opened(self) -> Any:
        return await self._lent.connection()


class Blocking(Borrowed):
    """A connection of a blocking driver: used in the caller's thread."""

    async def _answer(self, query: Query, parameters: dict[str, Any]) -> Answer:
        work = partial(self._answer_now, query, parameters)
        run_here = callers_thread.get()
        answer: Answer = work() if run_here is None else await run_here(work)
        return answer

    @abstractmethod
    def _answer_now(self, query: Query, parameters: dict[str, Any]) -> Answer:
        """As `_answer`."""


class OfCursor(Blocking):
    """A connection with plain cursors."""

    def _answer_now(self, query: Query, parameters: dict[str, Any]) -> Answer:
        with self._cursor() as cursor:
            cursor.execute(percent_text(query), query.named_arguments(parameters))
            rows = cursor.fetchall() if cursor.description else []
            return Answer.of(_names(cursor), rows, cursor.rowcount)

    @abstractmethod
    def _cursor(self) -> Any:
        """A cursor inside the transaction whose rows are tuples. Raises: as `_answer`."""


class OfPsycopg(OfCursor):
    """A Connection of psycopg 3."""

    def _cursor(self) -> Any:
        _require_libpq_transaction(self._lent)
        psycopg = sys.modules["psycopg"]
        return psycopg.Cursor(self._lent, row_factory=psycopg.rows.tuple_row)


class OfPsycopg2(OfCursor):
    """A connection of psycopg2."""

    def _cursor(self) -> Any:
        _require_libpq_transaction(self._lent)
        return self._lent.cursor(cursor_factory=sys.modules["psycopg2"].extensions.cursor)


class OfDjango(OfCursor):
    """Django's connection, or the proxy that leads to the calling thread's."""

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
        return self._lent


class OfDjangoAlias(OfDjango):
    """The name of one of Django's databases."""

    def _opened(self) -> Any:
        connections = sys.modules["django.db"].connections
        if self._lent not in connections:
            raise ConnectionUnknown(
                f"tx {self._lent!r} names no database of Django's: expected one of"
                f" {', '.join(connections)}"
            )
        return connections[self._lent]


class OfSqlalchemy(Blocking):
    """A Connection of SQLAlchemy."""

    def _answer_now(self, query: Query, parameters: dict[str, Any]) -> Answer:
        connection = self._opened()
        text, arguments = _for_sqlalchemy(connection, query, parameters)
        return _sqlalchemy_answer(connection.exec_driver_sql(text, arguments))

    def _opened(self) -> Any:
        return self._lent


class OfSession(OfSqlalchemy):
    """A Session, scoped or not."""

    def _opened(self) -> Any:
        return self._lent.connection()


def _names(cursor: Any) -> tuple[str, ...]:
    return tuple(column[0] for column in cursor.description or ())


def _unfit(what: str, remedy: str) -> TransactionUnfit:
    return TransactionUnfit(
        f"tx: this {what}, so a job would not commit with your rows: pass it inside `{remedy}`"
    )


def _require_libpq_transaction(connection: Any) -> None:
    """Refuse what commits each statement by itself. Raises: TransactionUnfit."""
    if connection.autocommit and connection.info.transaction_status == _IDLE:
        raise _unfit("connection is in autocommit", "with c.transaction():")


def _for_sqlalchemy(
    connection: Any, query: Query, parameters: dict[str, Any]
) -> tuple[str, tuple[Any, ...] | dict[str, Any]]:
    """The query and its arguments as the driver below takes them.

    Raises: ConnectionUnknown, TransactionUnfit.
    """
    dialect = connection.dialect
    if dialect.name != "postgresql" or dialect.driver not in _SQLALCHEMY_DRIVERS:
        raise ConnectionUnknown(
            f"tx is a SQLAlchemy connection over {dialect.name}+{dialect.driver}: it works over"
            " postgresql with asyncpg, psycopg or psycopg2"
        )
    # SQLAlchemy begins by itself at the first statement, unless told to commit each.
    if connection.connection.dbapi_connection.autocommit:
        raise _unfit("SQLAlchemy connection is in AUTOCOMMIT", "with engine.begin() as c:")
    if dialect.driver == "asyncpg":
        return query.text, tuple(query.arguments(parameters))
    return percent_text(query), query.named_arguments(parameters)


def _sqlalchemy_answer(result: Any) -> Answer:
    names, rows = (list(result.keys()), result.fetchall()) if result.returns_rows else ([], [])
    return Answer.of(names, rows, result.rowcount)
