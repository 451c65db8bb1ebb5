"""What people did in the console: who, what, when, from where, and what became of it.

A line is written before its action runs, so that nothing is done without one, and told the outcome after. It keeps the action
as the command line that does the same; what is secret is never a field of an action. Lines are kept for `kept_s`: each new
one takes a few old ones with it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.limits import PAGE_ROWS_MAX

SQL: Final = load_queries("headrace.web")
COMMAND_CHARACTERS_MAX: Final = 4_000
TOLD_CHARACTERS_MAX: Final = 2_000


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """One try of an action. `begun`: its process died in the middle, or it runs now."""

    id: int
    at: datetime
    actor: str
    """The name of a token, or `local`."""
    place: str
    """The address that it was done from."""
    action: str
    command: str
    outcome: str
    told: str | None


class Audit:
    """The verbs on the audit."""

    def __init__(self, postgres: Postgres, *, kept_s: float) -> None:
        self._postgres = postgres
        self._kept_s = kept_s

    async def begin(self, *, actor: str, place: str, action: str, command: str) -> int:
        """Write down what somebody is about to do; the id of the line."""
        line_id: int = await self._postgres.value(
            SQL.begin_audit,
            actor=actor,
            place=place,
            action=action,
            kept_s=self._kept_s,
            command=_storable(command, COMMAND_CHARACTERS_MAX),
        )
        return line_id

    async def end(self, line_id: int, outcome: str, told: str) -> None:
        """Write down what became of it: `done`, `refused` or `failed`."""
        await self._postgres.run(
            SQL.end_audit, id=line_id, outcome=outcome, told=_storable(told, TOLD_CHARACTERS_MAX)
        )

    async def lines(self, *, before: int | None = None, lines_max: int = 100) -> list[AuditLine]:
        """What was done, newest first, at most a page; with `before` lines of smaller ids."""
        if before is not None:
            before = max(0, min(before, 2**63 - 1))
        rows = await self._postgres.all(
            SQL.list_audit, before=before, rows_max=min(lines_max, PAGE_ROWS_MAX)
        )
        return [AuditLine(**row) for row in rows]


def _storable(text: str, most: int) -> str:
    return text.replace("\0", "")[:most]
