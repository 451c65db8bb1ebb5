"""Outcomes of jobs, from the handler to the ack. No I/O.

If a handler returns, every job without an outcome is done. If it raises, every such job is
retried, or gets the outcome of `Retry`, `Fail`, `Snooze` or `Cancel`. Values from handlers are not
trusted: an invalid outcome is a failed attempt, never a job that stays leased.

An agent buffers outcomes until PostgreSQL has recorded them. A lease whose jobs are all done is one
id, which may be sent with the next claim. Any other ack carries one outcome per job. Outcomes sent
without an answer return to the buffer and are sent again, because settling is idempotent. A missing
lease is then no longer reported as lost.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.jobs.errors import LaneExhausted
from headrace.jobs.headers import own_retries
from headrace.jobs.messages import Ack, Outcome
from headrace.jobs.model import AT_AWAY_S_MAX, ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX
from headrace.kernel.resilience import Backoff

_HEADRACE: Final = f"{Path(__file__).parents[1]}/"
_PYTHON: Final = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED: Final = (f"{sysconfig.get_path('purelib')}/", f"{sysconfig.get_path('platlib')}/")
OUTCOME_KINDS: Final = frozenset(
    {"done", "retry", "snooze", "fail", "cancel", "moved", "unstarted", "returned", "quarantined"}
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
    """The traceback from the first frame of the application's code on.

    An error without such a frame keeps all frames.
    """
    try:
        shown = traceback.TracebackException.from_exception(error)
        is_own = [is_own_code(frame.filename) for frame in shown.stack]
        if True in is_own:
            del shown.stack[: is_own.index(True)]
        text = "".join(shown.format())
    except BaseException as fault:  # noqa: BLE001 - it calls the error's own code
        text = f"the traceback cannot be read ({type(fault).__name__})"
    return bounded_text(text, TRACEBACK_CHARACTERS_MAX)


def is_own_code(file_name: str) -> bool:
    """Whether a file is neither Headrace's nor of Python's standard library."""
    if file_name.startswith(_INSTALLED):
        return not file_name.startswith(_HEADRACE)
    return not file_name.startswith((_HEADRACE, _PYTHON, "<frozen "))


def location_of(error: BaseException) -> str:
    """`FILE:LINE` of the last frame of the application; empty if unknown. Never raises."""
    try:
        frames = traceback.extract_tb(error.__traceback__)
    except BaseException:  # noqa: BLE001 - reading the source is not worth another error
        return ""
    own = [frame for frame in frames if is_own_code(frame.filename)]
    # If the application is an installed package, all of these are.
    found = [frame for frame in own if not frame.filename.startswith(_INSTALLED)] or own
    return f"{Path(found[-1].filename).name}:{found[-1].lineno}" if found else ""


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
        return msgspec.structs.replace(outcome, kind="fail", after_s=None)
    delay_s = backoff.delay_s(attempt) if after_s is None else after_s
    return msgspec.structs.replace(outcome, after_s=delay_s)


class InFlightLease:
    """The jobs of one lease, and which of them have no outcome yet.

    The agent has one per claimed lease, shared by `LeaseManager` and `WorkerProxy`. The slot that
    runs the jobs has its own, a `LeaseRun`.
    """

    __slots__ = (
        "_open",
        "_own_retries",
        "_retries",
        "acked_ns",
        "attempts",
        "ids",
        "is_counted",
        "lease_id",
        "limiter",
        "sampled",
    )

    def __init__(
        self,
        lease_id: int,
        ids: Sequence[int],
        attempts: Sequence[int],
        *,
        retries: int,
        headers: Sequence[str | None] = (),
        limiter: str | None = None,
        is_counted: bool = False,
    ) -> None:
        self.lease_id = lease_id
        self.ids = ids
        self.attempts = attempts
        """Failed runs so far, per job."""
        self._retries = retries
        self._own_retries = own_retries(ids, headers)
        self.limiter = limiter
        """The limiter of the jobs' lanes; None for jobs without lanes."""
        self.is_counted = is_counted
        """A lane of the jobs has a concurrency limit."""
        self.sampled: Sequence[str] = ()
        """Sampled traceparents of the jobs, if this process traces."""
        self.acked_ns = 0
        """When their last outcomes arrived."""
        self._open: set[int] | None = None
        """Jobs without an outcome; None while that is all of them."""

    def retries_of(self, job_id: int) -> int:
        """Retries of the job: its own, or those of its queue."""
        return self._own_retries.get(job_id, self._retries)

    @property
    def open_count(self) -> int:
        """How many jobs have no outcome."""
        return len(self.ids) if self._open is None else len(self._open)

    @property
    def is_untouched(self) -> bool:
        """Whether no job has an outcome."""
        return self._open is None

    def is_open(self, job_id: int) -> bool:
        """Whether a job of this lease has no outcome."""
        return self._open is None or job_id in self._open

    def open_ids(self) -> list[int]:
        """Jobs without an outcome, in the order of the lease."""
        if self._open is None:
            return list(self.ids)
        left = self._open
        return [job_id for job_id in self.ids if job_id in left] if left else []

    def close(self, ids: Iterable[int] | None) -> None:
        """Note that these jobs have an outcome; None: all of them."""
        if ids is None:
            self._open = set()
            return
        if self._open is None:
            self._open = set(self.ids)
        self._open.difference_update(ids)


