"""How a simulated host behaves.

Its answer to a path follows from the path alone, so that every system and every run meets the same
host.

The mix is the one that was seen in production: 40 % of hosts answer within 1 s, 40 % within 5 s, 20
% within 30 s, and 60 to 80 % of attempts fail; here with the seconds scaled down.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

RESET = -1
"""The connection is closed instead of an answer."""
SILENT = -2
"""No answer ever comes."""
REDIRECTED = "/moved"
FAILURES = ((404, 0.45), (403, 0.1), (410, 0.1), (503, 0.2), (500, 0.05), (RESET, 0.1))
PASSING = (503, 500, RESET)
"""These pass: the second attempt at such a path is answered."""
BANDS = ((0.4, 0.02, 1.0), (0.4, 1.0, 5.0), (0.2, 5.0, 30.0))
"""Share of the hosts, and from and to how many seconds their answers take."""


@dataclass(frozen=True)
class HostPlan:
    """One host."""

    low_s: float = 0.0
    high_s: float = 0.0
    """An answer takes between these."""
    failing: float = 0.0
    """Share of the paths whose first attempt fails."""
    redirecting: float = 0.0
    """Share of the good paths that lead to another one first."""
    is_silent: bool = False

    def answer(self, host: str, path: str, attempt: int) -> tuple[int, float]:
        """(status, seconds until it is sent) of the attempt of that number, from 0."""
        chance = random.Random(crc32(f"{host}{path}".encode()))
        wait_s = chance.uniform(self.low_s, self.high_s)
        if self.is_silent:
            return SILENT, 0.0
        kind, fate = chance.random(), chance.random()
        if path.startswith(REDIRECTED):
            return 200, wait_s
        if fate < self.failing:
            status = _failure(kind)
            return (200 if status in PASSING and attempt else status), wait_s
        if chance.random() < self.redirecting:
            return 302, wait_s
        return 200, wait_s


def _failure(kind: float) -> int:
    for status, share in FAILURES:
        if kind < share:
            return status
        kind -= share
    return FAILURES[0][0]


def seed_mix(hosts: int, *, scale: float, name: str = "shop{}.test") -> dict[str, HostPlan]:
    """Hosts of the mix seen in production, with its seconds times `scale`."""
    chance = random.Random(5)
    plans = {}
    for number in range(hosts):
        low_s, high_s = _band((number + 0.5) / hosts)
        middle_s = chance.uniform(low_s, high_s * 0.8) * scale
        plans[name.format(number)] = HostPlan(
            low_s=max(low_s * scale, middle_s * 0.8),
            high_s=min(high_s * scale * 0.9, middle_s * 1.2),
            failing=chance.uniform(0.6, 0.8),
        )
    return plans


def _band(at: float) -> tuple[float, float]:
    for share, low_s, high_s in BANDS:
        if at < share:
            return low_s, high_s
        at -= share
    return BANDS[-1][1:]


def as_document(plans: dict[str, HostPlan], *, body_bytes: int) -> dict[str, Any]:
    """What the process of the hosts reads."""
    return {"body_bytes": body_bytes, "hosts": {n: asdict(plan) for n, plan in plans.items()}}


def from_document(document: dict[str, Any]) -> dict[str, HostPlan]:
    """The plans of `as_document`."""
    return {name: HostPlan(**plan) for name, plan in document["hosts"].items()}
