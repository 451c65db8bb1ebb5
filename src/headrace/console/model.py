"""Settings, metrics and errors of the console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.kernel.config import parse_duration_s, setting
from headrace.kernel.errors import Forbidden, InvalidInput, NotFound, Unauthenticated, Unavailable
from headrace.kernel.metrics import counter, gauge

PREFIX: Final = "/console"
BODY_BYTES_MAX: Final = 256 * 1024
ROWS_SHOWN: Final = 50
"""Rows of one page of a list; a phone folds most of them (`ROWS_UNFOLDED`)."""

csp_reports = counter(
    "console_csp_reports_total", "Violations of the content security policy that browsers reported."
)
live_viewers = gauge("console_live_viewers", "Live pages that this process serves.")
live_bytes = counter("console_live_bytes_total", "Bytes of changes sent to live pages.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """Section `console`."""

    session_s: float = setting(
        "12h",
        "Lifetime of a login; revoking the token it was made with ends it at once.",
        parse_duration_s,
    )
    live_every_s: float = setting("2s", "Refresh interval of live pages.", parse_duration_s)


class LoginNeeded(Unauthenticated):
    """The request has no valid session of the console."""

    code = "console.login_needed"


class FormRefused(Forbidden):
    """A form lacks its session's CSRF token, or was already sent."""

    code = "console.form_refused"


class PageUnknown(NotFound):
    """The console has no page at this URL."""

    code = "console.page_unknown"


class ActionUnknown(NotFound):
    """The console has no such action."""

    code = "console.action_unknown"


class FieldsInvalid(InvalidInput):
    """Fields of an action's form are invalid; each is listed."""

    code = "console.fields_invalid"


class QueryInvalid(InvalidInput):
    """A query parameter of a page is invalid."""

    code = "console.query_invalid"


class RoomMissing(NotFound):
    """The room of this page is not installed on this machine."""

    code = "console.room_missing"


class TooManyViewers(Unavailable):
    """This process serves its maximum of live pages."""

    code = "console.too_many_viewers"
