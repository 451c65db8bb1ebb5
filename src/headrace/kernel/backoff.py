"""When to try again: exponential, capped, with full jitter.

Full jitter (a uniform draw between nothing and the cap of this attempt) spreads a herd best and
finishes no later than the other kinds (Brooker, "Exponential Backoff And Jitter", AWS, 2015). Half of
the delay is kept as a floor here, so that a lone retry is never immediate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s` doubles with each attempt up to `max_s`."""

    first_s: float
    max_s: float

    def delay_s(self, attempt: int, *, draw: float | None = None) -> float:
        """Seconds to wait after `attempt` failures (from 1); `draw` in [0, 1) fixes the jitter."""
        cap_s = min(self.max_s, self.first_s * 2.0 ** min(max(attempt, 1) - 1, 62))
        jitter = random.random() if draw is None else draw
        return cap_s * (0.5 + 0.5 * jitter)
