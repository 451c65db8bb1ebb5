"""Error kinds, and one table from code to kind, status and retryability.

A kind corresponds to an HTTP status and an exit code, so `web` and `cli` render any error without
knowledge of its room. A room subclasses a kind and sets `code`, which adds the error to
`error_table()`; the reference page and the tests read that table.

An error text has one shape: what failed with its value, what was expected, what to do. It contains
no secrets, no SQL and no data of other users, because the caller receives it.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Final


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One fault in an input; `pointer` is a JSON pointer, a setting or `line 12, field price`."""

    pointer: str
    code: str
    text: str


TO_DOCTOR: Final = re.compile(r": check it with `headrace doctor`(, then try again)?")
"""The remedy in the text of an engine that is down, to leave out where it is stated already."""
INTEGER_BITS_MAX: Final = 1_000
"""Python refuses to print integers of more than 4,300 digits."""


def describe_value(value: object) -> str:
    """A short text of a refused value, for an error message."""
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
        return "(a very large integer)"
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    return repr(str(value)[:40])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean X?` with the known name closest to `name`, or an empty text."""
    near = difflib.get_close_matches(name[:80], list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


def mismatch(expected: str, value: object) -> str:
    """What was expected, and the refused value."""
    return f"expected {expected}, got {describe_value(value)}"


class HeadraceError(Exception):
    """The base class of every error that Headrace raises on purpose."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    public: ClassVar[str] = ""
    """Replaces a text that has details for the operator, such as the address of a server."""

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
        """The text for callers over the network."""
        return self.public or self.text


class Malformed(HeadraceError):
    """The input cannot be parsed at all."""

    code, status, exit_code = "malformed", 400, 2


class Unauthenticated(HeadraceError):
    """The caller is not authenticated: the token is missing, wrong, expired or revoked."""

    code, status, exit_code = "unauthenticated", 401, 3


class Forbidden(HeadraceError):
    """The caller is authenticated but not permitted to do this."""

    code, status, exit_code = "forbidden", 403, 3


class NotFound(HeadraceError):
    """The named object does not exist."""

    code, status, exit_code = "not_found", 404, 4


class Conflict(HeadraceError):
    """The current state does not permit this."""

    code, status, exit_code = "conflict", 409, 5


class TooLarge(HeadraceError):
    """The input is over a size limit."""

    code, status, exit_code = "too_large", 413, 2


class InvalidInput(HeadraceError):
    """The input can be parsed but is not valid; `problems` lists the faults."""

    code, status, exit_code = "invalid_input", 422, 2

    @classmethod
    def require_none(
        cls, problems: Iterable[FieldProblem], subject: str, *, shown_max: int | None = None
    ) -> None:
        """Raises: this error if there are `problems`. The text shows up to `shown_max` of them."""
        found = tuple(problems)
        if found:
            texts = "; ".join(
                f"{one.pointer or '(document)'}: {one.text}" for one in found[:shown_max]
            )
            raise cls(f"{subject}: {texts}", problems=found)


class LimitExceeded(HeadraceError):
    """The caller is over its rate limit; retry after `retry_after_s`."""

    code, status, exit_code, retryable = "limit_exceeded", 429, 6, True


class Unavailable(HeadraceError):
    """A dependency is down or too slow; the same call may succeed later."""

    code, status, exit_code, retryable = "unavailable", 503, 7, True


class PeerFailed(HeadraceError):
    """An external host failed; `fetch` usually records an outcome instead."""

    code, status, exit_code, retryable = "peer_failed", 502, 7, True


class Corrupt(HeadraceError):
    """Stored data is inconsistent and needs an operator."""

    code, status, exit_code = "corrupt", 500, 8


class ExtraMissing(InvalidInput):
    """Optional libraries of a room or a format are not installed; over HTTP 501."""

    code, status = "extra_missing", 501

    def __init__(self, *extras: str, need: str = "") -> None:
        """State what is needed, by default the libraries of `extras`."""
        self.extras = extras
        need = need or f"the libraries of {_in_brackets(extras)} are not installed"
        super().__init__(f"{need}: {installing(*extras)}")


def needing(command: str, *extras: str) -> ExtraMissing:
    """The error of a command that needs `extras`: `headrace api` needs `[web]`."""
    return ExtraMissing(*extras, need=f"`{command}` needs {_in_brackets(extras)}")


def _in_brackets(extras: Sequence[str]) -> str:
    return " and ".join(f"`[{extra}]`" for extra in extras)


def installing(*extras: str) -> str:
    """The command that installs the libraries of `extras` from the wheel."""
    names = ",".join(extras)
    return f"pip install 'WHEEL[{names}]', with the path of Headrace's wheel (docs/install.md)"


def require_extra(room: str, *libraries: str) -> None:
    """Require that `libraries` are installed. Raises: ExtraMissing."""
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
    """Error classes by code, of all modules imported so far.

    Raises: AssertionError if two classes share a code.
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
    """The kind of KINDS that `error` belongs to."""
    return next(kind for kind in KINDS if issubclass(error, kind))


class InvalidHandler(InvalidInput):
    """A handler does not take the arguments with which it is called."""

    code = "app.invalid_handler"


def require_takes(decorator: str, handler: Callable[..., Any], *arguments: str) -> None:
    """Refuse a handler that cannot be called with `arguments`. Raises: InvalidHandler."""
    name = getattr(handler, "__name__", "handler")
    expected = f"@app.{decorator}: expected a function {name}({', '.join(arguments)})"
    if not callable(handler):
        raise InvalidHandler(f"{expected}, got {handler!r:.80}")
    signature = inspect.signature(handler)
    try:
        signature.bind(*arguments)
    except TypeError:
        given = signature.replace(return_annotation=signature.empty)
        raise InvalidHandler(f"{expected}, got {name}{given}") from None
