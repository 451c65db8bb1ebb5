"""Timeout classes: a pure rule that selects the class in which a photo starts.

    a download ended -> the class that was enough -> decaying weight of (customer, host, class)
    a photo is enqueued -> the shortest class that was enough for FIT of the weight -> its queue

A share decides, not the mean: a host whose photos take 0.3 s and 4 s has a mean that fits neither.
The simulation in `tests/fetch/test_routing.py` limits photos that start in too small a class to 5
%.

**Decay.** Weights decay by age (`fetch.speed_half_life`) and by number: RECENT downloads count. So
a host that became faster moves back after some hundred photos. Probes are unnecessary: a long
class measures a short download as well as a short class does.

**Evidence.** Received bodies, and timeouts, which prove that a longer class is needed. A response
without a body (404, 304) shows nothing, unless it took longer than the shortest class.

Weights are stored by the length of a class, so they stay valid when a class is added or removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.kernel.config import parse_duration_s

FIT: Final = 0.95
"""Share of a host's weight that must fit into its class."""
HEADROOM: Final = 1.25
"""A download that used more than 1/HEADROOM of a class counts for the next one."""
RECENT: Final = 50
"""Downloads of a host that count, by weight."""
FORGOTTEN: Final = 0.05
"""A host with less weight is treated as new."""
CLASS_S_MAX: Final = 600.0
CLASSES_MAX: Final = 10
_HOST: Final = re.compile(r"(https?)://([^/?#]+)", re.IGNORECASE)
_PORTS: Final = {"http": ":80", "https": ":443"}


def parse_classes(text: str) -> tuple[float, ...]:
    """Seconds of `1s, 5s, 30s`, shortest first; an empty text has none. Raises: ValueError."""
    times_s = sorted({parse_duration_s(part) for part in text.split(",") if part.strip()})
    if len(times_s) > CLASSES_MAX or any(not 0.05 <= s <= CLASS_S_MAX for s in times_s):
        raise ValueError(
            f"up to {CLASSES_MAX} durations from 50ms to {CLASS_S_MAX:.0f}s, separated by commas"
        )
    return tuple(times_s)


@dataclass(frozen=True, slots=True)
class TimeClass:
    """A timeout class: its queue, and the time limit of a photo with its redirects."""

    time_s: float

    @property
    def name(self) -> str:
        """`1s`, `500ms`."""
        if self.time_s == int(self.time_s):
            return f"{self.time_s:.0f}s"
        return f"{self.time_s * 1000:g}ms"

    @property
    def queue(self) -> str:
        """`fetch.1s`."""
        return f"fetch.{self.name}"

    @property
    def concurrency(self) -> int:
        """Concurrent downloads per slot; longer timeouts need more of them."""
        return min(1000, int(200 + 20 * self.time_s))


class Classes:
    """The timeout classes, shortest first, and former ones that still have jobs."""

    def __init__(self, times_s: Iterable[float], former_s: Iterable[float] = ()) -> None:
        self.listed = tuple(TimeClass(s) for s in sorted(set(times_s))) or (TimeClass(30.0),)
        kept = {c.time_s for c in self.listed}
        self.former = tuple(TimeClass(s) for s in sorted(set(former_s) - kept))
        self._by_queue = {c.queue: c for c in (*self.listed, *self.former)}

    @property
    def first(self) -> TimeClass:
        """The shortest class."""
        return self.listed[0]

    @property
    def last(self) -> TimeClass:
        """The longest class."""
        return self.listed[-1]

    def of_queue(self, queue: str) -> TimeClass:
        """The class of a queue; the longest for an unknown queue."""
        return self._by_queue.get(queue, self.last)

    def after(self, here: TimeClass) -> TimeClass | None:
        """The next longer class; None after the longest."""
        return next((c for c in self.listed if c.time_s > here.time_s), None)

    def enough_for(self, took_s: float) -> TimeClass:
        """The shortest class with headroom for a download of `took_s`, or the longest."""
        return next((c for c in self.listed if c.time_s >= took_s * HEADROOM), self.last)

    def starting(self, weights: Mapping[float, float]) -> TimeClass:
        """The class in which a photo starts, from its host's weights by length of class."""
        total = sum(weights.values())
        if total < FORGOTTEN:
            return self.first
        for found in self.listed:
            fits = sum(weight for time_s, weight in weights.items() if time_s <= found.time_s)
            if fits >= FIT * total:
                return found
        return self.last

    def needed(self, outcome: str, took_s: float, here: TimeClass) -> float | None:
        """Length of the class that a download in `here` needed; None: no evidence."""
        if outcome == "failed:timeout":
            following = self.after(here)
            return (following or self.last).time_s
        if outcome != "received" and took_s <= self.first.time_s:
            return None
        return self.enough_for(took_s).time_s


def decayed(weight: float, *, age_s: float, half_life_s: float, new: int) -> float:
    """A weight after `age_s` and `new` further downloads; fetch_note_hosts_v1 computes the same."""
    return weight * float(0.5 ** (age_s / half_life_s)) * max(0.0, 1 - new / RECENT)


def host_of(url: str) -> str:
    """Host of a URL in lower case, with a port other than the default; "" for no URL."""
    match = _HOST.match(url)
    if match is None:
        return ""
    return match[2].lower().removesuffix(_PORTS[match[1].lower()])
