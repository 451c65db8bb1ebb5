"""Deadlines of many connections, and the rate limit of a signed URL.

A connection moves its deadline with every request. Moving it later has no cost: when its bucket
comes due, the deadline is still ahead and is carried over. So the cost is a dictionary entry for
each connection and timeout, and a deadline is at most one bucket late.

A rate-limited client may be ahead by one burst: a quarter of a second, but at least 64 KiB. So an
answer needs a timer for each burst and not for each segment. Unused rate is not saved.
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

BUCKET_S: Final = 0.25
BURST_S: Final = 0.25
BURST_BYTES_MIN: Final = 64 * 1024


class Watched(Protocol):
    """An item with a deadline. `Deadlines` owns both fields."""

    deadline_s: float
    bucket: int


W = TypeVar("W", bound=Watched)


class Deadlines(Generic[W]):
    """Items by deadline, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._buckets: dict[int, set[W]] = {}
        self._next: int | None = None

    def watch(self, item: W, deadline_s: float) -> None:
        """Set the deadline of `item`, replacing an earlier one."""
        item.deadline_s = deadline_s
        bucket = int(deadline_s / BUCKET_S) + 1
        if item.bucket and item.bucket <= bucket:
            return
        self.forget(item)
        item.bucket = bucket
        self._buckets.setdefault(bucket, set()).add(item)
        self._next = bucket if self._next is None else min(self._next, bucket)

    def forget(self, item: W) -> None:
        """Remove the deadline of `item`."""
        self._buckets.get(item.bucket, set()).discard(item)
        item.bucket = 0

    def take_due(self, now_s: float) -> list[W]:
        """Return the items whose deadline has passed, and remove their deadlines."""
        due: list[W] = []
        current = int(now_s / BUCKET_S)
        while self._next is not None and self._next <= current:
            for item in self._buckets.pop(self._next, ()):
                item.bucket = 0
                if item.deadline_s <= now_s:
                    due.append(item)
                else:
                    self.watch(item, item.deadline_s)
            self._next = min(self._buckets, default=None)
        return due


class RateLimit:
    """The rate limit of one answer, in seconds of one monotonic clock."""

    __slots__ = ("_burst_bytes", "_left_bytes", "_rate", "_seen_s")

    def __init__(self, rate: int, now_s: float) -> None:
        self._rate = rate
        self._burst_bytes = max(BURST_BYTES_MIN, int(rate * BURST_S))
        self._left_bytes = float(self._burst_bytes)
        self._seen_s = now_s

    def allowed_bytes(self, now_s: float) -> int:
        """The bytes that may be sent at `now_s`; 0: wait `wait_s`.

        Less than a quarter of a burst counts as 0. Otherwise the bytes earned during one send would
        allow the next one, and the client would occupy its worker until its answer ends.
        """
        earned = (now_s - self._seen_s) * self._rate
        self._left_bytes = min(self._burst_bytes, self._left_bytes + earned)
        self._seen_s = now_s
        return int(self._left_bytes) if self._left_bytes >= self._burst_bytes / 4 else 0

    def spend(self, sent_bytes: int) -> None:
        """Record sent bytes."""
        self._left_bytes -= sent_bytes

    def expected_bytes(self, over_s: float) -> int:
        """The bytes that a client at full speed has certainly received after `over_s`."""
        return int(self._rate * over_s / 2)

    def wait_s(self) -> float:
        """Seconds until half a burst may be sent."""
        return max(0.001, (self._burst_bytes / 2 - self._left_bytes) / self._rate)
