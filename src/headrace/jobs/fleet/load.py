"""How loaded the queues are: the slot time that their work wants, against the slot time that they had. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

LOAD_MINUTES: Final = 5
"""Whole minutes over which load is taken, and the minute that is under way."""
MINUTES_SHOWN: Final = 60
FAILURES_SPAN_S: Final = 3600.0
FAILURES_COUNTED_MAX: Final = 1000
"""Of more failures in that time the newest are counted."""


class QueueLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue did in the span of `FleetLoad.span_s`."""

    queue: str
    done: int
    failed: int
    retried: int
    lost: int
    calls: int
    claimed: int
    run_s: float
    """Slot time of handler calls."""
    wait_s: float
    """From due to claimed, summed over the jobs claimed."""
    wait_max_s: float
    slot_s: float
    """How long slots belonged to the queue, busy or not."""

    @property
    def run_mean_s(self) -> float | None:
        """Slot time of a job; None where none ran."""
        ran = self.done + self.failed + self.retried
        return self.run_s / ran if ran else None

    @property
    def wait_mean_s(self) -> float | None:
        """From due to claimed, of a job; None where none was claimed."""
        return self.wait_s / self.claimed if self.claimed else None

    def ratio(self, waiting: int) -> float | None:
        """Slot time wanted by what ran and by the `waiting` jobs that are due, against what slots there were.

        Over 1 the queue falls behind. None: not known, since it had no slots, or nothing ran of what waits.
        """
        mean_s = self.run_mean_s
        if not self.slot_s or (waiting and mean_s is None):
            return None
        return (self.run_s + waiting * (mean_s or 0.0)) / self.slot_s


class FleetMinute(msgspec.Struct, frozen=True, kw_only=True):
    """What all queues did in the minute that begins at `minute`; minutes without work have none."""

    minute: datetime
    done: int
    failed: int
    retried: int
    run_s: float
    wait_max_s: float
    slot_s: float


class QueueFailures(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of a queue that failed, or were quarantined, in the last FAILURES_SPAN_S."""

    queue: str
    state: str
    """`failed` or `quarantined`."""
    jobs: int
    last_at: datetime
    last_error: str
    """The beginning of the newest one's error."""


class FleetLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What each queue did lately, and all of them in the minutes of the last hour, oldest first."""

    span_s: float
    """Of `queues`: LOAD_MINUTES and the minute under way, or since there are minutes here at all."""
    queues: list[QueueLoad]
    minutes: list[FleetMinute]
