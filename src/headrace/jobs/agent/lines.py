"""A queue as the dispatcher sees it: what its task asks for, whether there may be work, how quick its calls are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Final

import msgspec

from headrace.jobs.scans import Scan
from headrace.jobs.slots.messages import Work
from headrace.jobs.slots.pace import Pace
from headrace.jobs.tasks import Task

QUICK_S: Final = 0.1
"""Calls that take longer get no batch in advance: it would wait behind a call instead of in a free slot."""
STOCK_S: Final = 0.02
"""Work that is claimed in advance lasts a slot about so long, or is one batch."""
BATCHES_AHEAD_MAX: Final = 10
_SMOOTHING: Final = 0.2
_ENDS: Final = frozenset({"done", "fail", "cancel", "quarantined"})


class TaskFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What must be known of a task outside the process that has its code."""

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


@dataclass(slots=True)
class Counts:
    """What this host did for a queue since the last report; see `QueueCounts`."""

    ended: int = 0
    calls: int = 0
    run_s: float = 0.0
    slot_s: float = 0.0

    def note_words(self, words: Iterable[str]) -> None:
        """Add the jobs that ended."""
        self.ended += sum(word in _ENDS for word in words)

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return self == Counts()

    def add(self, other: Counts) -> None:
        """Add what could not be reported."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))


@dataclass(frozen=True, slots=True)
class Stocked:
    """A lease claimed and not yet given to a slot."""

    work: Work
    since_s: float
    needs_idle: bool
    """It killed processes before: only a slot without other calls may have it."""


@dataclass(slots=True, eq=False)
class Line:
    """One queue and what is known of it now."""

    facts: TaskFacts
    queue_id: int
    scan: Scan = field(default_factory=Scan)
    is_hinted: bool = True
    """There may be plain jobs that are due."""
    lanes_due_s: float = 0.0
    """Monotonic: when there may be jobs of lanes."""
    is_lanes_turn: bool = False
    is_claiming: bool = False
    was_empty: bool = False
    """The last claim of plain jobs brought none."""
    is_rescan_planned: bool = False
    failures: int = 0
    blocked_until_s: float = 0.0
    turn: int = 0
    """Number of the decision at which floating slots were last given to it."""
    allowance: int | None = 0
    """Slots of this host that may work it at once; 0 until the database has answered; None: no maximum."""
    is_short: bool = False
    """The last answer allowed fewer slots than were requested."""
    call_s: float = math.inf
    """Smoothed run time of a call; infinite until the first has ended."""
    pace: Pace = field(default_factory=Pace)
    stock: deque[Stocked] = field(default_factory=deque)
    counts: Counts = field(default_factory=Counts)

    @property
    def batches_ahead(self) -> int:
        """Batches a slot that may be claimed in advance of its being free."""
        if self.facts.batch is None or self.call_s > QUICK_S:
            return 0
        return max(1, min(BATCHES_AHEAD_MAX, int(STOCK_S / max(self.call_s, 1e-6))))

    def has_work(self, now_s: float) -> bool:
        """Whether a claim may bring something."""
        is_free = not self.is_claiming and now_s >= self.blocked_until_s
        return is_free and (self.is_hinted or self.lanes_due_s <= now_s)

    def holds_slots(self, now_s: float) -> bool:
        """Whether floating slots in their turn stay with it."""
        is_due = self.is_hinted or self.lanes_due_s <= now_s
        return bool(self.stock) or self.is_claiming or is_due

    def hint(self) -> None:
        """There may be work now."""
        self.is_hinted = True
        self.lanes_due_s = 0.0

    def take_counts(self) -> Counts:
        """What happened since the last time."""
        taken, self.counts = self.counts, Counts()
        return taken

    def note_calls(self, calls: int, jobs: int, run_s: float) -> None:
        """Learn from calls that ended."""
        self.pace.note_calls(jobs, run_s)
        self.counts.calls += calls
        # Calls side by side share their slot's time.
        self.counts.run_s += run_s / self.facts.concurrency
        each_s = run_s / calls
        if self.call_s == math.inf:
            self.call_s = each_s
        else:
            self.call_s += _SMOOTHING * (each_s - self.call_s)
