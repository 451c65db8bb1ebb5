"""PostgreSQL's errors as callers see them: what failed, at which server, and what to correct.

The server's own text stays in the cause: it may have values of rows.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from headrace.engines.postgres_pool import (
    BUSY,
    DOWN,
    ELSEWHERE,
    FULL,
    MISSING,
    READ_ONLY,
    REFUSED,
    UNTRACKED,
)
from headrace.engines.postgres_servers import NoPrimary
from headrace.kernel.errors import Conflict, HeadraceError, Unavailable


class PostgresDown(Unavailable):
    """PostgreSQL does not respond; the outcome of a running statement is unknown."""

    code = "postgres.unavailable"
    public = "PostgreSQL does not respond: check it with `headrace doctor`, then try again"
    is_starting = False  # or is stopping or recovering, as it answered


class PostgresRefused(PostgresDown):
    """PostgreSQL refuses the connection: wrong user, password or database in the URL."""

    code = "postgres.refused"


class PostgresFull(PostgresDown):
    """PostgreSQL lacks disk space or memory, or its disk fails; the statement had no effect."""

    code = "postgres.full"
    public = "PostgreSQL lacks disk space or memory: free some, then try again"


class PostgresPooled(Conflict):
    """The URL leads to a pooler in transaction mode, which has no sessions."""

    code = "postgres.pooled"
    public = "PostgreSQL is behind a pooler without sessions: run `headrace doctor` on the server"


class PostgresBusy(Unavailable):
    """A lock or a time limit stopped the statement, without effect."""

    code = "postgres.busy"


class SchemaBehind(Conflict):
    """The database lacks migrations that this code needs."""

    code = "engines.schema_behind"


class ConstraintViolated(Conflict):
    """A row violates the constraint `constraint`."""

    code = "postgres.constraint"

    def __init__(self, text: str, constraint: str | None) -> None:
        super().__init__(text)
        self.constraint = constraint


@contextmanager
def _restore_cancellation() -> Iterator[None]:
    """Raise CancelledError where the driver replaced a cancellation by its own error.

    Releasing a cancelled connection to a silent server raises TimeoutError. A loop that retries on
    errors would then ignore its cancellation.
    """
    try:
        yield
    except (*DOWN, *BUSY) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise asyncio.CancelledError from error
        raise


@contextmanager
def translated_errors(server: str = "") -> Iterator[None]:
    """Translate the driver's errors; `server` names the server that does not respond.

    The server's text stays in the cause, not in the message.
    """
    at = f" at {server}" if server else ""
    try:
        with _restore_cancellation():
            yield
    except HeadraceError:
        raise
    except asyncpg.IntegrityConstraintViolationError as error:
        raise ConstraintViolated(
            f"PostgreSQL refused the row: it violates {error.constraint_name}",
            error.constraint_name,
        ) from error
    except BUSY as error:
        raise PostgresBusy(
            f"PostgreSQL stopped the statement ({type(error).__name__}) without effect: try again",
            retry_after_s=1,
        ) from error
    except MISSING as error:
        if not any(ours in str(error) for ours in ("headrace.", '"headrace"')):
            raise
        raise SchemaBehind(
            f"the database lacks tables or functions of this version ({type(error).__name__}):"
            " run `headrace migrate`"
        ) from error
    except REFUSED as error:
        raise PostgresRefused(_refusal(error, at), retry_after_s=5) from error
    except ELSEWHERE as error:
        raise pooler_error(at) from error
    except (*FULL, *DOWN) as error:
        if UNTRACKED in str(error):
            raise pooler_error(at) from error
        raise _down_error(error, at) from error


def _refusal(error: BaseException, at: str) -> str:
    """What to correct after a refusal; `at` is empty or ` at SERVER`."""
    if isinstance(error, asyncpg.ClientConfigurationError):
        reason = " ".join(str(error.args[0]).split())
        return (
            f"PostgreSQL{at} is not reached: {reason}. Correct the parameters in postgres.url"
            " (HEADRACE_POSTGRES_URL)"
        )
    reason = _reason_of(error)
    return (
        f"PostgreSQL{at} refuses the connection ({reason}): correct user, password, database and"
        " parameters in postgres.url (HEADRACE_POSTGRES_URL), or add a line for this host, user and"
        " database to the server's pg_hba.conf"
    )


def _down_error(error: BaseException, at: str) -> PostgresDown:
    """The error for an outage; `at` is empty or ` at SERVER`."""
    reason = _reason_of(error)
    if isinstance(error, FULL):
        text = f"PostgreSQL{at} lacks disk space or memory ({reason}): free some, then try again"
        return PostgresFull(text, retry_after_s=5)
    if isinstance(error, NoPrimary):
        return PostgresDown(f"PostgreSQL{at}: {error.text}. {error.advice}", retry_after_s=2)
    if isinstance(error, asyncpg.TooManyConnectionsError):
        text = f"PostgreSQL{at} refuses more connections ({reason}): raise max_connections, or the"
        return PostgresDown(f"{text} limit of role or database", retry_after_s=2)
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"PostgreSQL{at} has a certificate that is not accepted ({error.verify_message}):"
        text += " replace it, or correct the host, sslmode or sslrootcert in postgres.url"
        return PostgresDown(f"{text} (HEADRACE_POSTGRES_URL)", retry_after_s=2)
    is_starting = isinstance(error, asyncpg.CannotConnectNowError)
    what = "is read-only" if isinstance(error, READ_ONLY) else "does not respond"
    state = "is starting, stopping or recovering" if is_starting else what
    text = f"PostgreSQL{at} {state} ({reason}): check it with `headrace doctor`, then try again"
    down = PostgresDown(text, retry_after_s=2)
    down.is_starting = is_starting
    return down


def _reason_of(error: BaseException) -> str:
    """The kind of `error`, and the text if the kind alone does not show what to correct."""
    kind, is_clear = type(error).__name__, isinstance(error, ConnectionError | TimeoutError)
    is_vague = isinstance(error, (*REFUSED, OSError)) and not is_clear
    return f"{kind}: {' '.join(str(error).split())[:200]}" if is_vague else kind


def pooler_error(at: str) -> PostgresPooled:
    """The error for a pooler without sessions; `at` is empty or ` at SERVER`."""
    return PostgresPooled(
        f"PostgreSQL{at} is behind a pooler without sessions: set postgres.direct_url"
        " (HEADRACE_POSTGRES_DIRECT_URL) to the server itself; or use the pooler's session mode,"
        " with ignore_startup_parameters = statement_timeout"
    )
