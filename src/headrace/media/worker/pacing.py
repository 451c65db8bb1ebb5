"""The rate that a signed URL grants: how many bytes may go out now, and when again.

A client may be ahead by one burst: a quarter of a second's worth, never less than a 64 KiB write, so that a paced
answer costs a timer for each burst and not for each segment. What was not used is not saved up.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.25
BURST_BYTES_MIN: Final = 64 * 1024


class Pace:
    """Bytes of one answer over time; moments are seconds of one monotonic clock."""

    __slots__ = ("_burst_bytes", "_left_bytes", "_rate", "_seen_s")

    def __init__(self, rate: int, now_s: float) -> None:
        self._rate = rate
        self._burst_bytes = max(BURST_BYTES_MIN, int(rate * BURST_S))
        self._left_bytes = float(self._burst_bytes)
        self._seen_s = now_s

    def allowed_bytes(self, now_s: float) -> int:
        """How many bytes may go out at `now_s`; 0: wait `wait_s`."""
        earned = (now_s - self._seen_s) * self._rate
        self._left_bytes = min(self._burst_bytes, self._left_bytes + earned)
        self._seen_s = now_s
        return max(0, int(self._left_bytes))

    def spend(self, sent_bytes: int) -> None:
        """So many went out."""
        self._left_bytes -= sent_bytes

    def expected_bytes(self, over_s: float) -> int:
        """What a client that takes all it may has got of `over_s` for sure."""
        return int(self._rate * over_s / 2)

    def wait_s(self) -> float:
        """Until half a burst may go out again."""
        return max(0.001, (self._burst_bytes / 2 - self._left_bytes) / self._rate)
