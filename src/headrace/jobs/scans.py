"""Where a consumer's claims of one queue go on. No I/O.

Every job that was claimed leaves a dead entry in the index that claims walk, until vacuum takes it away; and while any
transaction is open that is older, vacuum may not. A consumer therefore remembers how far it came.
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


class Scan:
    """Where a consumer's claims of one queue go on, and which priorities they begin with.

    Marks keep claims off the dead index entries of what was claimed before: 97,000 jobs/s beside a
    24 s transaction instead of 5,000. They are dropped after a short batch and each second, so that late
    commits, returned jobs and more urgent ones are seen. Where looking from the beginning is slow, since a
    long transaction keeps very many dead entries there, it is done the more seldom: it costs a twentieth of
    the time whatever happens, and what commits late meanwhile waits.
    """

    saw_all: bool = False
    """The last claim began at the beginning and was short: nothing else was due."""

    def __init__(self) -> None:
        self.marks = [_FIRST] * len(PRIORITIES)
        self._order: Sequence[int] = PRIORITIES
        self._claims = 0
        self._is_whole = True
        self._whole_at_s = 0.0
        self._whole_s = 0.0

    @property
    def is_costly(self) -> bool:
        """Whether looking from the beginning takes long; claiming on from the marks does not."""
        return self._whole_s > COSTLY_S

    def next_order(self) -> Sequence[int]:
        """Priorities in the order to claim them: every 8th time the last first, so that none starves."""
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
        """Learn from a claim that asked for `jobs_max` in up to `leases_max` leases.

        A claim that used all its leases may have ended before a job whose process died, which needs its own.
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
            # Jobs of a lease are in order, so the last of each priority is what remains.
            for priority, key in dict(zip(claim.priorities, keys, strict=True)).items():
                found[priority] = max(found.get(priority, _FIRST), key)
        # Priorities before the one that the claim ended in gave all that was due.
        reached = [self._order.index(priority) for priority in found]
        last = len(self._order) if is_short else max(reached, default=0)
        late = (claims.claimed_at - timedelta(seconds=LATE_COMMIT_S), 0)
        for place, priority in enumerate(self._order):
            ended = late if place < last else _FIRST
            self.marks[priority] = max(self.marks[priority], found.get(priority, _FIRST), ended)
