"""A slot as the dispatcher sees it: what it holds, and how much more it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from headrace.jobs.agent.lines import Line
from headrace.jobs.slots.messages import Settled, SpendAnswer, Work

TURN_S: Final = 1.0
"""So long a floating slot stays with a queue while another waits."""


class Place(Protocol):
    """Where handlers run: a forked slot behind its socket, or a runner in this process."""

    def give(self, work: Work) -> None:
        """Let it run; the outcome comes as messages. A place that is gone takes it and says nothing."""

    def answer(self, answer: SpendAnswer) -> None:
        """Pass on what was spent."""

    def stop(self, grace_s: float) -> None:
        """Ask it to finish and leave; the end comes as the message Left."""


@dataclass(slots=True, eq=False)
class Hand:
    """The jobs of one lease in a seat."""

    line: Line
    lease_id: int
    ids: Sequence[int]
    attempts: Sequence[int]
    retries: int
    open_count: int
    settled: set[int] | None = None
    """Ids settled so far, where not all are at once."""

    @classmethod
    def of(cls, line: Line, work: Work) -> Hand:
        """What must be kept of `work`: not its payloads."""
        return cls(
            line=line,
            lease_id=work.lease_id,
            ids=work.ids,
            attempts=work.attempts,
            retries=work.retries,
            open_count=len(work.ids),
        )

    def note(self, settled: Settled) -> int:
        """Take off what was settled; how many jobs."""
        if settled.ids is None:
            count = self.open_count
        else:
            if self.settled is None:
                self.settled = set()
            before = len(self.settled)
            self.settled.update(settled.ids)
            count = len(self.settled) - before
        self.open_count -= count
        return count

    def open_ids(self) -> list[int]:
        """Ids of jobs without an outcome, in the order in which they were given."""
        if self.open_count == 0:
            return []
        settled = self.settled or ()
        return [job_id for job_id in self.ids if job_id not in settled]


@dataclass(slots=True, eq=False)
class Seat:
    """One place, its binding and what is in its hands."""

    place: Place
    bound: Line | None = None
    """The queue that the plan gave it; None: it floats."""
    line: Line | None = None
    """The queue it works now, or for which a claim is under way on its behalf."""
    line_since_s: float = 0.0
    hands: dict[int, Hand] = field(default_factory=dict)
    jobs_open: int = 0
    is_reserved: bool = False
    is_alone: bool = False
    """It runs a job that may kill it: it takes no other."""
    is_open: bool = False
    """It is ready and takes work."""

    def credit(self, line: Line) -> int:
        """Calls of `line` that it can start now."""
        if not self.is_open or self.is_reserved or self.is_alone:
            return 0
        if self.bound is not None and self.bound is not line:
            return 0
        if self.hands and self.line is not line:
            return 0
        busy = self.jobs_open if line.facts.batch is None else len(self.hands)
        return max(0, line.facts.concurrency - busy)

    def works(self, line: Line) -> bool:
        """Whether calls of `line` run in it, or a claim for it is under way."""
        return self.line is line and (bool(self.hands) or self.is_reserved)

    def has_plenty(self, line: Line) -> bool:
        """Whether it is the queue's own and half of its many calls at once are free."""
        is_many = line.facts.batch is None and line.facts.concurrency > 1
        return self.bound is line and is_many and 2 * self.credit(line) > line.facts.concurrency

    def is_for(self, line: Line, now_s: float, *, is_other_waiting: bool) -> bool:
        """Whether it belongs to `line` now: bound to it, or floating there in its turn."""
        if self.bound is not None:
            return self.bound is line
        return self.line is line and not (is_other_waiting and now_s - self.line_since_s > TURN_S)

    def take(self, line: Line, work: Work) -> None:
        """Give it `work`."""
        self.hands[work.lease_id] = Hand.of(line, work)
        self.jobs_open += len(work.ids)
        self.line = line
        self.place.give(work)

    def note(self, settled: Settled) -> Hand | None:
        """Take off what was settled; None: the lease is in no hand any more."""
        hand = self.hands.get(settled.lease_id)
        if hand is None:
            return None
        self.jobs_open -= hand.note(settled)
        if hand.open_count == 0:
            del self.hands[hand.lease_id]
            if not self.hands:
                self.is_alone = False
        return hand
