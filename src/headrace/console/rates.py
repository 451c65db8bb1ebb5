"""Rates of this machine's metrics, from the difference of two readings.

Each series is compared with itself, so roles that start or stop between readings cause no error. A
counter that fell was reset and counts from 0. The first reading gives no rates.
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
"""Time span that rates are averaged over."""
HISTORY_MAX: Final = 60
GAP_S_MAX: Final = 20.0
"""Older readings are not used for rates."""
LEAST_S: Final = 3.0
"""Roles write metrics every two seconds; a shorter span would be noise."""
GONE_S_MAX: Final = 3_600.0
"""A role that wrote nothing for longer is assumed to be stopped on purpose."""
_ROLE: Final = re.compile(r'role="(\w+)"')
_SERIES: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
Series = Mapping[tuple[str, str], float]


class Rates:
    """Recent readings of the metrics folder, shared by all pages of one console."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._readings: deque[tuple[float, Series]] = deque()
        self._history: dict[str, deque[tuple[float, float | None]]] = {}
        self._reading = asyncio.Lock()
        self._roles: dict[str, float] = {}

    async def read(self) -> None:
        """Take a reading in a thread, unless the last one is recent."""
        async with self._reading:
            now_s = time.monotonic()
            if self._readings and now_s - self._readings[-1][0] < READ_EVERY_S:
                return
            text = await asyncio.to_thread(merged_metrics, self._folder, "api")
            self.add(now_s, parse_series(text.decode()))

    def add(self, at_s: float, series: Series) -> None:
        """Add a reading taken at `at_s` and drop readings that are too old."""
        while self._readings and at_s - self._readings[0][0] > GAP_S_MAX:
            self._readings.popleft()
        self._readings.append((at_s, series))
        found = {match[1] for _, labels in series if (match := _ROLE.search(labels))}
        self._roles.update(dict.fromkeys(found, at_s))
        while len(self._readings) > 2 and at_s - self._readings[1][0] >= SPAN_S:
            self._readings.popleft()

    @property
    def is_measuring(self) -> bool:
        """Whether no two readings are far enough apart yet."""
        return not self._readings or self._readings[-1][0] - self._readings[0][0] < LEAST_S

    def gone(self) -> dict[str, float]:
        """Roles that stopped writing metrics, with the seconds since their last."""
        at_s = self._readings[-1][0] if self._readings else 0.0
        return {r: at_s - s for r, s in self._roles.items() if 0 < at_s - s < GONE_S_MAX}

    def rate_per_s(self, name: str, *labels: str) -> float | None:
        """Growth per second of counter `name` over series with all `labels`; None if unknown."""
        grown: list[float] = []
        for (_, before), (_, now) in pairwise(self._readings):
            for key in now.keys() & before.keys():
                if key[0] == name and all(one in key[1] for one in labels):
                    # A counter that fell was reset to 0.
                    by = now[key] - before[key]
                    grown.append(by if by >= 0 else now[key])
        if not grown or self.is_measuring:
            return None
        return sum(grown) / (self._readings[-1][0] - self._readings[0][0])

    def note(self, name: str, per_s: float | None) -> list[float | None]:
        """Record a rate under `name` once per reading; return the history, with None for gaps."""
        noted = self._history.setdefault(name, deque(maxlen=HISTORY_MAX))
        at_s = self._readings[-1][0] if self._readings else 0.0
        if not noted or noted[-1][0] != at_s:
            if noted and at_s - noted[-1][0] > SPAN_S:
                noted.append((noted[-1][0], None))
            noted.append((at_s, per_s))
        return [value for _, value in noted]

    def total(self, name: str, *labels: str) -> float | None:
        """Sum of the newest values of `name`; None if there is no such series."""
        if not self._readings:
            return None
        found = [
            value
            for (series, given), value in self._readings[-1][1].items()
            if series == name and all(one in given for one in labels)
        ]
        return sum(found) if found else None

    def greatest(self, name: str, *labels: str) -> float | None:
        """Maximum of the newest values of `name`; None if there is no such series."""
        if not self._readings:
            return None
        found = [
            value
            for (series, given), value in self._readings[-1][1].items()
            if series == name and all(one in given for one in labels)
        ]
        return max(found, default=None)


def parse_series(text: str) -> dict[tuple[str, str], float]:
    """Every series of a Prometheus exposition, by name and labels as written."""
    return {(name, labels): float(value) for name, labels, value in _SERIES.findall(text)}
