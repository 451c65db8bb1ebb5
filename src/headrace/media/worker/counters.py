"""Counts of the fast path, kept in plain numbers and added to the metrics four times a second.

This avoids the locks of the metrics in every request.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from headrace.kernel.metrics import FINE_BUCKETS_S, bound, observe_many
from headrace.media.model import BLOCKS, REQUESTS, SENT_BYTES, SOURCES, STATUSES, TTFB

ANSWERED: Final = {s: bound(REQUESTS, "media_requests_total", status=str(s)) for s in STATUSES}
SENT: Final = {s: bound(SENT_BYTES, "media_bytes_total", source=s) for s in SOURCES}
_FAST_STATUSES: Final = (200, 206)
HIT: Final = bound(BLOCKS, "media_blocks_total", outcome="hit")
_PASS: Final = bound(BLOCKS, "media_blocks_total", outcome="pass")


class Counters:
    """The counts of one worker since the last flush."""

    __slots__ = (
        "_answers",
        "_firsts",
        "_firsts_s",
        "_hits",
        "_passed",
        "_passed_bytes",
        "_sent_bytes",
    )

    def __init__(self) -> None:
        self._begin()

    def note_answer(self, status: int, first_byte_s: float) -> None:
        """Count an answer with `status` and the time to its first byte."""
        self._answers[status] += 1
        self._firsts[bisect_left(FINE_BUCKETS_S, first_byte_s)] += 1
        self._firsts_s += first_byte_s

    def note_hit(self, sent_bytes: int) -> None:
        """Count bytes of a cached block that were sent from memory."""
        self._hits += 1
        self._sent_bytes += sent_bytes

    def note_proxied(self, sent_bytes: int) -> None:
        """Count bytes of a peer's block that were sent with their head."""
        self._passed += 1
        self._passed_bytes += sent_bytes

    def flush(self) -> None:
        """Add all counts to the metrics."""
        for status, count in self._answers.items():
            if count:
                ANSWERED[status].inc(count)
        if self._hits:
            HIT.inc(self._hits)
            SENT["memory"].inc(self._sent_bytes)
        if self._passed:
            _PASS.inc(self._passed)
            SENT["peer"].inc(self._passed_bytes)
        if self._firsts_s:
            observe_many(TTFB, self._firsts, self._firsts_s)
        self._begin()

    def _begin(self) -> None:
        self._answers = dict.fromkeys(_FAST_STATUSES, 0)
        self._firsts = [0] * (len(FINE_BUCKETS_S) + 1)
        self._firsts_s = 0.0
        self._hits = self._sent_bytes = 0
        self._passed = self._passed_bytes = 0
