"""Where the time to the first byte goes: a clock for some requests, by stage.

Five observations of a Prometheus histogram cost 5 us, an eighth of a hot answer; so one request in
SAMPLED_EVERY is measured, and each one that is traced. Samples are taken by count, not by chance or
outcome: the shares of stages and the tails are those of all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.kernel.metrics import bound
from headrace.media.model import STAGE, STAGES

SAMPLED_EVERY: Final = 16
_SERIES: Final = {stage: bound(STAGE, "media_stage_seconds", stage=stage) for stage in STAGES}


class StageClock:
    """Of one request: each `mark` ends a stage and begins the next."""

    __slots__ = ("_last_s", "_now_s", "spent_s")

    def __init__(self, now_s: Callable[[], float], began_s: float) -> None:
        self._now_s = now_s
        self._last_s = began_s
        self.spent_s: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """What went by since the last mark was `stage`."""
        now_s = self._now_s()
        self.spent_s[stage] = self.spent_s.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def observe(self) -> None:
        """Count the stages in the histograms."""
        for stage, spent_s in self.spent_s.items():
            _SERIES[stage].observe(spent_s)


class StageSampler:
    """Which requests of one worker are measured."""

    def __init__(self) -> None:
        self._left = 0

    def is_next(self) -> bool:
        """Whether this request is one of the sample; the first is."""
        self._left -= 1
        if self._left >= 0:
            return False
        self._left = SAMPLED_EVERY - 1
        return True
