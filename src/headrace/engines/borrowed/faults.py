"""What can be wrong with a caller's connection, and its driver's errors in our words.

Every driver of PostgreSQL gives the server's SQLSTATE, and what wraps a driver keeps its error as `orig`
(SQLAlchemy) or as the cause (Django): so one table of states serves all. What it has no word for passes as
it is, since the caller knows their driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from headrace.engines.postgres import (
    ConstraintViolated,
    PostgresBusy,
    PostgresDown,
    SchemaBehind,
)
from headrace.kernel.errors import Conflict, Forbidden, HeadraceError, InvalidInput

_BUSY: Final = frozenset({"40001", "40P01", "55P03", "57014"})
_DOWN: Final = frozenset({"57P01", "57P02", "57P03"})
_MISSING: Final = frozenset({"3F000", "42883", "42P01"})
_FAILED: Final = frozenset({"PendingRollbackError", "TransactionManagementError"})
"""How SQLAlchemy and Django refuse a statement in a transaction that has failed."""
_LOST: Final = frozenset({"OperationalError", "InternalClientError"})
"""A connection that ended under a statement, to psycopg, psycopg2 and what stands on them; and, to asyncpg, one that
is used between a dying server's last word and its end."""
_ROLL_BACK: Final = "roll your transaction back"


class ConnectionUnknown(InvalidInput):
    """What was given as `tx` is no connection that our statements can run on."""

    code = "postgres.connection_unknown"


class TransactionUnfit(Conflict):
    """The caller's connection is in no transaction that a row could commit with; nothing was done."""

    code = "postgres.transaction_unfit"


class SchemaDenied(Forbidden):
    """The caller's database user may not use the schema `headrace`."""

    code = "postgres.schema_denied"


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise what the caller's driver says as ours where we have a word for it."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        told = _told(list(_chain(error)))
        if told is None:
            raise
        raise told from error


def _told(errors: list[BaseException]) -> HeadraceError | None:
    """An error and what it came from in our words; None where there are none."""
    state = _first(errors, "sqlstate", "pgcode") or ""
    kinds = {type(error).__name__ for error in errors}
    if state.startswith("23"):
        name = _constraint(errors)
        text = f"PostgreSQL refused the row: it breaks {name}; {_ROLL_BACK}"
        return ConstraintViolated(text, name)
    if state in _BUSY:
        text = f"PostgreSQL gave up ({state}): {_ROLL_BACK} and try it again"
        return PostgresBusy(text, retry_after_s=1)
    if state.startswith("08") or state in _DOWN or (not state and _is_lost(errors, kinds)):
        return PostgresDown(
            "tx: the caller's connection is closed or lost, and its transaction with it: check that"
            " PostgreSQL runs, then do the whole transaction again",
            retry_after_s=2,
        )
    return _unfit(state, kinds)


def _unfit(state: str, kinds: set[str]) -> HeadraceError | None:
    """What is wrong with the caller's transaction, user or database; None where it is none of these."""
    if state == "25P02" or kinds & _FAILED:
        return TransactionUnfit(f"tx: this transaction has failed already: {_ROLL_BACK}")
    if state == "25006":
        return TransactionUnfit("tx: this transaction is read-only: pass one that may write")
    if state in _MISSING:
        return SchemaBehind(
            f"the database of this connection lacks what this version needs ({state}):"
            f" {_ROLL_BACK}, then run `headrace migrate` on that database"
        )
    if state == "42501":
        return SchemaDenied(
            "the database user of this connection may not use the schema headrace: grant it USAGE on"
            " the schema and its sequences, and SELECT, INSERT, UPDATE and DELETE on its tables"
        )
    return None


def _is_lost(errors: list[BaseException], kinds: set[str]) -> bool:
    """Whether the connection is gone, of errors in which the server says nothing."""
    is_closed = "InterfaceError" in kinds and "closed" in str(errors[-1])
    return is_closed or bool(kinds & _LOST) or isinstance(errors[0], OSError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what SQLAlchemy wrapped in it, and what caused either."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "orig", None) or error.__cause__


def _constraint(errors: list[BaseException]) -> str | None:
    """The name of the constraint, which psycopg keeps among the error's details."""
    details = [getattr(error, "diag", None) for error in errors]
    return _first([*errors, *details], "constraint_name")


def _first(causes: list[Any], *names: str) -> str | None:
    """The first text that one of `causes` has under one of `names`."""
    found = (getattr(cause, name, None) for cause in causes for name in names)
    return next((text for text in found if isinstance(text, str) and text), None)
