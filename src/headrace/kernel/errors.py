"""The error taxonomy: eleven kinds, one table from code to kind, status and retryability.

A kind says what went wrong in the words of HTTP (the status is part of the kind, so that `web` and
`cli` render any error without knowing its room). A room subclasses a kind, sets `code`, and by that
alone enters the table: `error_table()` is what the reference page and the house tests read.

Texts follow one shape: the subject with its value, what was expected, what to do about it. They never
carry secrets, SQL or another user's data, since they are shown to the caller as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Final


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One fault in a structured input: `pointer` is a JSON pointer, a setting or `line 12, field price`."""

    pointer: str
    code: str
    text: str


class HeadraceError(Exception):
    """The base of every error that Headrace raises on purpose."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        text: str,
        *,
        problems: tuple[FieldProblem, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.problems = problems
        self.retry_after_s = retry_after_s

    @property
    def public_text(self) -> str:
        """What a caller over the network is told: `text`, less what only the operator may know."""
        return self.text


class Malformed(HeadraceError):
    """The input cannot be parsed at all."""

    code, status, exit_code = "malformed", 400, 2


class Unauthenticated(HeadraceError):
    """No caller is known: the token is missing, wrong, expired or revoked."""

    code, status, exit_code = "unauthenticated", 401, 3


class Forbidden(HeadraceError):
    """The caller is known and may not do this."""

    code, status, exit_code = "forbidden", 403, 3


class NotFound(HeadraceError):
    """The thing named does not exist."""

    code, status, exit_code = "not_found", 404, 4


class Conflict(HeadraceError):
    """The thing is in a state that does not allow this."""

    code, status, exit_code = "conflict", 409, 5


class TooLarge(HeadraceError):
    """The input is over a stated bound."""

    code, status, exit_code = "too_large", 413, 2


class InvalidInput(HeadraceError):
    """The input parses and means nothing valid; every fault found is listed (over HTTP in `errors`)."""

    code, status, exit_code = "invalid_input", 422, 2


class LimitExceeded(HeadraceError):
    """The caller asked more often than it may; `retry_after_s` says when to come back."""

    code, status, exit_code, retryable = "limit_exceeded", 429, 6, True


class Unavailable(HeadraceError):
    """Something this needs is down or too slow now; the same call may work later."""

    code, status, exit_code, retryable = "unavailable", 503, 7, True


class PeerFailed(HeadraceError):
    """A host that is not ours failed us; in `fetch` normally a recorded outcome, not an exception."""

    code, status, exit_code, retryable = "peer_failed", 502, 7, True


class Corrupt(HeadraceError):
    """Stored data contradicts itself: stop, and have a human look."""

    code, status, exit_code = "corrupt", 500, 8


class ExtraMissing(InvalidInput):
    """A room is used whose libraries are not installed."""

    code = "extra_missing"

    def __init__(self, room: str) -> None:
        super().__init__(f"room {room} needs libraries that are not installed: {installing(room)}")


def installing(extra: str) -> str:
    """How to have the libraries of `extra`; the package is in no index, so its wheel is named."""
    return (
        f"pip install 'WHEEL[{extra}]', with the path of Headrace's wheel (docs/jobs.md, Install)"
    )


def require_extra(room: str, *libraries: str) -> None:
    """Raises: ExtraMissing where one of `libraries` is not installed."""
    if not all(find_spec(library) for library in libraries):
        raise ExtraMissing(room)


KINDS: Final = (
    Malformed,
    Unauthenticated,
    Forbidden,
    NotFound,
    Conflict,
    TooLarge,
    InvalidInput,
    LimitExceeded,
    Unavailable,
    PeerFailed,
    Corrupt,
)


def error_table() -> dict[str, type[HeadraceError]]:
    """Every code known to the modules imported so far, in order of code.

    Raises: AssertionError where two classes claim one code, which is our mistake.
    """
    table: dict[str, type[HeadraceError]] = {}
    waiting: list[type[HeadraceError]] = list(KINDS)
    while waiting:
        error = waiting.pop()
        assert table.setdefault(error.code, error) is error, (
            f"{error.__name__} and {table[error.code].__name__} share the code {error.code!r}"
        )
        waiting.extend(error.__subclasses__())
    return dict(sorted(table.items()))


def kind_of(error: type[HeadraceError]) -> type[HeadraceError]:
    """The one of KINDS that `error` is."""
    return next(kind for kind in KINDS if issubclass(error, kind))
