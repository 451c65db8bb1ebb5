"""Rates of queues from cumulative readings: jobs that become due per second, slot time per job.

Arrivals are finished jobs plus the growth of active ones, since a saturated queue only finishes its
capacity. The rate over 60 s counts unless the rate over 10 s is significantly higher: stable, yet
fast at bursts. Readings are cumulative and differenced by the reader's clock, so a late or missing
one costs precision only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import sqrt
from typing import Final

import msgspec

SLOW_S: Final = 60.0
FAST_S: Final = 10.0
GAP_S_MAX: Final = 3 * SLOW_S
"""Older readings are ignored after a longer gap."""
SPAN_S_MIN: Final = 1.0
FINISHED_MIN: Final = 5
HANDLER_S_DEFAULT: Final = 0.1


class Reading(msgspec.Struct, frozen=True):
    """Cumulative counts of a queue at a moment."""

    at_s: float
    """By the clock of the reader; only differences matter."""
    finished: int
    """Jobs that ever left `active`."""
    active: int
    """Due and running jobs."""
    run_s: float
    """Total slot time, including that of running handlers."""


class Rate(msgspec.Struct, frozen=True):
    """The traffic of a queue."""

    rate_per_s: float
    handler_s: float


class QueueRate:
    """The readings of one queue within the last minute."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()
        self._handler_s = HANDLER_S_DEFAULT

    @property
    def covered_s(self) -> float:
        """The time span of the readings."""
        return self._readings[-1].at_s - self._readings[0].at_s if self._readings else 0.0

    def observe(self, reading: Reading) -> None:
        """Add a reading. Older ones are ignored; decreased totals restart the window."""
        kept = self._readings
        if kept:
            last = kept[-1]
            if reading.at_s <= last.at_s:
                return
            has_restarted = reading.finished < last.finished or reading.run_s < last.run_s
            if has_restarted or reading.at_s - last.at_s > GAP_S_MAX:
                kept.clear()
        kept.append(reading)
        while len(kept) > 2 and kept[1].at_s <= reading.at_s - SLOW_S:
            kept.popleft()
        self._handler_s = self._handler()

    def rate(self) -> Rate:
        """The current rate. A span below a minute counts as a minute."""
        slow = self._arrivals(SLOW_S)
        fast = self._arrivals(FAST_S)
        is_higher = fast > 1.25 * slow + 3 * sqrt(max(slow, 0.1) / FAST_S)
        return Rate(fast if is_higher else slow, self._handler_s)

    def _since(self, window_s: float) -> Reading:
        """The latest reading at least `window_s` old, or the oldest."""
        first = self._readings[0]
        for reading in self._readings:
            if reading.at_s > self._readings[-1].at_s - window_s:
                break
            first = reading
        return first

    def _arrivals(self, window_s: float) -> float:
        """Jobs per second that became due."""
        if self.covered_s < SPAN_S_MIN:
            return 0.0
        first, last = self._since(window_s), self._readings[-1]
        arrived = last.finished - first.finished + last.active - first.active
        return max(0.0, arrived / (last.at_s - first.at_s))

    def _handler(self) -> float:
        """Slot time per job. With few finished jobs the last value holds, unless refuted."""
        first, last = self._readings[0], self._readings[-1]
        finished, spent_s = last.finished - first.finished, last.run_s - first.run_s
        if finished >= FINISHED_MIN:
            return spent_s / finished
        return max(self._handler_s, spent_s / FINISHED_MIN)


class Rates:
    """The rates of all queues, as observed by one scheduler."""

    def __init__(self) -> None:
        self._queues: dict[str, QueueRate] = {}

    @property
    def is_ready(self) -> bool:
        """Whether some queue has been observed for the fast window.

        A new leader must not plan earlier: an empty window would cut every queue to its minimum.
        """
        return any(queue.covered_s >= FAST_S for queue in self._queues.values())

    def observe(self, readings: Mapping[str, Reading]) -> None:
        """Add a reading of each queue; forget queues without one."""
        for name in self._queues.keys() - readings.keys():
            del self._queues[name]
        for name, reading in readings.items():
            self._queues.setdefault(name, QueueRate()).observe(reading)

    def rates(self) -> dict[str, Rate]:
        """The rate of each queue."""
        return {name: queue.rate() for name, queue in self._queues.items()}
