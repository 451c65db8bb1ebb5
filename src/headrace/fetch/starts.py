"""The requests that one photo sends, each counted in its customer's lane before it leaves.

A job comes with one start, good until a moment (the limiter's slack). libcurl says right before each request
that it is about to send one, also when it sends one again over a new connection because a kept one was
dead: without a start it is stopped there. So redirects, second sends and second addresses are starts like
any other. A start that was late before anything was sent is given back with its job.

Connecting may outlast the slack, and libcurl cannot hold a connection until a start is due. Such a request
is sent late and its lane is charged another start at that moment; so is one that was silent for HUNG_S,
which a host that was jammed sees only when it wakes.
"""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar, Final

from headrace.jobs.errors import LaneExhausted
from headrace.jobs.job_context import JobLane

HUNG_S: Final = 5.0
LEAD_S_MAX: Final = 0.1
"""A start is left to others that much before its end, at most."""
_FADING: Final = 0.9
WAIT_MAX_S: Final = 1.0
"""A further start that is not due by then is refused: the job comes back for it.

One that is promised for later counts in the lane from now on: with 10 s of a window of 20 s a redirect could
take half a start more than it sent.
"""
_OWED_WAIT_S: Final = 600.0
_owed: Final[dict[str, int]] = {}
"""Starts that each lane is still to be charged, while a task of `_paying` is at it."""
_paying: Final[set[asyncio.Task[None]]] = set()
"""The loop itself holds tasks only weakly."""


class NotStarted(Exception):
    """The job's start is over and nothing was sent: it goes back, as it came or (`after_s` > 0) for a while."""

    def __init__(self, after_s: float = 0.0) -> None:
        super().__init__("nothing was sent")
        self.after_s = after_s


class Starts:
    """What one photo may send. Without a lane: whatever it likes."""

    lead_s: ClassVar[float] = 0.0
    """How long it lately took this process at most from a start in hand to the request: what would leave
    late costs its lane a second start, so it goes back instead."""

    def __init__(
        self,
        lane: JobLane | None = None,
        before_s: float | None = None,
        *,
        may_return: bool = True,
    ) -> None:
        self.sent = 0
        """Requests that left."""
        self.waited_s = 0.0
        """How long further starts were waited for: no time of the host's."""
        self.before_s = before_s
        """Until when the start in hand is good, by `time.monotonic`; None: for ever."""
        self._lane = lane
        self._may_return = may_return
        self._is_free = True
        self._taken_s = 0.0

    async def take(self) -> None:
        """Return with a start in hand. Raises: NotStarted; LaneExhausted, where none is due soon."""
        if self._lane is None:
            self._is_free = True
            return
        now_s = self._taken_s = time.monotonic()
        if self._is_free and (self.before_s is None or now_s + Starts.lead_s <= self.before_s):
            return
        if self._is_free and not self.sent and self._may_return:
            raise NotStarted
        if self._is_free and self.before_s is not None and now_s <= self.before_s:
            return
        try:
            self.before_s = await self._lane.spend(1, wait_max_s=WAIT_MAX_S)
        finally:
            self._taken_s = time.monotonic()
            self.waited_s += self._taken_s - now_s
        self._is_free = True

    def send(self) -> bool:
        """A request is about to leave; False: no start is in hand, it must not."""
        if not self._is_free:
            return False
        self._is_free = False
        self.sent += 1
        if self.before_s is not None:
            now_s = time.monotonic()
            Starts.lead_s = min(LEAD_S_MAX, max(now_s - self._taken_s, Starts.lead_s * _FADING))
            if now_s > self.before_s:
                self.charge()
        return True

    def charge(self) -> None:
        """Take one more start out of the lane, as soon as it has one; nobody waits for it."""
        if self._lane is not None and self.before_s is not None:
            is_first = self._lane not in _owed
            _owed[self._lane] = _owed.get(self._lane, 0) + 1
            if is_first:
                task = asyncio.get_running_loop().create_task(_pay(self._lane))
                _paying.add(task)
                task.add_done_callback(_paying.discard)


async def _pay(lane: JobLane) -> None:
    """Charge what is owed, all that gathered meanwhile at once.

    One by one, the charges of a late moment kept the claims of their host waiting for seconds, which made
    the next starts late as well.
    """
    try:
        while starts := _owed[lane]:
            _owed[lane] = 0
            await _spend(lane, starts)
    finally:
        del _owed[lane]


async def _spend(lane: JobLane, starts: int) -> None:
    try:
        await lane.spend(starts, wait_max_s=_OWED_WAIT_S)
    except LaneExhausted:
        if starts > 1:
            await _spend(lane, starts // 2)
            await _spend(lane, starts - starts // 2)
