"""The audit: every action that was tried in the console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.console.seeing import Ask
from headrace.web.sessions import AuditLine

LINES_SHOWN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditView:
    """A page of lines, newest first."""

    lines: list[AuditLine]
    next_url: str | None
    first_url: str | None


async def see_audit(ask: Ask) -> AuditView:
    """The lines, those before the one in the address."""
    before = ask.query.number("before", 0)
    lines = await ask.service("audit").lines(before=before or None, lines_max=LINES_SHOWN + 1)
    has_more = len(lines) > LINES_SHOWN
    shown = lines[:LINES_SHOWN]
    return AuditView(
        lines=shown,
        next_url=ask.url(before=shown[-1].id) if has_more else None,
        first_url=ask.url(before=None) if before else None,
    )
