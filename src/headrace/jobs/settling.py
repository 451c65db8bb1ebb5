"""What is said of jobs and not yet known to the database: kept by lease until it has answered. No I/O.

A lease whose jobs are all done is one id; it may ride on the next claim. Anything else has words of its own a
job. What was taken to be sent and met no answer comes back and is sent again, for settling twice changes
nothing; only that a lease is gone then says no more that it was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from headrace.jobs.handling import Outcome
from headrace.jobs.slots.messages import Settled


@dataclass(slots=True)
class Held:
    """A lease in hand and what was not yet said of its jobs."""

    lease_id: int
    queue_id: int
    limiter: str | None
    ids: Sequence[int]
    attempts: Sequence[int]
    retries: int
    left: set[int] | None = None
    """Jobs of which nothing was said; None: of none of them anything."""

    def take_all(self) -> list[int] | None:
        """The jobs that are left, all said now; None where that is the whole lease."""
        left, self.left = self.left, set()
        return None if left is None else [job_id for job_id in self.ids if job_id in left]

    def take(self, ids: Iterable[int]) -> None:
        """These are said now."""
        if self.left is None:
            self.left = set(self.ids)
        self.left.difference_update(ids)

    @property
    def is_said(self) -> bool:
        """Whether every job of it was said."""
        return self.left is not None and not self.left


@dataclass(slots=True)
class Part:
    """What one statement settles: whole leases that are done, and words by lease and job."""

    done: dict[int, int] = field(default_factory=dict)
    """How many jobs, by lease."""
    said: dict[int, dict[int, Outcome]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.done or self.said)

    def only(self, lease_ids: Iterable[int]) -> Part:
        """What of it is about these leases."""
        wanted = set(lease_ids)
        return Part(
            {lease_id: jobs for lease_id, jobs in self.done.items() if lease_id in wanted},
            {lease_id: said for lease_id, said in self.said.items() if lease_id in wanted},
        )

    @property
    def jobs(self) -> int:
        """How many jobs it is about."""
        return sum(self.done.values()) + sum(map(len, self.said.values()))

    @property
    def lease_ids(self) -> set[int]:
        """The leases it is about."""
        return self.done.keys() | self.said.keys()


class Unsettled:
    """Everything that is still to be told to the database."""

    def __init__(self) -> None:
        self._riders: dict[int, int] = {}
        self._rest = Part()
        self.jobs = 0
        """How many jobs it is about."""

    def __bool__(self) -> bool:
        return bool(self._riders or self._rest)

    def __contains__(self, lease_id: int) -> bool:
        return any(lease_id in one for one in (self._riders, self._rest.done, self._rest.said))

    def add_done(self, lease_id: int, jobs: int, *, may_ride: bool) -> None:
        """Every job of a lease is done."""
        (self._riders if may_ride else self._rest.done)[lease_id] = jobs
        self.jobs += jobs

    def add(self, lease_id: int, said: dict[int, Outcome]) -> None:
        """Something was said of jobs of a lease; what was said first of a job stays."""
        known = self._rest.said.setdefault(lease_id, {})
        before = len(known)
        for job_id, one in said.items():
            known.setdefault(job_id, one)
        self.jobs += len(known) - before

    def take_riders(self, leases_max: int) -> Part:
        """Leases whose acks may ride on a claim."""
        part = Part()
        _move(self._riders, part.done, leases_max, frozenset())
        self.jobs -= part.jobs
        return part

    def take(
        self, *, leases_max: int, jobs_max: int, without: Collection[int] = frozenset()
    ) -> Part:
        """What the next statement is to settle: what waits longest, one lease at least if there is any."""
        part = Part()
        _move(self._riders, part.done, leases_max, without)
        _move(self._rest.done, part.done, leases_max - len(part.done), without)
        jobs = 0
        wanted = (lease_id for lease_id in self._rest.said if lease_id not in without)
        for lease_id in list(islice(wanted, leases_max - len(part.done))):
            jobs += len(self._rest.said[lease_id])
            if part.said and jobs > jobs_max:
                break
            part.said[lease_id] = self._rest.said.pop(lease_id)
        self.jobs -= part.jobs
        return part

    def take_one(self, lease_ids: Collection[int]) -> Part:
        """What is to be told of one of these leases, of that which waits longest."""
        part = Part()
        for lease_id in chain(self._riders, self._rest.done, self._rest.said):
            if lease_id in lease_ids:
                for source in (self._riders, self._rest.done):
                    if lease_id in source:
                        part.done[lease_id] = source.pop(lease_id)
                if lease_id in self._rest.said:
                    part.said[lease_id] = self._rest.said.pop(lease_id)
                break
        self.jobs -= part.jobs
        return part

    def put_back(self, part: Part) -> None:
        """It is still to be told, after everything else."""
        for lease_id, jobs in part.done.items():
            self.add_done(lease_id, jobs, may_ride=False)
        for lease_id, said in part.said.items():
            newer = self._rest.said.pop(lease_id, {})
            self.jobs -= len(newer)
            self.add(lease_id, said)
            if newer:
                self.add(lease_id, newer)

    def clear(self) -> None:
        """Forget everything."""
        self._riders.clear()
        self._rest = Part()
        self.jobs = 0


def _move(
    source: dict[int, int], target: dict[int, int], leases_max: int, without: Collection[int]
) -> None:
    wanted = (lease_id for lease_id in source if lease_id not in without)
    for lease_id in list(islice(wanted, leases_max)):
        target[lease_id] = source.pop(lease_id)


def said_of(settled: Settled, ids: Sequence[int]) -> dict[int, Outcome]:
    """The words of a message by job; columns that may be left empty are filled up."""
    nothing = [None] * len(ids)
    return {
        job_id: Outcome(word, delay_s, error, traceback, result, queue)
        for job_id, word, delay_s, error, traceback, result, queue in zip(
            ids,
            settled.words,
            settled.delays_s or nothing,
            settled.errors or [""] * len(ids),
            settled.tracebacks or [""] * len(ids),
            settled.results or nothing,
            settled.queues or nothing,
            strict=True,
        )
    }


def is_all_done(settled: Settled, held: Held) -> bool:
    """Whether the message says no more than that a whole lease is done."""
    if settled.ids is None:
        return True
    jobs = len(held.ids)
    is_whole = held.left is None and len(settled.ids) == jobs
    return is_whole and list(settled.words).count("done") == jobs and not any(settled.results)
