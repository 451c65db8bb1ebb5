"""Which timeout class a photo starts in, as a pure rule over what its host was measured to need.

    a download ended -> which class would have been enough -> a fading weight of (customer, host, class)
    a photo is enqueued -> the shortest class that was enough for FIT of the weight -> its queue

A share and not the mean decides: a host whose photos take 0.3 s and 4 s has a mean that fits neither. With
the mean 60 % of slow photos were begun twice in the system that this replaces; the simulation in
`tests/fetch/test_routing.py` holds this rule to 5 %.

**It forgets**, by age (`fetch.speed_half_life`) and by number: RECENT downloads are remembered, so a host
that got faster comes back after some hundred photos, and needs no probes, for a long class measures a
short download as well as a short class does. **What counts**: bodies that came, and timeouts, which say
that a longer class is needed. An answer without a body (404, 304) says nothing of how long a photo
takes, unless it took longer than the shortest class.

Weights are kept by the length of a class, not by its place in a list: a class that is added or taken away
leaves what was learned true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.kernel.config import parse_duration_s

FIT: Final = 0.95
"""So much of what is remembered of a host must have fitted into a class."""
HEADROOM: Final = 1.25
"""A download that used more of a class than 1/HEADROOM is taken to need the next one."""
RECENT: Final = 50
"""Downloads of a host that are remembered, by weight."""
FORGOTTEN: Final = 0.05
"""A host with less weight than this is as good as new."""
CLASS_S_MAX: Final = 600.0
CLASSES_MAX: Final = 10
_HOST: Final = re.compile(r"(https?)://([^/?#]+)", re.IGNORECASE)
_PORTS: Final = {"http": ":80", "https": ":443"}


def parse_classes(text: str) -> tuple[float, ...]:
    """Seconds of `1s, 5s, 30s`, from short to long; the empty text is none. Raises: ValueError."""
    times_s = sorted({parse_duration_s(part) for part in text.split(",") if part.strip()})
    if len(times_s) > CLASSES_MAX or any(not 0.05 <= s <= CLASS_S_MAX for s in times_s):
        raise ValueError(
            f"up to {CLASSES_MAX} durations from 50ms to {CLASS_S_MAX:.0f}s, separated by commas"
        )
    return tuple(times_s)


@dataclass(frozen=True, slots=True)
class TimeClass:
    """A timeout class: its queue, and the time that a photo with its redirects may take in it."""

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
    def places(self) -> int:
        """Downloads at once in a slot: the longer a silent host is awaited, the more of them there are."""
        return min(1000, int(200 + 20 * self.time_s))


class Classes:
    """The timeout classes, from the shortest to the longest, and former ones that still have jobs."""

    def __init__(self, times_s: Iterable[float], former_s: Iterable[float] = ()) -> None:
        self.listed = tuple(TimeClass(s) for s in sorted(set(times_s))) or (TimeClass(30.0),)
        kept = {c.time_s for c in self.listed}
        self.former = tuple(TimeClass(s) for s in sorted(set(former_s) - kept))
        self._by_queue = {c.queue: c for c in (*self.listed, *self.former)}

    @property
    def first(self) -> TimeClass:
        """The shortest."""
        return self.listed[0]

    @property
    def last(self) -> TimeClass:
        """The longest."""
        return self.listed[-1]

    def of_queue(self, queue: str) -> TimeClass:
        """The class whose jobs are in `queue`; the longest for a queue that is none."""
        return self._by_queue.get(queue, self.last)

    def after(self, here: TimeClass) -> TimeClass | None:
        """The next longer one; None behind the longest."""
        return next((c for c in self.listed if c.time_s > here.time_s), None)

    def enough_for(self, took_s: float) -> TimeClass:
        """The shortest that leaves a download of `took_s` some headroom, or the longest."""
        return next((c for c in self.listed if c.time_s >= took_s * HEADROOM), self.last)

    def starting(self, weights: Mapping[float, float]) -> TimeClass:
        """Where a photo starts whose host needed these classes: weight by length of class."""
        total = sum(weights.values())
        if total < FORGOTTEN:
            return self.first
        for found in self.listed:
            fits = sum(weight for time_s, weight in weights.items() if time_s <= found.time_s)
            if fits >= FIT * total:
                return found
        return self.last

    def needed(self, outcome: str, took_s: float, here: TimeClass) -> float | None:
        """Length of the class that a download which ended so in `here` needed; None: it shows nothing."""
        if outcome == "failed:timeout":
            following = self.after(here)
            return (following or self.last).time_s
        if outcome != "received" and took_s <= self.first.time_s:
            return None
        return self.enough_for(took_s).time_s


def faded(weight: float, *, age_s: float, half_life_s: float, new: int) -> float:
    """What is left of a weight after `age_s` and `new` further downloads; sql/speeds.sql does the same."""
    return weight * float(0.5 ** (age_s / half_life_s)) * max(0.0, 1 - new / RECENT)


def host_of(url: str) -> str:
    """The host that is measured: lower case, with its port unless it is the usual one; "" for no URL."""
    match = _HOST.match(url)
    if match is None:
        return ""
    return match[2].lower().removesuffix(_PORTS[match[1].lower()])
