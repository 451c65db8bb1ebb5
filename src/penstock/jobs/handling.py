"""What a handler holds: a batch of jobs, and the words by which it says what became of each.

A handler returns: every job it said nothing about is done. It raises: every such job goes to retry, or to
where `Retry`, `Fail` or `Snooze` send it. Nothing here does I/O; the worker settles what was said.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, overload

from penstock.jobs.model import AT_AWAY_S_MAX, ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX
from penstock.kernel.backoff import Backoff

P = TypeVar("P")


class Retry(Exception):
    """Run the job again, after `after_s` or the usual backoff; counts as a failed attempt."""

    def __init__(self, after_s: float | None = None, why: str = "") -> None:
        super().__init__(why or "the handler asked for a retry")
        self.after_s = _checked_delay_s(after_s)


class Fail(Exception):
    """The job is failed for good, whatever retries are left."""


class Snooze(Exception):
    """Run the job again after `after_s`; no attempt is counted."""

    def __init__(self, after_s: float) -> None:
        self.after_s = _delay_s(after_s)
        super().__init__(f"the handler asked to wait {self.after_s:g} s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to become of a job: `done`, `retry`, `fail`, `snooze`, `unstarted` or `returned`."""

    word: str
    after_s: float | None = None
    error: str = ""
    traceback: str = ""


DONE = Outcome("done")
UNSTARTED = Outcome("unstarted")
RETURNED = Outcome("returned")


class JobInHand(Generic[P]):
    """One job under lease: of a batch, or what `async def handler(job: JobInHand[Photo])` is given."""

    __slots__ = ("attempt", "id", "lane", "lease_id", "outcome", "payload", "traceparent")

    def __init__(
        self,
        id: int,  # noqa: A002 - the field's name in the public API
        payload: P,
        *,
        lease_id: int,
        attempt: int = 1,
        lane: str | None = None,
        traceparent: str | None = None,
    ) -> None:
        self.id = id
        self.lease_id = lease_id
        self.payload = payload
        self.attempt = attempt
        self.lane = lane
        self.traceparent = traceparent
        self.outcome: Outcome | None = None

    def done(self) -> None:
        """It is done."""
        self.outcome = DONE

    def retry(self, after_s: float | None = None, why: str = "") -> None:
        """Run it again, after `after_s` or the usual backoff; failed once its retries are used up."""
        self.outcome = Outcome("retry", _checked_delay_s(after_s), told_text(why))

    def fail(self, why: str | BaseException) -> None:
        """It is failed for good."""
        self.outcome = Outcome("fail", None, told_text(why))

    def snooze(self, after_s: float) -> None:
        """Run it again after `after_s`; no attempt is counted."""
        self.outcome = Outcome("snooze", _delay_s(after_s))

    def __repr__(self) -> str:
        return f"JobInHand(id={self.id}, attempt={self.attempt}, payload={self.payload!r})"


class Batch(Sequence[JobInHand[P]], Generic[P]):
    """The jobs of one handler call, all under the lease `lease_id`."""

    def __init__(self, jobs: Sequence[JobInHand[P]], lease_id: int) -> None:
        self._jobs = tuple(jobs)
        self.lease_id = lease_id

    @overload
    def __getitem__(self, index: int) -> JobInHand[P]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[JobInHand[P]]: ...

    def __getitem__(self, index: int | slice) -> JobInHand[P] | Sequence[JobInHand[P]]:
        return self._jobs[index]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobInHand[P]]:
        return iter(self._jobs)


def outcome_of(error: BaseException) -> Outcome:
    """What a raised `error` means for the jobs that its call said nothing about. Never raises."""
    text = told_text(error) or type(error).__name__
    match error:
        case Fail():
            return Outcome("fail", None, text)
        case Retry() | Snooze():
            # A subclass may have left `after_s` out or put anything there.
            try:
                after_s = _checked_delay_s(getattr(error, "after_s", None))
            except TypeError:
                after_s = None
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


def _checked_delay_s(after_s: Any) -> float | None:
    """None for the usual backoff, else as `_delay_s`."""
    return None if after_s is None else _delay_s(after_s)


def _delay_s(after_s: Any) -> float:
    """`after_s` within what a date holds, else its ack would fail. Raises: TypeError for no number."""
    try:
        delay_s = float(after_s)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"after_s: expected seconds, got a {type(after_s).__name__}") from error
    return 0.0 if math.isnan(delay_s) else min(max(delay_s, 0.0), AT_AWAY_S_MAX)


def settled_outcome(outcome: Outcome, *, attempt: int, retries: int, backoff: Backoff) -> Outcome:
    """What is recorded for `outcome` of run number `attempt`: a retry gets its delay, the last fails."""
    if outcome.word != "retry":
        return outcome
    if attempt > retries:
        return replace(outcome, word="fail", after_s=None)
    delay_s = backoff.delay_s(attempt) if outcome.after_s is None else outcome.after_s
    return replace(outcome, after_s=delay_s)
