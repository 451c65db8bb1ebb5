"""What a handler receives: the context of one job, or a batch of contexts.

A batch creates contexts on access, so a handler that reads only `batch.payloads` pays for no
object per job. Requests of a running job to its agent (progress, further starts of its
lane) go through `AgentRequests`; `slots.agent_client` implements it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, Protocol, TypeVar, overload

import msgspec

from headrace.jobs.errors import NoCurrentJob
from headrace.jobs.headers import traceparent_of
from headrace.jobs.messages import Outcome, Work
from headrace.jobs.outcomes import (
    DONE,
    RETURNED,
    UNSTARTED,
    checked_delay_s,
    delay_of,
    readable_text,
)
from headrace.kernel.routes import PAYLOAD_BYTES_MAX
from headrace.kernel.storable import plain_model

P = TypeVar("P")
SPEND_WAIT_MAX_S: Final = 60.0


class AgentRequests(Protocol):
    """Requests of a running job to its agent."""

    def report_progress(self, job_id: int, ratio: float, text: str) -> None:
        """Report a job's progress; frequent reports may be dropped. Thread-safe."""

    async def spend(self, queue: str, lane: str, starts: int, wait_max_s: float) -> float:
        """Take `starts` tokens of the lane and wait until the starts may begin.

        Return the deadline of the starts, by `time.monotonic`. Raises: LaneExhausted.
        """

    def spend_blocking(self, queue: str, lane: str, starts: int, wait_max_s: float) -> None:
        """`spend` for a thread that may block. Raises: LaneExhausted."""


class JobLane(str):
    """The name of a job's lane, with methods to take tokens for further starts."""

    __slots__ = ("_agent", "_queue")
    _queue: str
    _agent: AgentRequests | None

    @classmethod
    def of(cls, name: str, queue: str, agent: AgentRequests | None) -> JobLane:
        """The lane `name` of a job of `queue`."""
        lane = cls(name)
        lane._queue, lane._agent = queue, agent
        return lane

    async def spend(self, starts: int = 1, *, wait_max_s: float = SPEND_WAIT_MAX_S) -> float:
        """Wait until the lane allows `starts` more, such as requests caused by redirects.

        Start them at once: they count as started within the limiter's slack. Return that deadline,
        by `time.monotonic`. Raises: LaneExhausted if the wait would exceed `wait_max_s`; then
        nothing was taken.
        """
        if self._agent is None:
            return math.inf
        return await self._agent.spend(self._queue, str(self), starts, wait_max_s)

    def spend_blocking(self, starts: int = 1, *, wait_max_s: float = SPEND_WAIT_MAX_S) -> None:
        """`spend` for sync handlers. Start at once, too. Raises: LaneExhausted."""
        if self._agent is not None:
            self._agent.spend_blocking(self._queue, str(self), starts, wait_max_s)


class JobContext(Generic[P]):
    """A running job: of a batch, or the argument of `handler(job: JobContext[Photo])`."""

    __slots__ = (
        "_agent",
        "_lane",
        "attempt",
        "id",
        "is_cancelled",
        "lease_id",
        "outcome",
        "payload",
        "queue",
        "start_before_s",
        "traceparent",
        "version",
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
        version: int = 1,
        start_before_s: float | None = None,
        agent: AgentRequests | None = None,
    ) -> None:
        self.id = id
        self.lease_id = lease_id
        self.payload = payload
        self.attempt = attempt
        self.traceparent = traceparent
        self.queue = queue
        self.version = version
        self.start_before_s = start_before_s
        """Deadline of the start that its lane counted, by `time.monotonic`; None without a lane."""
        self.outcome: Outcome | None = None
        self.is_cancelled = False
        """It was cancelled while it runs: end soon, or its slot is killed."""
        self._lane = lane
        self._agent = agent

    @property
    def lane(self) -> JobLane | None:
        """Its lane, with `spend`; None if it has none."""
        return None if self._lane is None else JobLane.of(self._lane, self.queue, self._agent)

    def done(self, result: Any = None) -> None:
        """Mark the job done, with a result if the task keeps results."""
        self.outcome = DONE if result is None else Outcome("done", result=encode_result(result))

    def retry(self, after_s: float | None = None, why: str = "") -> None:
        """Retry the job after `after_s` or the default backoff; without retries left it fails."""
        self.outcome = Outcome("retry", checked_delay_s(after_s), readable_text(why))

    def fail(self, why: str | BaseException) -> None:
        """Fail the job permanently, without a retry."""
        self.outcome = Outcome("fail", None, readable_text(why))

    def cancel(self, why: str = "") -> None:
        """Cancel the job, which is no longer needed. This is no failure."""
        self.outcome = Outcome("cancel", None, readable_text(why))

    def snooze(self, after_s: float) -> None:
        """Run the job again after `after_s`; no attempt is counted."""
        self.outcome = Outcome("snooze", delay_of(after_s))

    def unstart(self) -> None:
        """Return it unchanged and free its lane's start, which it did not use."""
        self.outcome = RETURNED if self._lane is None else UNSTARTED

    def send_to(self, queue: str) -> None:
        """Move the job to another queue, unchanged and with all its retries."""
        if not isinstance(queue, str):
            raise TypeError(f"send_to: expected a queue name, got a {type(queue).__name__}")
        self.outcome = Outcome("moved", queue=queue)

    def progress(self, ratio: float, text: str = "") -> None:
        """Report the job's progress, 0 to 1; at most 10 reports per second are sent."""
        bounded = 0.0 if math.isnan(ratio) else min(max(float(ratio), 0.0), 1.0)
        if self._agent is not None:
            self._agent.report_progress(self.id, bounded, readable_text(text))

    def __repr__(self) -> str:
        return f"JobContext(id={self.id}, attempt={self.attempt}, payload={self.payload!r})"


