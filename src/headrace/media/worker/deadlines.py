"""Deadlines of very many connections: cheap to move, looked at in coarse buckets of time.

A connection moves its deadline with every request. Moving it later touches nothing: the bucket it stands
in comes due, finds the deadline still ahead, and carries it over. So the cost is a dictionary entry for
each connection and timeout, not one for each request, and a deadline is met at most one bucket late.
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

BUCKET_S: Final = 0.25


class Watched(Protocol):
    """What may have a deadline; both fields are owned by `Deadlines`."""

    deadline_s: float
    bucket: int


W = TypeVar("W", bound=Watched)


class Deadlines(Generic[W]):
    """Who is due when; moments are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._buckets: dict[int, set[W]] = {}
        self._next: int | None = None

    def watch(self, item: W, deadline_s: float) -> None:
        """Give `item` this deadline instead of any other it has."""
        item.deadline_s = deadline_s
        bucket = int(deadline_s / BUCKET_S) + 1
        if item.bucket and item.bucket <= bucket:
            return
        self.forget(item)
        item.bucket = bucket
        self._buckets.setdefault(bucket, set()).add(item)
        self._next = bucket if self._next is None else min(self._next, bucket)

    def forget(self, item: W) -> None:
        """`item` has no deadline any more."""
        self._buckets.get(item.bucket, set()).discard(item)
        item.bucket = 0

    def take_due(self, now_s: float) -> list[W]:
        """Those whose deadline has come; they have none now."""
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
