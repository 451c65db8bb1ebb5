"""What a handler holds: one job in hand, or a batch of them.

A batch makes its jobs as they are asked for: a handler that reads `batch.payloads`, or nothing, pays for no
object a job (building them costs a no-op drain more than decoding its payloads). Nothing here does I/O:
what a job asks of the world while it runs (progress, further starts of its lane) goes through `Reach`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, Protocol, TypeVar, overload

import msgspec

from headrace.jobs.errors import NoCurrentJob
from headrace.jobs.handling import (
    DONE,
    RETURNED,
    UNSTARTED,
    Outcome,
    checked_delay_s,
    delay_of,
    told_text,
)
from headrace.jobs.slots.messages import Work
from headrace.kernel.routes import PAYLOAD_BYTES_MAX

P = TypeVar("P")
SPEND_WAIT_MAX_S: Final = 60.0


class Reach(Protocol):
    """How a job in hand reaches the world around its slot."""

    def tell_progress(self, job_id: int, ratio: float, text: str) -> None:
        """Pass on how far the job is; may drop what comes too often. From any thread."""

    async def spend(self, queue: str, lane: str, starts: int, wait_max_s: float) -> float:
        """Take `starts` out of the lane and wait until they may begin; until when they may, by `time.monotonic`.

        Raises: LaneExhausted.
        """

    def spend_blocking(self, queue: str, lane: str, starts: int, wait_max_s: float) -> None:
        """The same for a thread that may block. Raises: LaneExhausted."""


class LaneInHand(str):
    """The name of a job's lane, and the way to take further starts out of it."""

    __slots__ = ("_queue", "_reach")
    _queue: str
    _reach: Reach | None

    @classmethod
    def of(cls, name: str, queue: str, reach: Reach | None) -> LaneInHand:
        """The lane `name` of a job of `queue`."""
        lane = cls(name)
        lane._queue, lane._reach = queue, reach
        return lane

    async def spend(self, starts: int = 1, *, wait_max_s: float = SPEND_WAIT_MAX_S) -> float:
        """Wait until the lane allows `starts` more, such as the requests that redirects cost.

        Send them at once: they count as begun within the limiter's slack of this moment (0.25 s); the answer
        is until when, by `time.monotonic`. Raises: LaneExhausted, where that is further away than
        `wait_max_s`; nothing was taken then.
        """
        if self._reach is None:
            return math.inf
        return await self._reach.spend(self._queue, str(self), starts, wait_max_s)

    def spend_blocking(self, starts: int = 1, *, wait_max_s: float = SPEND_WAIT_MAX_S) -> None:
        """`spend` for sync handlers; here too, send at once. Raises: LaneExhausted."""
        if self._reach is not None:
            self._reach.spend_blocking(self._queue, str(self), starts, wait_max_s)


class JobInHand(Generic[P]):
    """One job under lease: of a batch, or what `async def handler(job: JobInHand[Photo])` is given."""

    __slots__ = (
        "_lane",
        "_reach",
        "attempt",
        "id",
        "lease_id",
        "outcome",
        "payload",
        "queue",
        "start_before_s",
        "traceparent",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the field's name in the public API
        payload: P,
        *,
        lease_id: int,
        attempt: int = 1,
        lane: str | None = None,
        traceparent: str | None = None,
        queue: str = "",
        start_before_s: float | None = None,
        reach: Reach | None = None,
    ) -> None:
        self.id = id
        self.lease_id = lease_id
        self.payload = payload
        self.attempt = attempt
        self.traceparent = traceparent
        self.queue = queue
        self.start_before_s = start_before_s
        """Until when the start that its lane counted is good, by `time.monotonic`; None: it has no lane."""
        self.outcome: Outcome | None = None
        self._lane = lane
        self._reach = reach

    @property
    def lane(self) -> LaneInHand | None:
        """The name of its lane, with `spend`; None where it has none."""
        return None if self._lane is None else LaneInHand.of(self._lane, self.queue, self._reach)

    def done(self, result: Any = None) -> None:
        """It is done, with a result where the task keeps results."""
        self.outcome = DONE if result is None else Outcome("done", result=encoded_result(result))

    def retry(self, after_s: float | None = None, why: str = "") -> None:
        """Run it again, after `after_s` or the usual backoff; failed once its retries are used up."""
        self.outcome = Outcome("retry", checked_delay_s(after_s), told_text(why))

    def fail(self, why: str | BaseException) -> None:
        """It is failed for good."""
        self.outcome = Outcome("fail", None, told_text(why))

    def cancel(self, why: str = "") -> None:
        """It is cancelled: nobody wants it any more, and it is no failure."""
        self.outcome = Outcome("cancel", None, told_text(why))

    def snooze(self, after_s: float) -> None:
        """Run it again after `after_s`; no attempt is counted."""
        self.outcome = Outcome("snooze", delay_of(after_s))

    def unstart(self) -> None:
        """It did not begin what its lane counts: back as it came, and that start is free again."""
        self.outcome = RETURNED if self._lane is None else UNSTARTED

    def send_to(self, queue: str) -> None:
        """Move it to another queue, as it is and with all its retries."""
        if not isinstance(queue, str):
            raise TypeError(f"send_to: expected a queue's name, got a {type(queue).__name__}")
        self.outcome = Outcome("moved", queue=queue)

    def progress(self, ratio: float, text: str = "") -> None:
        """Say how far it is, 0 to 1; what comes more often than 10 times a second is dropped."""
        told = 0.0 if math.isnan(ratio) else min(max(float(ratio), 0.0), 1.0)
        if self._reach is not None:
            self._reach.tell_progress(self.id, told, told_text(text))

    def __repr__(self) -> str:
        return f"JobInHand(id={self.id}, attempt={self.attempt}, payload={self.payload!r})"


