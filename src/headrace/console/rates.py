"""Rates of what this machine's roles count: two readings of its metrics, and the time between them.

Counters of roles that came or went between the two would tell nonsense, so each series is compared by itself and one that fell
begins anew. Whoever asks first gets no rates, since nothing was read before; nothing is guessed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from headrace.kernel.metrics import merged_metrics

READ_EVERY_S: Final = 1.5
SPAN_S: Final = 12.0
"""Rates are means over about so long."""
NOTED_MAX: Final = 60
GAP_S_MAX: Final = 20.0
"""What was read longer ago is no other end of a rate."""
LEAST_S: Final = 3.0
"""Roles write their figures every two seconds, so a shorter span tells chance."""
GONE_TOLD_S: Final = 3_600.0
"""A role that came no more for so long was stopped on purpose."""
_ROLE: Final = re.compile(r'role="(\w+)"')
_SERIES: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
Series = Mapping[tuple[str, str], float]


class Rates:
    """The last readings of one process; asked by everyone who looks at the overview."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._readings: deque[tuple[float, Series]] = deque()
        self._noted: dict[str, deque[tuple[float, float | None]]] = {}
        self._reading = asyncio.Lock()
        self._roles: dict[str, float] = {}

    async def read(self) -> None:
        """Take a reading, unless there is one of just now; some ms in a thread."""
        async with self._reading:
            now_s = time.monotonic()
            if self._readings and now_s - self._readings[-1][0] < READ_EVERY_S:
                return
            text = await asyncio.to_thread(merged_metrics, self._folder, "api")
            self.add(now_s, parse_series(text.decode()))

    def add(self, at_s: float, series: Series) -> None:
        """Take this reading of `at_s`, and forget those that are too old to compare with."""
        while self._readings and at_s - self._readings[0][0] > GAP_S_MAX:
            self._readings.popleft()
        self._readings.append((at_s, series))
        found = {match[1] for _, labels in series if (match := _ROLE.search(labels))}
        self._roles.update(dict.fromkeys(found, at_s))
        while len(self._readings) > 2 and at_s - self._readings[1][0] >= SPAN_S:
            self._readings.popleft()

    @property
    def is_measuring(self) -> bool:
        """Whether there are no two readings yet that are far enough apart."""
        return not self._readings or self._readings[-1][0] - self._readings[0][0] < LEAST_S

    def gone(self) -> dict[str, float]:
        """The roles that wrote figures before and write none now, with the seconds since."""
        at_s = self._readings[-1][0] if self._readings else 0.0
        return {r: at_s - s for r, s in self._roles.items() if 0 < at_s - s < GONE_TOLD_S}

    def rate_per_s(self, name: str, *labels: str) -> float | None:
        """What counter `name` grows by a second, over series with all `labels` (`outcome="done"`); None: not known."""
        grown: list[float] = []
        for (_, before), (_, now) in pairwise(self._readings):
            for key in now.keys() & before.keys():
                if key[0] == name and all(one in key[1] for one in labels):
                    # A counter that fell began anew at 0.
                    by = now[key] - before[key]
                    grown.append(by if by >= 0 else now[key])
        if not grown or self.is_measuring:
            return None
        return sum(grown) / (self._readings[-1][0] - self._readings[0][0])

    def note(self, name: str, per_s: float | None) -> list[float | None]:
        """Remember a rate under `name`, once a reading; the last of them, a gap where nobody looked."""
        noted = self._noted.setdefault(name, deque(maxlen=NOTED_MAX))
        at_s = self._readings[-1][0] if self._readings else 0.0
        if not noted or noted[-1][0] != at_s:
            if noted and at_s - noted[-1][0] > SPAN_S:
                noted.append((noted[-1][0], None))
            noted.append((at_s, per_s))
        return [value for _, value in noted]

    def total(self, name: str, *labels: str) -> float | None:
        """The sum of the newest values of `name`; None: there is no such series."""
        if not self._readings:
            return None
        found = [
            value
            for (series, given), value in self._readings[-1][1].items()
            if series == name and all(one in given for one in labels)
        ]
        return sum(found) if found else None

    def greatest(self, name: str, *labels: str) -> float | None:
        """The greatest of the newest values of `name`; None: there is no such series."""
        if not self._readings:
            return None
        found = [
            value
            for (series, given), value in self._readings[-1][1].items()
            if series == name and all(one in given for one in labels)
        ]
        return max(found, default=None)


def parse_series(text: str) -> dict[tuple[str, str], float]:
    """Every series of an exposition, by name and labels as they are written."""
    return {(name, labels): float(value) for name, labels, value in _SERIES.findall(text)}
