"""Outcomes of jobs, set or raised by a handler, and their validation. No I/O.

If a handler returns, every job without an outcome is done. If it raises, every such job is
retried, or gets the outcome of `Retry`, `Fail`, `Snooze` or `Cancel`. Values from handlers are not
trusted: an invalid outcome is a failed attempt, never a job that stays leased.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace.jobs.errors import LaneExhausted
from headrace.jobs.model import AT_AWAY_S_MAX, ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX
from headrace.kernel.resilience import Backoff

OUTCOME_KINDS: Final = frozenset(
    {"done", "retry", "snooze", "fail", "cancel", "moved", "unstarted", "returned"}
)


class Retry(Exception):
    """Run the job again, after `after_s` or the usual backoff; counts as a failed attempt."""

    def __init__(self, after_s: float | None = None, why: str = "") -> None:
        super().__init__(why or "the handler requested a retry")
        self.after_s = checked_delay_s(after_s)


class Fail(Exception):
    """Fail the job permanently, whatever retries are left."""


class Cancel(Exception):
    """Cancel the job: it is no longer needed. This is no failure."""


class Snooze(Exception):
    """Run the job again after `after_s`; no attempt is counted."""

    def __init__(self, after_s: float) -> None:
        self.after_s = delay_of(after_s)
        super().__init__(f"the handler requested a wait of {self.after_s:g} s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happens to a job after a run: one of OUTCOME_KINDS, `lost` or `quarantined`."""

    kind: str
    after_s: float | None = None
    error: str = ""
    traceback: str = ""
    result: bytes | None = None
    """JSON, of a done job whose task keeps results."""
    queue: str | None = None
    """The target queue of a moved job."""


DONE = Outcome("done")
UNSTARTED = Outcome("unstarted")
RETURNED = Outcome("returned")


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of jobs whose call raised `error` before one was set. Never raises."""
    text = readable_text(error) or type(error).__name__
    match error:
        case Fail():
            return Outcome("fail", None, text)
        case Cancel():
            return Outcome("cancel", None, text)
        case LaneExhausted():
            after_s = _readable_delay_s(error.retry_after_s)
            return Outcome("retry" if after_s is None else "snooze", after_s, text)
        case Retry() | Snooze():
            # A subclass may have no `after_s`, or an invalid one.
            after_s = _readable_delay_s(getattr(error, "after_s", None))
            is_snooze = isinstance(error, Snooze) and after_s is not None
            return Outcome("snooze" if is_snooze else "retry", after_s, text)
        case _:
            name = type(error).__name__
            shown = bounded_text(f"{name}: {text}", ERROR_CHARACTERS_MAX)
            return Outcome("retry", None, shown, _traceback_of(error))


def bounded_text(text: str, characters_max: int) -> str:
    """The end of `text` as PostgreSQL and logs can store it: no NUL, no lone surrogates."""
    kept = text if len(text) <= characters_max else "... " + text[-characters_max:]
    return kept.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()


def readable_text(what: object) -> str:
    """`what` as text; it may be any value of a handler, also an error whose text cannot be read."""
    try:
        text = "" if what is None else str(what)
    except BaseException as error:  # noqa: BLE001 - its __str__ is the handler's code too
        text = f"{type(what).__name__} whose text cannot be read ({type(error).__name__})"
    return bounded_text(text, ERROR_CHARACTERS_MAX)


def _traceback_of(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as fault:  # noqa: BLE001 - it calls the error's own code
        text = f"the traceback cannot be read ({type(fault).__name__})"
    return bounded_text(text, TRACEBACK_CHARACTERS_MAX)


def checked_delay_s(after_s: Any) -> float | None:
    """None for the default backoff, else as `delay_of`."""
    return None if after_s is None else delay_of(after_s)


def delay_of(after_s: Any) -> float:
    """`after_s` as seconds. Raises: TypeError if not a number, ValueError outside 0 to a year.

    Values are not clamped: NaN or a negative number as 0 s would let the job spin.
    """
    try:
        delay_s = float(after_s)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"after_s: expected seconds, got a {type(after_s).__name__}") from error
    if not 0 <= delay_s <= AT_AWAY_S_MAX:
        raise ValueError(
            f"after_s: expected seconds from 0 to {AT_AWAY_S_MAX:.0f}, got {delay_s:g}"
        )
    return delay_s


def _readable_delay_s(after_s: Any) -> float | None:
    """`checked_delay_s`, with None for invalid values."""
    try:
        return checked_delay_s(after_s)
    except (TypeError, ValueError):
        return None


def final_outcome(given: object, *, attempt: int, retries: int, backoff: Backoff) -> Outcome:
    """The outcome to record for run number `attempt`, from the `given` one, which may be invalid.

    A retry gets its delay, the last one fails; an invalid outcome is a retry.
    """
    if given is DONE:
        return DONE
    outcome = Outcome("retry", None, "its call ended without a valid outcome")
    if isinstance(given, Outcome) and given.kind in OUTCOME_KINDS:
        outcome = given
    try:
        after_s = checked_delay_s(outcome.after_s)
    except (TypeError, ValueError) as error:
        outcome, after_s = Outcome("retry", None, readable_text(error)), None
    if outcome.kind != "retry":
        return outcome
    if attempt > retries:
        return replace(outcome, kind="fail", after_s=None)
    return replace(outcome, after_s=backoff.delay_s(attempt) if after_s is None else after_s)