class Batch(Sequence[JobInHand[P]], Generic[P]):
    """The jobs of one handler call, all under the lease `lease_id`."""

    __slots__ = ("_made", "_picks", "_reach", "_work", "lease_id", "payloads")

    def __init__(
        self, work: Work, picks: Sequence[int], payloads: Sequence[P], reach: Reach | None = None
    ) -> None:
        self.lease_id = work.lease_id
        self.payloads = payloads
        """What the jobs carry, in their order: the cheapest way where no job is spoken of alone."""
        self._work = work
        self._picks = picks
        self._reach = reach
        self._made: dict[int, JobInHand[P]] = {}

    @overload
    def __getitem__(self, index: int) -> JobInHand[P]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[JobInHand[P]]: ...

    def __getitem__(self, index: int | slice) -> JobInHand[P] | Sequence[JobInHand[P]]:
        count = len(self._picks)
        if isinstance(index, slice):
            return [self._job(at) for at in range(*index.indices(count))]
        at = index + count if index < 0 else index
        if not 0 <= at < count:
            raise IndexError(f"job {index} of a batch of {count}")
        return self._job(at)

    def __len__(self) -> int:
        return len(self._picks)

    def __iter__(self) -> Iterator[JobInHand[P]]:
        return map(self._job, range(len(self._picks)))

    def said(self) -> dict[int, Any]:
        """The outcomes that were said, by the job's place in its lease. For the slot."""
        return {
            self._picks[at]: job.outcome
            for at, job in self._made.items()
            if job.outcome is not None
        }

    def _job(self, at: int) -> JobInHand[P]:
        job = self._made.get(at)
        if job is None:
            job = self._made[at] = job_of(
                self._work, self._picks[at], self.payloads[at], self._reach
            )
        return job


def job_of(work: Work, pick: int, payload: P, reach: Reach | None) -> JobInHand[P]:
    """The job at place `pick` of `work`."""
    return JobInHand(
        work.ids[pick],
        payload,
        lease_id=work.lease_id,
        attempt=work.attempts[pick] + 1,
        lane=work.lanes[pick],
        traceparent=work.traceparents[pick],
        queue=work.queue,
        start_before_s=work.start_before_s,
        reach=reach,
    )


def encoded_result(value: Any) -> bytes:
    """`value` as the JSON that is kept of it. Raises: ValueError, where JSON cannot hold it."""
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"the result cannot be kept: expected what JSON can hold, {error}"
        ) from error
    if len(encoded) > PAYLOAD_BYTES_MAX:
        raise ValueError(
            f"the result cannot be kept: {len(encoded)} bytes, at most {PAYLOAD_BYTES_MAX}: put the"
            " bytes into the object store and return their key"
        )
    return encoded


running_job: Final[ContextVar[JobInHand[Any] | None]] = ContextVar("running_job", default=None)


def current_job() -> JobInHand[Any]:
    """The job that this handler runs, for code that is given its fields or payload alone.

    Raises: NoCurrentJob, outside a handler and in one of a batch.
    """
    job = running_job.get()
    if job is None:
        raise NoCurrentJob(
            "no single job runs here: call current_job() inside a handler of one job; a batch has its"
            " jobs in its argument"
        )
    return job
