"""Settings and errors of the console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.kernel.config import parse_duration_s, setting
from headrace.kernel.errors import Forbidden, InvalidInput, NotFound, Unauthenticated, Unavailable
from headrace.kernel.metrics import counter, gauge

PREFIX: Final = "/console"
BODY_BYTES_MAX: Final = 256 * 1024

csp_reports = counter(
    "console_csp_reports_total", "Reports of browsers that a page broke the console's policy."
)
live_viewers = gauge("console_live_viewers", "Pages that are kept live by this process.")
live_bytes = counter("console_live_bytes_total", "Bytes of changes sent to live pages.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """Section `console`."""

    session_s: float = setting(
        "12h", "How long a login lasts; a revoked token ends it at once.", parse_duration_s
    )
    live_every_s: float = setting(
        "2s", "How often what is on watched pages is looked at.", parse_duration_s
    )


class LoginNeeded(Unauthenticated):
    """The request carries no session of the console, or one that has ended."""

    code = "console.login_needed"


class FormRefused(Forbidden):
    """A form came without its session's mark, from another page or an ended session, or was sent before."""

    code = "console.form_refused"


class PageUnknown(NotFound):
    """The console has no page of this address."""

    code = "console.page_unknown"


class ActionUnknown(NotFound):
    """The console has no such action."""

    code = "console.action_unknown"


class FieldsInvalid(InvalidInput):
    """Fields of an action's form mean nothing valid; each is named."""

    code = "console.fields_invalid"


class QueryInvalid(InvalidInput):
    """The address of a page has a parameter that means nothing valid."""

    code = "console.query_invalid"


class RoomMissing(NotFound):
    """The room of this page is not installed here."""

    code = "console.room_missing"


class TooManyViewers(Unavailable):
    """As many pages as allowed are kept live by this process."""

    code = "console.too_many_viewers"