class Batch(Sequence[JobContext[P]], Generic[P]):
    """The jobs of one handler call, all under the lease `lease_id`."""

    __slots__ = ("_agent", "_made", "_picks", "_work", "lease_id", "payloads")

    def __init__(
        self,
        work: Work,
        indexes: Sequence[int],
        payloads: Sequence[P],
        agent: AgentRequests | None = None,
    ) -> None:
        self.lease_id = work.lease_id
        self.payloads = payloads
        """The payloads in order: the cheapest access if no job needs its own outcome."""
        self._work = work
        self._picks = indexes
        self._agent = agent
        self._made: dict[int, JobContext[P]] = {}

    @overload
    def __getitem__(self, index: int) -> JobContext[P]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[JobContext[P]]: ...

    def __getitem__(self, index: int | slice) -> JobContext[P] | Sequence[JobContext[P]]:
        count = len(self._picks)
        if isinstance(index, slice):
            return [self._job(at) for at in range(*index.indices(count))]
        at = index + count if index < 0 else index
        if not 0 <= at < count:
            raise IndexError(f"job {index} of a batch of {count}")
        return self._job(at)

    def __len__(self) -> int:
        return len(self._picks)

    def __iter__(self) -> Iterator[JobContext[P]]:
        return map(self._job, range(len(self._picks)))

    def outcomes(self) -> dict[int, Any]:
        """The outcomes that the handler set, by the job's index in its lease. For the slot."""
        return {
            self._picks[at]: job.outcome
            for at, job in self._made.items()
            if job.outcome is not None
        }

    def _job(self, at: int) -> JobContext[P]:
        job = self._made.get(at)
        if job is None:
            job = self._made[at] = job_context(
                self._work, self._picks[at], self.payloads[at], self._agent
            )
        return job


def job_context(work: Work, index: int, payload: P, agent: AgentRequests | None) -> JobContext[P]:
    """The context of the job at `index` of `work`."""
    return JobContext(
        work.ids[index],
        payload,
        lease_id=work.lease_id,
        attempt=work.attempts[index] + 1,
        lane=work.lanes[index],
        traceparent=traceparent_of(work.headers[index]),
        queue=work.queue,
        version=work.versions[index],
        start_before_s=work.start_before_s,
        agent=agent,
    )


def encode_result(value: Any) -> bytes:
    """`value` as JSON. Raises: ValueError if JSON cannot represent it, or it is too large."""
    try:
        encoded = msgspec.json.encode(value, enc_hook=plain_model)
        # The encoder writes NaN and Infinity as null.
        if b"null" in encoded and value is not None:
            json.dumps(msgspec.to_builtins(value, enc_hook=_decoded), allow_nan=False)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"the result cannot be kept: expected a JSON value, {error}") from error
    if len(encoded) > PAYLOAD_BYTES_MAX:
        raise ValueError(
            f"the result cannot be kept: {len(encoded)} bytes, at most {PAYLOAD_BYTES_MAX}:"
            " store the bytes in the object store and return their key"
        )
    return encoded


def _decoded(value: Any) -> Any:
    """The value of a `msgspec.Raw` or a pydantic model. Raises: TypeError for other types."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else plain_model(value)


running_job: Final[ContextVar[JobContext[Any] | None]] = ContextVar("running_job", default=None)


def current_job() -> JobContext[Any]:
    """The job that the current handler runs, for handlers that receive only fields or a payload.

    Raises: NoCurrentJob outside a handler and in a batch handler.
    """
    job = running_job.get()
    if job is None:
        raise NoCurrentJob(
            "no single job runs here: call current_job() inside a handler of one job;"
            " a batch handler has its jobs in its argument"
        )
    return job
