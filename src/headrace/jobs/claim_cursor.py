"""The position from which a consumer continues to claim jobs of one queue. No I/O.

Every claimed job leaves a dead entry in the index that claims scan, until vacuum removes it.
Vacuum cannot remove it while an older transaction is open. A consumer therefore remembers its
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from headrace.jobs.store.leases import PRIORITIES, Claims

_FIRST: Final = (datetime(1970, 1, 1, tzinfo=UTC), 0)
LOWEST_FIRST_EVERY: Final = 8
MARKS_KEPT_S: Final = 1.0
MARKS_KEPT_S_MAX: Final = 30.0
WHOLE_SHARE: Final = 0.05
COSTLY_S: Final = 0.02
LATE_COMMIT_S: Final = 0.5


class ClaimCursor:
    """The position of one consumer in one queue, per priority, and the order of priorities.

    Marks let claims skip the dead index entries of former claims. They are dropped after a short
    batch and every second, so that late commits, returned jobs and more urgent jobs are found. A
    scan from the beginning is slow while a long transaction keeps many dead entries. It is then
    made less often, so that it takes at most WHOLE_SHARE of the time, and jobs that commit late
    wait longer.
    """

    saw_all: bool = False
    """The last claim scanned from the beginning and was short: no other job was due."""

    def __init__(self) -> None:
        self.marks = [_FIRST] * len(PRIORITIES)
        self._order: Sequence[int] = PRIORITIES
        self._claims = 0
        self._is_whole = True
        self._whole_at_s = 0.0
        self._whole_s = 0.0

    @property
    def is_costly(self) -> bool:
        """Whether a scan from the beginning is slow; claims from the marks are not."""
        return self._whole_s > COSTLY_S

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
        took_s: float = 0.0,
        leases_max: int | None = None,
    ) -> None:
        """Update the marks after a claim of up to `jobs_max` jobs in `leases_max` leases.

        A claim that used all its leases may have stopped at a job that needs its own lease,
        because its process died before.
        """
        if self._is_whole:
            self._whole_at_s, self._whole_s = now_s, took_s
        kept_s = min(max(MARKS_KEPT_S, self._whole_s / WHOLE_SHARE), MARKS_KEPT_S_MAX)
        jobs = sum(len(claim.ids) for claim in claims.leases) + claims.moved
        is_short = jobs < jobs_max and (leases_max is None or len(claims.leases) < leases_max)
        self.saw_all = is_short and self._is_whole
        self._is_whole = now_s - self._whole_at_s > kept_s or (is_short and not self.is_costly)
        if self._is_whole:
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
