"""A queue as the dispatcher sees it: its task, whether jobs may wait, how long its calls take."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headrace.jobs.fleet.state import QueueCounts
from headrace.jobs.messages import Work
from headrace.jobs.outcomes import InFlightLease
from headrace.jobs.store.claim_cursor import ClaimCursor, LaneCursor
from headrace.jobs.tasks import Task

QUICK_S: Final = 0.1
"""No batch is prefetched for slower calls: it would wait behind a call, not in a free slot."""
PREFETCH_S: Final = 0.02
"""Prefetched work lasts a slot about this long, or is one batch."""
PREFETCH_BATCHES_MAX: Final = 10
CALL_S: Final = 1.5
"""The target run time of a batch call."""
REFILL_SHARE: Final = 0.25
"""A slot with less than this share of its concurrent calls free is refilled at intervals."""
REFILL_GAP_S: Final = 0.02
"""Least time between such claims: one costs nearly as much for two jobs as for fifty."""
EMPTY_GAP_S: Final = (0.002, 0.05)
"""First and longest delay of a claim of lanes after a settle, if the last claims were empty."""
RETRY_AFTER_S: Final = 0.02
"""Least time between claims that wait for a moment."""
_NEW_SHARE: Final = 0.3
"""Weight of the newest call in the average time per job."""
_SMOOTHING: Final = 0.2


class TaskFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The facts about a task for processes that do not have its code."""

    queue: str
    batch: int | None
    concurrency: int
    timeout_s: float
    limiter: str
    importance: int
    is_async: bool
    tag: str | None = None

    @classmethod
    def of(cls, task: Task) -> TaskFacts:
        """The facts of `task`."""
        return cls(
            queue=task.queue,
            batch=task.batch,
            concurrency=task.concurrency,
            timeout_s=task.timeout_s,
            limiter=task.limiter,
            importance=task.declared.importance,
            is_async=task.is_async,
            tag=task.declared.tag,
        )


class BatchSizer:
    """Choose the batch size so that a call runs for `CALL_S` at most. No I/O.

    A batch saves round trips, which no longer matters once its call takes a second. A larger batch
    only holds jobs longer, loses more jobs in a crash, and keeps one slot busy where several could
    share. The first batch has the size that the task declares.
    """

    def __init__(self) -> None:
        self._job_s: float | None = None

    def note_calls(self, jobs: int, run_s: float) -> None:
        """Record calls that ran `jobs` jobs in `run_s` seconds in total."""
        if jobs > 0:
            job_s = run_s / jobs
            before_s = job_s if self._job_s is None else self._job_s
            self._job_s = before_s + _NEW_SHARE * (job_s - before_s)

    def batch_size(self, batch: int) -> int:
        """Jobs for the next call, 1 to `batch`."""
        if not self._job_s:
            return batch
        return max(1, min(batch, int(CALL_S / self._job_s)))


@dataclass(frozen=True, slots=True)
class PrefetchedLease:
    """A lease that was claimed and has no slot yet."""

    work: Work
    lease: InFlightLease
    since_s: float
    must_run_alone: bool
    """It crashed processes before: only a slot without other calls may run it."""


@dataclass(slots=True, eq=False)
class QueueState:
    """One queue of this host and its current state in the dispatcher."""

    facts: TaskFacts
    queue_id: int
    cursor: ClaimCursor = field(default_factory=ClaimCursor)
    lane_cursor: LaneCursor = field(default_factory=LaneCursor)
    may_have_jobs: bool = True
    """Jobs without lanes may be due."""
    lanes_due_s: float = 0.0
    """Monotonic: when jobs of lanes may be due."""
    is_lanes_turn: bool = False
    is_claiming: bool = False
    claimed_s: float = 0.0
    """Monotonic: when the last claim began."""
    empty_claims: int = 0
    """Claims of lanes in a row that returned no job."""
    was_empty: bool = False
    """The last claim of jobs without lanes found none."""
    is_rescan_planned: bool = False
    failures: int = 0
    blocked_until_s: float = 0.0
    last_served: int = 0
    """Number of the decision that last assigned floating slots to it."""
    allowance: int | None = 0
    """Slots of this host that may work it at once; 0 before the first answer; None: no maximum."""
    is_short: bool = False
    """The last answer allowed fewer slots than requested."""
    call_s: float = math.inf
    """Smoothed run time of a call; infinite until the first call has ended."""
    batch_sizer: BatchSizer = field(default_factory=BatchSizer)
    prefetched: deque[PrefetchedLease] = field(default_factory=deque)
    counts: QueueCounts = field(init=False)
    """What this host did for it since the last report."""

    def __post_init__(self) -> None:
        self.counts = QueueCounts(queue_id=self.queue_id)

    @property
    def prefetch_max(self) -> int:
        """Batches per slot that may be claimed before the slot is free."""
        if self.facts.batch is None or self.call_s > QUICK_S:
            return 0
        return max(1, min(PREFETCH_BATCHES_MAX, int(PREFETCH_S / max(self.call_s, 1e-6))))

    @property
    def empty_gap_s(self) -> float:
        """Delay of the next claim of lanes after a settle; 0 if the last claim found jobs."""
        if not self.empty_claims:
            return 0.0
        first_s, most_s = EMPTY_GAP_S
        return min(most_s, first_s * 2.0 ** min(self.empty_claims, 10))

    @property
    def refill_due_s(self) -> float:
        """Monotonic: when slots with few free calls may be refilled."""
        return self.claimed_s + REFILL_GAP_S

    def is_refill(self, free_calls: int) -> bool:
        """Whether a slot with `free_calls` is busy with many others."""
        return free_calls < self.facts.concurrency * REFILL_SHARE

    def has_work(self, now_s: float) -> bool:
        """Whether a claim may return jobs."""
        is_free = not self.is_claiming and now_s >= self.blocked_until_s
        return is_free and (self.may_have_jobs or self.lanes_due_s <= now_s)

    def keeps_slots(self, now_s: float) -> bool:
        """Whether floating slots that work it should stay."""
        is_due = self.may_have_jobs or self.lanes_due_s <= now_s
        return bool(self.prefetched) or self.is_claiming or is_due

    def note_no_lanes(self, wait_s: float | None, poll_at_s: float) -> None:
        """Note when to claim again from lanes that had no job to start.

        The poll of all queues finds other lanes, unless searches are costly: it then searches from
        other marks than the claim, and each may miss a lane.
        """
        if wait_s is not None:
            due_s = time.monotonic() + max(wait_s, RETRY_AFTER_S)
            self.lanes_due_s = min(self.lanes_due_s, due_s)
        if self.lane_cursor.is_costly:
            self.lanes_due_s = min(self.lanes_due_s, poll_at_s)

    def wake(self) -> None:
        """Note that jobs may be waiting now."""
        self.may_have_jobs = True
        self.lanes_due_s = 0.0

    def take_counts(self) -> QueueCounts | None:
        """Pop the counts since the last report; None if nothing was counted."""
        taken, empty = self.counts, QueueCounts(queue_id=self.queue_id)
        self.counts = empty
        return None if taken == empty else taken

    def note_calls(self, calls: int, jobs: int, run_s: float) -> None:
        """Learn the run time from calls that ended."""
        self.batch_sizer.note_calls(jobs, run_s)
        self.counts.calls += calls
        # Concurrent calls share their slot's time.
        self.counts.run_s += run_s / self.facts.concurrency
        each_s = run_s / calls
        if self.call_s == math.inf:
            self.call_s = each_s
        else:
            self.call_s += _SMOOTHING * (each_s - self.call_s)
