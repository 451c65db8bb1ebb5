"""Whether commits wait for a synchronous standby that is not connected.

PostgreSQL answers reads then, so its checks pass, while every write waits until its caller gives
up. `pg_stat_replication` shows the state of standbys only to members of pg_read_all_stats, such as
those of pg_monitor. Other roles see how many are connected, and since when their own commits wait.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any, Final

from headrace.engines.postgres import Postgres, Row, Tx
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import Query, load_queries

SQL: Final = load_queries("headrace.engines")
POOL_S: Final = 0.5
"""Wait for the pool before a check opens a connection of its own."""
WAITED_S: Final = 2.0
"""Wait of a commit from which a role without rights reports it."""
_COUNT: Final = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?(\d+)\s*\(", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CommitWait:
    """Why commits wait, and what to do. `waited_s` is the wait of the oldest one, if known."""

    text: str
    fix: str
    waited_s: float = 0.0

    @property
    def summary(self) -> str:
        """The state alone, without names of servers and roles."""
        oldest = f"; the oldest has waited {self.waited_s:.0f} s" if self.waited_s >= 1 else ""
        return f"commits wait for a synchronous standby{oldest}: headrace doctor shows the cause"


async def find_commit_wait(postgres: Postgres) -> CommitWait | None:
    """Why commits wait now; None if they do not. Raises: PostgresDown."""
    return commit_wait_of(await read_apart(postgres, SQL.commit_standbys))


async def read_apart(postgres: Postgres, query: Query) -> Row | None:
    """One row, over a connection of its own if the pool does not return it in time.

    Writes that wait may hold every connection of the pool. Raises: PostgresDown.
    """
    try:
        async with asyncio.timeout(POOL_S):
            return await postgres.one(query)
    except (TimeoutError, PostgresDown):
        connection = await postgres.connect_unpooled()
    try:
        return await Tx(connection).one(query)
    finally:
        connection.terminate()


def commit_wait_of(row: Any) -> CommitWait | None:
    """Why commits wait, by the row of `commit_standbys`."""
    names = row["names"]
    if not names.strip() or row["synchronous_commit"] in ("off", "local"):
        return None
    cause = f"commits wait for a synchronous standby: synchronous_standby_names is {names!r}, and "
    fix = (
        "start the standby, or check its connection to the primary (Patroni: `patronictl list`);"
        " to accept writes without one, set synchronous_standby_names to '' (Patroni:"
        " synchronous_mode_strict: false)"
    )
    counted = _COUNT.match(names)
    needed = int(counted[1]) if counted else 1
    if row["sees_states"] or row["senders"] < needed:
        connected = row["synchronous"] if row["sees_states"] else row["senders"]
        if connected >= needed:
            return None
        found = f"{connected} of {needed} are" if connected else "none is"
        return CommitWait(f"{cause}{found} connected", fix, row["waited_s"])
    if row["waited_s"] < WAITED_S:
        return None
    text = f"{cause}a commit of {row['role']} has waited {row['waited_s']:.0f} s"
    fix = f"{fix}. GRANT pg_monitor TO {row['role']} shows which are connected"
    return CommitWait(text, fix, row["waited_s"])
