"""An access log as a seller reads it: how many requests came in any window, and how much of the
allowed rate was used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """One line. `status` 0: the client left before it was answered."""

    arrived_ns: int
    host: str
    path: str
    status: int
    held_us: int

    @property
    def arrived_s(self) -> float:
        """When its head was there, by CLOCK_MONOTONIC."""
        return self.arrived_ns / 1e9


@dataclass(frozen=True)
class Judged:
    """The judgment of a log about a limit."""

    checked: int
    """Windows looked at: one begins with each request."""
    over: int
    least_s: float
    """The shortest time in which one request too many came."""
    share: float
    """Requests in the whole windows watched, to those allowed."""


def read_log(path: Path) -> list[Request]:
    """By moment of arrival; a line that is not whole yet is left."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            arrived_ns, host, name, status, held_us = line.split()
            found.append(Request(int(arrived_ns), host, name, int(status), int(held_us)))
    return sorted(found, key=lambda request: request.arrived_ns)


def by_host(requests: Iterable[Request]) -> dict[str, list[float]]:
    """The moments of each host's requests, in s."""
    found: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        found[request.host].append(request.arrived_s)
    return dict(found)


def judge(
    moments: Mapping[str, Sequence[float]],
    *,
    starts_max: int,
    window_s: float,
    from_s: float,
    until_s: float,
) -> Judged:
    """Look at every `starts_max` + 1 requests of a host in a row: they need at least a window.

    The share is of the whole windows between `from_s` and `until_s`.
    """
    spans = [
        later - first
        for own in moments.values()
        for first, later in zip(own, own[starts_max:], strict=False)
    ]
    windows = int((until_s - from_s) / window_s)
    last_s = from_s + windows * window_s
    inside = sum(from_s < moment <= last_s for own in moments.values() for moment in own)
    allowed = starts_max * windows * len(moments)
    return Judged(
        checked=len(spans),
        over=sum(span < window_s for span in spans),
        least_s=min(spans, default=0.0),
        share=inside / allowed if allowed else 0.0,
    )


def per_second(moments: Sequence[float], *, from_s: float, until_s: float) -> list[int]:
    """How many fall into each second from `from_s` on."""
    counts = [0] * max(1, int(until_s - from_s))
    for moment in moments:
        if from_s <= moment < from_s + len(counts):
            counts[int(moment - from_s)] += 1
    return counts
