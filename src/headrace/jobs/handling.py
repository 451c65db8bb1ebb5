"""The words by which a handler says what becomes of a job, raised or said, and what they mean.

A handler returns: every job it said nothing about is done. It raises: every such job goes to retry, or to
where `Retry`, `Fail`, `Snooze` or `Cancel` send it. Nothing here does I/O, and nothing here trusts what a
handler gives: an outcome that means nothing is a failed attempt, never a job that stays leased.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace.jobs.errors import LaneExhausted
from headrace.jobs.model import AT_AWAY_S_MAX, ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX
from headrace.kernel.resilience import Backoff

WORDS: Final = frozenset(
    {"done", "retry", "snooze", "fail", "cancel", "moved", "unstarted", "returned"}
)


class Retry(Exception):
    """Run the job again, after `after_s` or the usual backoff; counts as a failed attempt."""

    def __init__(self, after_s: float | None = None, why: str = "") -> None:
        super().__init__(why or "the handler asked for a retry")
        self.after_s = checked_delay_s(after_s)


class Fail(Exception):
    """The job is failed for good, whatever retries are left."""


class Cancel(Exception):
    """The job is cancelled: nobody wants it any more, and it is no failure."""


class Snooze(Exception):
    """Run the job again after `after_s`; no attempt is counted."""

    def __init__(self, after_s: float) -> None:
        self.after_s = delay_of(after_s)
        super().__init__(f"the handler asked to wait {self.after_s:g} s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to become of a job: one of WORDS, with what belongs to it."""

    word: str
    after_s: float | None = None
    error: str = ""
    traceback: str = ""
    result: bytes | None = None
    """JSON, of a job that is done and whose task keeps results."""
    queue: str | None = None
    """Where a moved job goes."""


DONE = Outcome("done")
UNSTARTED = Outcome("unstarted")
RETURNED = Outcome("returned")


def outcome_of(error: BaseException) -> Outcome:
    """What a raised `error` means for the jobs that its call said nothing about. Never raises."""
    text = told_text(error) or type(error).__name__
    match error:
        case Fail():
            return Outcome("fail", None, text)
        case Cancel():
            return Outcome("cancel", None, text)
        case LaneExhausted():
            after_s = _readable_delay_s(error.retry_after_s)
            return Outcome("retry" if after_s is None else "snooze", after_s, text)
        case Retry() | Snooze():
            # A subclass may have left `after_s` out or put anything there.
            after_s = _readable_delay_s(getattr(error, "after_s", None))
            is_snooze = isinstance(error, Snooze) and after_s is not None
            return Outcome("snooze" if is_snooze else "retry", after_s, text)
        case _:
            name = type(error).__name__
            told = bounded_text(f"{name}: {text}", ERROR_CHARACTERS_MAX)
            return Outcome("retry", None, told, _traceback_of(error))


def bounded_text(text: str, characters_max: int) -> str:
    """What PostgreSQL's text and a log can hold of `text`: its end, no NUL, no lone surrogates."""
    kept = text if len(text) <= characters_max else "... " + text[-characters_max:]
    return kept.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()


def told_text(what: object) -> str:
    """`what` as text, whatever a handler gave for it: also an error that has no readable text."""
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
    """None for the usual backoff, else as `delay_of`."""
    return None if after_s is None else delay_of(after_s)


def delay_of(after_s: Any) -> float:
    """`after_s` as seconds. Raises: TypeError for no number, ValueError for one not from 0 to a year.

    Nothing is bent into range: NaN or a negative number as 0 s would let the job spin.
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
    """The same, None also where it means nothing."""
    try:
        return checked_delay_s(after_s)
    except (TypeError, ValueError):
        return None


def settled_outcome(said: object, *, attempt: int, retries: int, backoff: Backoff) -> Outcome:
    """What is recorded where `said` was said of run number `attempt`.

    A retry gets its delay, the last one fails; what means nothing is a retry.
    """
    if said is DONE:
        return DONE
    outcome = Outcome("retry", None, "its call ended without an outcome")
    if isinstance(said, Outcome) and said.word in WORDS:
        outcome = said
    try:
        after_s = checked_delay_s(outcome.after_s)
    except (TypeError, ValueError) as error:
        outcome, after_s = Outcome("retry", None, told_text(error)), None
    if outcome.word != "retry":
        return outcome
    if attempt > retries:
        return replace(outcome, word="fail", after_s=None)
    return replace(outcome, after_s=backoff.delay_s(attempt) if after_s is None else after_s)
