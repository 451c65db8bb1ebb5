"""Recognize a pooler in transaction mode between this process and PostgreSQL.

Such a pooler runs each transaction of a client on any of its server connections. LISTEN is lost without an
error, a session lock stays on a connection that others use, and prepared statements are missing. PgBouncer
answers settings of a session from its own memory, so only the backend's process id is evidence.
"""

from __future__ import annotations

from typing import Final

from headrace.engines.postgres import Postgres, pooled, translated_errors
from headrace.engines.sql import load_queries
from headrace.kernel.errors import Conflict


class UrlsDiffer(Conflict):
    """`postgres.url` and `postgres.direct_url` lead to different databases: nothing was written to either."""

    code = "postgres.urls_differ"


SQL: Final = load_queries("headrace.engines")
_ROUNDS: Final = 5


async def require_sessions(postgres: Postgres) -> None:
    """Refuse a pooler in transaction mode where sessions are needed. Raises: PostgresPooled, UrlsDiffer.

    A start-up setting that arrived is evidence of a session; without one two clients are compared.
    """
    async with postgres.session() as session:
        has_setting = await session.value(SQL.has_session_setting)
        direct = await session.value(SQL.identity)
    pooled_to = await postgres.value(SQL.identity)
    if direct != pooled_to:
        raise UrlsDiffer(
            "postgres.url and postgres.direct_url lead to different databases, or to different servers"
            f" ({pooled_to} and {direct}, each with the start of its server): correct one of them"
        )
    if not has_setting and await shares_backends(postgres):
        raise pooled("")


async def shares_backends(postgres: Postgres) -> bool:
    """Whether two open connections are served by one backend, or one connection by several."""
    first = await postgres.connect_alone(statement_cache_size=0)
    try:
        second = await postgres.connect_alone(statement_cache_size=0)
        try:
            with translated_errors():
                seen = [
                    (
                        await first.fetchval(SQL.backend.text),
                        await second.fetchval(SQL.backend.text),
                    )
                    for _ in range(_ROUNDS)
                ]
        finally:
            second.terminate()
    finally:
        first.terminate()
    firsts, seconds = {pair[0] for pair in seen}, {pair[1] for pair in seen}
    return len(firsts) > 1 or len(seconds) > 1 or firsts == seconds
