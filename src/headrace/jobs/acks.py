"""In-flight leases, and the outcomes of their jobs until PostgreSQL has recorded them. No I/O.

A lease whose jobs are all done is one id, which may ride on the next claim. Any other ack carries
one outcome per job. Outcomes sent without an answer return to the buffer and are sent again,
because settling is idempotent. A missing lease is then no longer reported as lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from headrace.jobs.messages import Ack
from headrace.jobs.outcomes import DONE, Outcome


class InFlightLease:
    """The jobs of one lease, and which of them have no outcome yet.

    The agent has one per claimed lease, shared by `LeaseManager` and `WorkerProxy`. The slot that
    runs the jobs has its own, a `LeaseRun`.
    """

    __slots__ = ("_open", "attempts", "ids", "lease_id", "limiter", "retries")

    def __init__(
        self,
        lease_id: int,
        ids: Sequence[int],
        attempts: Sequence[int],
        *,
        retries: int,
        limiter: str | None = None,
    ) -> None:
        self.lease_id = lease_id
        self.ids = ids
        self.attempts = attempts
        """Failed runs so far, per job."""
        self.retries = retries
        self.limiter = limiter
        """The limiter of the jobs' lanes; None for jobs without lanes."""
        self._open: set[int] | None = None
        """Jobs without an outcome; None while that is all of them."""

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
        """Pop the leases whose acks may ride on a claim."""
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


def outcomes_by_job(ack: Ack, ids: Sequence[int]) -> dict[int, Outcome]:
    """The outcomes of a message by job; omitted columns are filled with defaults."""
    nothing = [None] * len(ids)
    return {
        job_id: Outcome(kind, delay_s, error, traceback, result, queue)
        for job_id, kind, delay_s, error, traceback, result, queue in zip(
            ids,
            ack.kinds,
            ack.delays_s or nothing,
            ack.errors or [""] * len(ids),
            ack.tracebacks or [""] * len(ids),
            ack.results or nothing,
            ack.queues or nothing,
            strict=True,
        )
    }


def is_all_done(ack: Ack, lease: InFlightLease) -> bool:
    """Whether the message reports only that every job of the lease is done."""
    if ack.ids is None:
        return True
    jobs = len(lease.ids)
    is_whole = lease.is_untouched and len(ack.ids) == jobs
    return is_whole and list(ack.kinds).count(DONE.kind) == jobs and not any(ack.results)
