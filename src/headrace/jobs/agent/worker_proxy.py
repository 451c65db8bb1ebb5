"""A slot as the dispatcher sees it: the leases it runs, and how many calls it can still start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from headrace.jobs.agent.queue_state import QueueState
from headrace.jobs.messages import ToSlot, Work
from headrace.jobs.outcomes import InFlightLease

QUEUE_SHARE_S: Final = 1.0
"""How long a floating slot stays with a queue while another queue waits."""


class WorkerChannel(Protocol):
    """The way to where handlers run: a forked slot's socket, or a runner in this process."""

    def send(self, message: ToSlot) -> None:
        """Send a message; acks of work arrive as messages. A slot that died drops it silently."""


@dataclass(slots=True, eq=False)
class WorkerProxy:
    """One slot: its channel, its queue and the leases it runs."""

    channel: WorkerChannel
    bound: QueueState | None = None
    """The queue that the fleet's plan assigned; None: the slot floats."""
    queue: QueueState | None = None
    """The queue that it works, or for which a claim is in progress on its behalf."""
    queue_since_s: float = 0.0
    leases: dict[int, InFlightLease] = field(default_factory=dict)
    """All of `queue`."""
    jobs_open: int = 0
    is_reserved: bool = False
    """A claim for it is in progress."""
    runs_alone: bool = False
    """It runs a job that may crash it and takes no other job."""
    accepts_work: bool = False
    """It is ready and not leaving."""

    def free_calls(self, queue: QueueState) -> int:
        """Calls of `queue` that it can start now."""
        if not self.accepts_work or self.is_reserved or self.runs_alone:
            return 0
        if self.bound is not None and self.bound is not queue:
            return 0
        if self.leases and self.queue is not queue:
            return 0
        busy = self.jobs_open if queue.facts.batch is None else len(self.leases)
        return max(0, queue.facts.concurrency - busy)

    def works_on(self, queue: QueueState) -> bool:
        """Whether it runs calls of `queue`, or a claim for it is in progress."""
        return self.queue is queue and (bool(self.leases) or self.is_reserved)

    def is_mostly_free(self, queue: QueueState) -> bool:
        """Whether it is bound to `queue` and over half of its many concurrent calls are free."""
        is_many = queue.facts.batch is None and queue.facts.concurrency > 1
        return (
            self.bound is queue and is_many and 2 * self.free_calls(queue) > queue.facts.concurrency
        )

    def is_for(self, queue: QueueState, now_s: float, *, is_other_waiting: bool) -> bool:
        """Whether it serves `queue` now: bound to it, or floating within its share of time."""
        if self.bound is not None:
            return self.bound is queue
        has_had_its_share = is_other_waiting and now_s - self.queue_since_s > QUEUE_SHARE_S
        return self.queue is queue and not has_had_its_share

    def assign(self, queue: QueueState, work: Work, lease: InFlightLease) -> None:
        """Send it `work`, the jobs of `lease`."""
        self.leases[lease.lease_id] = lease
        self.jobs_open += lease.open_count
        self.queue = queue
        self.channel.send(work)

    def release(self, lease: InFlightLease, jobs: int) -> None:
        """Free the calls of `jobs` jobs of `lease` that now have an outcome."""
        self.jobs_open -= jobs
        if lease.open_count == 0:
            del self.leases[lease.lease_id]
            if not self.leases:
                self.runs_alone = False

    def clear(self) -> None:
        """Drop all leases."""
        self.leases.clear()
        self.jobs_open = 0
