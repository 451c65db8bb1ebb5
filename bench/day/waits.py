"""How long jobs waited: exact counts by class, of the day, of a disaster, of each minute."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest wait that `share` of all do not exceed; 0 of none."""
    needed = share * counts.total()
    seen = 0
    for wait in sorted(counts):
        seen += counts[wait]
        if seen >= needed:
            return wait
    return 0


class Waits:
    """First in, first out by queue; a wait is a number of steps. Empty queues cost no Python."""

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = groups
        self.names = sorted(set(groups))
        self._index = np.array([self.names.index(group) for group in groups])
        self._lines: list[deque[list[int]]] = [deque() for _ in groups]
        self.all: dict[str, Counter[int]] = {name: Counter() for name in self.names}
        self.disaster: dict[str, Counter[int]] = {name: Counter() for name in self.names}
        self.minute: dict[str, Counter[int]] = {name: Counter() for name in self.names}

    def step(
        self, now: int, arrived: Ints, started: Ints, *, has_line: npt.NDArray[np.bool_]
    ) -> None:
        """Jobs that arrived and jobs that started; `has_line`.

        Where some waited before or wait now.
        """
        at_once = np.bincount(
            self._index, weights=np.where(has_line, 0, started), minlength=len(self.names)
        )
        for name, count in zip(self.names, at_once, strict=True):
            if count:
                self.minute[name][0] += int(count)
        for i in np.nonzero(has_line)[0]:
            self._serve(int(i), now, int(arrived[i]), int(started[i]))

    def end_minute(self, *, is_disaster: bool) -> dict[str, int]:
        """p99 of the minute by class, in steps."""
        p99 = {name: percentile(counts, 0.99) for name, counts in self.minute.items()}
        for name, counts in self.minute.items():
            self.all[name].update(counts)
            if is_disaster:
                self.disaster[name].update(counts)
            counts.clear()
        return p99

    def end_day(self, now: int) -> None:
        """Count the jobs that still wait, with their wait so far."""
        for i, line in enumerate(self._lines):
            for since, count in line:
                self.all[self.groups[i]][now - since] += count

    def _serve(self, i: int, now: int, arrived: int, started: int) -> None:
        line, counts = self._lines[i], self.minute[self.groups[i]]
        if arrived:
            line.append([now, arrived])
        while started:
            since, count = line[0]
            served = min(count, started)
            counts[now - since] += served
            started -= served
            if served == count:
                line.popleft()
            else:
                line[0][1] -= served


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of none."""
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0