@dataclass(slots=True)
class AckBatch:
    """The outcomes that one statement records."""

    done: dict[int, int] = field(default_factory=dict)
    """Leases whose jobs are all done, with their number of jobs."""
    outcomes: dict[int, dict[int, Outcome]] = field(default_factory=dict)
    """Outcomes by lease and job."""

    def __bool__(self) -> bool:
        return bool(self.done or self.outcomes)

    def only(self, lease_ids: Iterable[int]) -> AckBatch:
        """The part of this batch that belongs to `lease_ids`."""
        wanted = set(lease_ids)
        return AckBatch(
            {lease_id: jobs for lease_id, jobs in self.done.items() if lease_id in wanted},
            {lease_id: some for lease_id, some in self.outcomes.items() if lease_id in wanted},
        )

    @property
    def jobs(self) -> int:
        """The number of jobs in this batch."""
        return sum(self.done.values()) + sum(map(len, self.outcomes.values()))

    @property
    def lease_ids(self) -> set[int]:
        """The leases in this batch."""
        return self.done.keys() | self.outcomes.keys()


class AckBuffer:
    """Outcomes that PostgreSQL has not recorded yet, oldest first."""

    def __init__(self) -> None:
        self._riders: dict[int, int] = {}
        self._rest = AckBatch()
        self.jobs = 0
        """The number of buffered jobs."""

    def __bool__(self) -> bool:
        return bool(self._riders or self._rest)

    def __contains__(self, lease_id: int) -> bool:
        return any(
            lease_id in some for some in (self._riders, self._rest.done, self._rest.outcomes)
        )

    def add_done(self, lease_id: int, jobs: int, *, may_ride: bool) -> None:
        """Record that all `jobs` of a lease are done. `may_ride`: the next claim may carry it."""
        (self._riders if may_ride else self._rest.done)[lease_id] = jobs
        self.jobs += jobs

    def add(self, lease_id: int, outcomes: dict[int, Outcome]) -> None:
        """Record outcomes; the first outcome per job wins."""
        known = self._rest.outcomes.setdefault(lease_id, {})
        before = len(known)
        for job_id, outcome in outcomes.items():
            known.setdefault(job_id, outcome)
        self.jobs += len(known) - before

    def take_riders(self, leases_max: int) -> AckBatch:
        """Pop the leases whose acks may be sent with a claim."""
        batch = AckBatch()
        _move(self._riders, batch.done, leases_max, frozenset())
        self.jobs -= batch.jobs
        return batch

    def take(
        self, *, leases_max: int, jobs_max: int, without: Collection[int] = frozenset()
    ) -> AckBatch:
        """Pop the oldest outcomes for the next statement, of at least one lease if there is any."""
        batch = AckBatch()
        _move(self._riders, batch.done, leases_max, without)
        _move(self._rest.done, batch.done, leases_max - len(batch.done), without)
        jobs = 0
        wanted = (lease_id for lease_id in self._rest.outcomes if lease_id not in without)
        for lease_id in list(islice(wanted, leases_max - len(batch.done))):
            jobs += len(self._rest.outcomes[lease_id])
            if batch.outcomes and jobs > jobs_max:
                break
            batch.outcomes[lease_id] = self._rest.outcomes.pop(lease_id)
        self.jobs -= batch.jobs
        return batch

    def take_one(self, lease_ids: Collection[int]) -> AckBatch:
        """Pop the oldest unsent outcomes of one of these leases."""
        batch = AckBatch()
        for lease_id in chain(self._riders, self._rest.done, self._rest.outcomes):
            if lease_id in lease_ids:
                for source in (self._riders, self._rest.done):
                    if lease_id in source:
                        batch.done[lease_id] = source.pop(lease_id)
                if lease_id in self._rest.outcomes:
                    batch.outcomes[lease_id] = self._rest.outcomes.pop(lease_id)
                break
        self.jobs -= batch.jobs
        return batch

    def put_back(self, batch: AckBatch) -> None:
        """Return outcomes that were not recorded to the end of the buffer."""
        for lease_id, jobs in batch.done.items():
            self.add_done(lease_id, jobs, may_ride=False)
        for lease_id, outcomes in batch.outcomes.items():
            newer = self._rest.outcomes.pop(lease_id, {})
            self.jobs -= len(newer)
            self.add(lease_id, outcomes)
            if newer:
                self.add(lease_id, newer)

    def clear(self) -> None:
        """Drop all outcomes."""
        self._riders.clear()
        self._rest = AckBatch()
        self.jobs = 0


def _move(
    source: dict[int, int], target: dict[int, int], leases_max: int, without: Collection[int]
) -> None:
    wanted = (lease_id for lease_id in source if lease_id not in without)
    for lease_id in list(islice(wanted, leases_max)):
        target[lease_id] = source.pop(lease_id)


def is_all_done(ack: Ack, lease: InFlightLease) -> bool:
    """Whether the message reports only that every job of the lease is done."""
    if ack.outcomes is None:
        return True
    is_whole = lease.is_untouched and len(ack.outcomes) == len(lease.ids)
    return is_whole and all(outcome == DONE for outcome in ack.outcomes.values())
