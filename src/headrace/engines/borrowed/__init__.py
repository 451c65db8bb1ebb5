"""The caller's own connection as a runner of our queries, so that a job commits with the caller's rows.

    await send_mail.enqueue(to="ann", tx=connection)

`borrow` takes what the caller has: asyncpg, psycopg 3 (async or not), psycopg2, SQLAlchemy (connections and
sessions, async or not) or Django's `connection`. What it is, is told by the names of its classes: nothing
is imported that is not there already.

It never commits, rolls back or changes a setting, and it refuses a connection that would commit by
itself. An error in one of our statements leaves the transaction failed, as any statement's error does: it is
the caller's to roll back. A connection of a blocking driver is used in the thread that waits in
`callers_thread` where there is one (Django forbids any other), else in the running thread.

`runners.py` runs a query, a class a kind of connection; `faults.py` says drivers' errors in our words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, cast

from headrace.engines.borrowed import runners
from headrace.engines.borrowed.faults import ConnectionUnknown, SchemaDenied, TransactionUnfit
from headrace.engines.borrowed.runners import Transaction, callers_thread
from headrace.engines.postgres import Runner, Tx

__all__ = [
    "ConnectionUnknown",
    "SchemaDenied",
    "Transaction",
    "TransactionUnfit",
    "borrow",
    "callers_thread",
]

_RUNNERS: Final[dict[tuple[str, str], Callable[[Transaction], Runner]]] = {
    ("asyncpg", "Connection"): runners.OfAsyncpg,
    ("asyncpg", "PoolConnectionProxy"): runners.OfAsyncpg,
    ("psycopg", "AsyncConnection"): runners.OfAsyncPsycopg,
    ("psycopg", "Connection"): runners.OfPsycopg,
    ("psycopg2", "connection"): runners.OfPsycopg2,
    ("sqlalchemy", "AsyncConnection"): runners.OfAsyncSqlalchemy,
    ("sqlalchemy", "AsyncSession"): runners.OfAsyncSession,
    ("sqlalchemy", "async_scoped_session"): runners.OfAsyncSession,
    ("sqlalchemy", "Connection"): runners.OfSqlalchemy,
    ("sqlalchemy", "Session"): runners.OfSession,
    ("sqlalchemy", "scoped_session"): runners.OfSession,
    ("django", "ConnectionProxy"): runners.OfDjango,
    ("django", "BaseDatabaseWrapper"): runners.OfDjango,
}
"""By package and class name, nearest class first."""


def borrow(connection: Transaction) -> Runner:
    """A runner of our queries on the caller's connection, within the caller's transaction.

    Whether it is in a transaction is looked at whenever a query runs. Raises: ConnectionUnknown.
    """
    if isinstance(connection, Tx | runners.Borrowed):
        return cast("Runner", connection)
    for kind in type(connection).__mro__:
        runner = _RUNNERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if runner is not None:
            return runner(connection)
    if isinstance(connection, str) and "django.db" in sys.modules:
        return runners.OfDjangoAlias(connection)
    kind = type(connection)
    raise ConnectionUnknown(
        f"tx is a {kind.__module__}.{kind.__qualname__}: pass, inside its transaction, an asyncpg,"
        " psycopg, psycopg2 or SQLAlchemy connection, a SQLAlchemy session or Django's connection"
    )
