"""Where claims and polls search: the marks that keep them off dead index entries.

Every claimed job leaves a dead entry in the index that claims scan, until vacuum removes it.
Vacuum cannot remove it while an older transaction is open. A consumer therefore searches only after
the rows that it saw last, its marks. Rows that were committed late, returned jobs and more urgent
jobs lie before the marks. So it searches from the beginning now and then: often while that is
cheap, else so rarely that it takes at most WHOLE_SHARE of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from headrace.jobs.model import PRIORITY_LAST

if TYPE_CHECKING:
    from headrace.jobs.store.leases import Claims, WorkAhead

Value = TypeVar("Value", int, tuple[datetime, int])
PRIORITIES: Final = tuple(range(PRIORITY_LAST + 1))
FIRST_AT: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""Before any row."""
_FIRST: Final = (FIRST_AT, 0)
LOWEST_FIRST_EVERY: Final = 8
MARKS_KEPT_S: Final = 1.0
MARKS_KEPT_S_MAX: Final = 30.0
WHOLE_SHARE: Final = 0.05
COSTLY_S: Final = 0.02
LATE_COMMIT_S: Final = 0.5
"""Rows of transactions that take longer to commit wait for a search from the beginning."""


class WholeSearches:
    """When to search from the beginning."""

    def __init__(self) -> None:
        self.is_due = True
        self._at_s = 0.0
        self._took_s = 0.0

    @property
    def is_costly(self) -> bool:
        """Whether a search from the beginning is slow; searches from the marks are not."""
        return self._took_s > COSTLY_S

    def note(self, now_s: float, took_s: float, *, is_short: bool) -> None:
        """Learn from a search. `is_short`: it found all that there is."""
        if self.is_due:
            self._at_s, self._took_s = now_s, took_s
        kept_s = min(max(MARKS_KEPT_S, self._took_s / WHOLE_SHARE), MARKS_KEPT_S_MAX)
        self.is_due = now_s - self._at_s > kept_s or (is_short and not self.is_costly)


class LateMark(Generic[Value]):
    """The newest value that was noted at least LATE_COMMIT_S ago."""

    def __init__(self, first: Value) -> None:
        self.value: Value = first
        self._newest: Value = first
        self._noted: deque[tuple[float, Value]] = deque()

    def note(self, value: Value, now_s: float) -> None:
        """Note the newest row seen now."""
        self._newest = max(self._newest, value)
        self._noted.append((now_s, self._newest))
        while self._noted[0][0] <= now_s - LATE_COMMIT_S:
            self.value = self._noted.popleft()[1]


class ClaimCursor:
    """The position of one consumer in one queue, per priority, and the order of priorities.

    Marks are dropped after a short claim and every second while searches are cheap.
    """

    saw_all: bool = False
    """The last claim searched from the beginning and was short: no other job was due."""

    def __init__(self) -> None:
        self.marks = [_FIRST] * len(PRIORITIES)
        self._order: Sequence[int] = PRIORITIES
        self._claims = 0
        self._searches = WholeSearches()

    @property
    def is_costly(self) -> bool:
        """Whether a claim from the beginning is slow; claims from the marks are not."""
        return self._searches.is_costly

    @property
    def sees_all_next(self) -> bool:
        """Whether the next claim searches from the beginning."""
        return self._searches.is_due

    def next_order(self) -> Sequence[int]:
        """Priorities in the order to claim; every 8th time reversed, so that none starves."""
        self._claims += 1
        is_turned = self._claims % LOWEST_FIRST_EVERY == 0
        self._order = PRIORITIES[::-1] if is_turned else PRIORITIES
        return self._order

    def note(
        self,
        claims: Claims,
        *,
        jobs_max: int,
        now_s: float,
        leases_max: int | None = None,
    ) -> None:
        """Update the marks after a claim of up to `jobs_max` jobs in `leases_max` leases.

        A claim that used all its leases may have stopped at a job that needs its own lease,
        because its process died before.
        """
        jobs = sum(len(claim.ids) for claim in claims.leases) + claims.moved
        is_short = jobs < jobs_max and (leases_max is None or len(claims.leases) < leases_max)
        self.saw_all = is_short and self._searches.is_due
        self._searches.note(now_s, claims.scan_s, is_short=is_short)
        if self._searches.is_due:
            self.marks = [_FIRST] * len(PRIORITIES)
            return
        found: dict[int, tuple[datetime, int]] = {}
        for claim in claims.leases:
            keys = zip(claim.run_ats, claim.ids, strict=True)
            # Jobs of a lease are in order, so the dict keeps the last of each priority.
            for priority, key in dict(zip(claim.priorities, keys, strict=True)).items():
                found[priority] = max(found.get(priority, _FIRST), key)
        # Priorities before the one where the claim ended had no other due job.
        reached = [self._order.index(priority) for priority in found]
        last = len(self._order) if is_short else max(reached, default=0)
        late = (claims.claimed_at - timedelta(seconds=LATE_COMMIT_S), 0)
        for position, priority in enumerate(self._order):
            ended = late if position < last else _FIRST
            self.marks[priority] = max(self.marks[priority], found.get(priority, _FIRST), ended)


class LaneCursor:
    """Where the claims of one consumer find the journal rows and the ready lanes of one queue.

    Claims that find as many lanes as they may visit leave the journal to `LaneFolder`.
    """

    def __init__(self) -> None:
        self.is_folding = True
        self._event = LateMark(0)
        self._ready_from = FIRST_AT
        self._searches = WholeSearches()

    @property
    def is_costly(self) -> bool:
        """Whether a claim from the beginning is slow, so that claims search from the marks."""
        return self._searches.is_costly

    @property
    def event(self) -> int:
        """The journal row after which to fold."""
        return 0 if self._searches.is_due else self._event.value

    @property
    def ready_from(self) -> datetime:
        """The moment from which lanes may be ready."""
        return FIRST_AT if self._searches.is_due else self._ready_from

    def note(self, claims: Claims, now_s: float) -> None:
        """Update the marks after a claim of lanes."""
        self.is_folding = not claims.is_full
        self._searches.note(now_s, claims.scan_s, is_short=not claims.is_full)
        late = claims.claimed_at - timedelta(seconds=LATE_COMMIT_S)
        self._ready_from = min(claims.first_ready or late, late)
        self.note_fold(claims.last_event, now_s)

    def note_fold(self, last_event: int, now_s: float) -> None:
        """Update the mark of the journal."""
        self._event.note(last_event, now_s)


class PollCursor:
    """Where a host's polls search for work in all its queues.

    What an earlier poll found is known: later polls need only what became due since.
    """

    def __init__(self) -> None:
        self._mark = LateMark((FIRST_AT, 0))
        self._searches = WholeSearches()

    @property
    def mark(self) -> tuple[datetime, int]:
        """The moment since which jobs and lanes became due, and the last journal row seen."""
        return _FIRST if self._searches.is_due else self._mark.value

    def note(self, ahead: WorkAhead, now_s: float) -> None:
        """Update the mark after a poll."""
        self._searches.note(now_s, ahead.took_s, is_short=True)
        self._mark.note((ahead.polled_at, ahead.last_event), now_s)
