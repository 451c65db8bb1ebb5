"""Rate-limit tokens: one per HTTP request of a photo, taken from the customer's lane.

A photo job arrives with one token, valid for the limiter's slack. libcurl calls a hook right
before each request, also when it repeats one on a new connection because a kept one was dead.
Without a token the hook stops the request. So redirects, repeated requests and second addresses
consume tokens like any other. A token that expired before anything was sent is returned with its
job.

Connecting may outlast the slack, and libcurl cannot hold a connection until a token is due. Such a
request is sent late and charges its lane a second token at that moment. So does a request without
a response for HUNG_S: a jammed host sees it only when it recovers.

`LaneClient` takes tokens for requests outside of photo jobs: catalogue files and the sampled
photos of a dry run. It uses PostgreSQL where a photo job uses its agent.
"""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar, Final

from headrace.fetch.model import LIMITER
from headrace.jobs import Jobs
from headrace.jobs.errors import LaneExhausted
from headrace.jobs.job_context import JobLane
from headrace.jobs.service.lanes import SLACK_S

HUNG_S: Final = 5.0
LEAD_S_MAX: Final = 0.1
"""Largest margin before its expiry at which a token is returned unused."""
_FADING: Final = 0.9
WAIT_MAX_S: Final = 1.0
"""Longest wait for a further token; a longer one requeues the job.

A token reserved for later counts in the lane at once. With a wait of 10 s in a window of 20 s,
a redirect would consume half a token more than it sends.
"""
_OWED_WAIT_S: Final = 600.0
TRIES: Final = 5


class TokenExpired(Exception):
    """The job's token expired before a request was sent.

    Requeue the job at once, or after `after_s` if that is over 0.
    """

    def __init__(self, after_s: float = 0.0) -> None:
        super().__init__("nothing was sent")
        self.after_s = after_s


class TokenDebts:
    """Tokens that lanes still owe, charged in the background."""

    def __init__(self) -> None:
        self._owed: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """The event loop keeps weak references only."""

    def add(self, lane: JobLane) -> None:
        """Charge the lane one more token as soon as it has one."""
        is_first = lane not in self._owed
        self._owed[lane] = self._owed.get(lane, 0) + 1
        if is_first:
            task = asyncio.get_running_loop().create_task(self._pay(lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drop the debts that are still open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pay(self, lane: JobLane) -> None:
        """Charge all tokens that the lane owes, as one batch.

        Charged one by one, they would delay the claims of the lane for seconds and expire the next
        tokens too.
        """
        try:
            while tokens := self._owed[lane]:
                self._owed[lane] = 0
                await _spend(lane, tokens)
        finally:
            del self._owed[lane]


class RateTokens:
    """The tokens of one photo; unlimited without a lane."""

    lead_s: ClassVar[float] = 0.0
    """Recent largest time from a token to its request in this process.

    A request that would leave late costs its lane a second token, so the job is requeued instead.
    """

    def __init__(
        self,
        lane: JobLane | None = None,
        valid_until_s: float | None = None,
        *,
        may_return: bool = True,
        debts: TokenDebts | None = None,
    ) -> None:
        self.sent = 0
        """Requests sent."""
        self.waited_s = 0.0
        """Time spent waiting for further tokens; not counted as the host's time."""
        self.valid_until_s = valid_until_s
        """Expiry of the current token, by `time.monotonic`; None: never."""
        self._lane = lane
        self._may_return = may_return
        self._debts = debts or TokenDebts()
        self._has_token = True
        self._acquired_s = 0.0

    async def acquire(self) -> None:
        """Wait until a token is available.

        Raises: TokenExpired; LaneExhausted if none is due soon.
        """
        if self._lane is None:
            self._has_token = True
            return
        now_s = self._acquired_s = time.monotonic()
        if self._has_token and (
            self.valid_until_s is None or now_s + RateTokens.lead_s <= self.valid_until_s
        ):
            return
        if self._has_token and not self.sent and self._may_return:
            raise TokenExpired
        if self._has_token and self.valid_until_s is not None and now_s <= self.valid_until_s:
            return
        try:
            self.valid_until_s = await self._lane.spend(1, wait_max_s=WAIT_MAX_S)
        finally:
            self._acquired_s = time.monotonic()
            self.waited_s += self._acquired_s - now_s
        self._has_token = True

    def consume(self) -> bool:
        """Consume the token for a request; False: no token, do not send."""
        if not self._has_token:
            return False
        self._has_token = False
        self.sent += 1
        if self.valid_until_s is not None:
            now_s = time.monotonic()
            RateTokens.lead_s = min(
                LEAD_S_MAX, max(now_s - self._acquired_s, RateTokens.lead_s * _FADING)
            )
            if now_s > self.valid_until_s:
                self.charge()
        return True

    def charge(self) -> None:
        """Charge the lane one more token, in the background."""
        if self._lane is not None and self.valid_until_s is not None:
            self._debts.add(self._lane)


async def _spend(lane: JobLane, tokens: int) -> None:
    try:
        await lane.spend(tokens, wait_max_s=_OWED_WAIT_S)
    except LaneExhausted:
        if tokens > 1:
            await _spend(lane, tokens // 2)
            await _spend(lane, tokens - tokens // 2)


class LaneClient:
    """Access to a customer's lane for requests outside of photo jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._debts = TokenDebts()

    async def tokens(self, customer: str, *, wait_max_s: float) -> RateTokens:
        """Tokens of one download, the first already acquired. Raises: LaneExhausted."""
        lane = JobLane.of(customer, LIMITER, self)
        valid_until_s = await lane.spend(wait_max_s=wait_max_s)
        return RateTokens(lane, valid_until_s, may_return=False, debts=self._debts)

    async def spend(self, queue: str, lane: str, tokens: int, wait_max_s: float) -> float:
        """Consume `tokens` of the lane, wait until they are valid, and return their expiry.

        `queue` is the limiter's name here. Raises: LaneExhausted.
        """
        for _ in range(TRIES):
            called_s = time.monotonic()
            wait_s = await self._jobs.lanes.spend(queue, lane, tokens, wait_max_s=wait_max_s)
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
            valid_until_s = called_s + wait_s + SLACK_S
            if time.monotonic() <= valid_until_s:
                return valid_until_s
        raise LaneExhausted(lane, tokens, wait_max_s)

    def spend_blocking(self, queue: str, lane: str, tokens: int, wait_max_s: float) -> None:
        """`spend` for a thread that may block."""
        asyncio.run(self.spend(queue, lane, tokens, wait_max_s))

    def report_progress(self, job_id: int, ratio: float, text: str) -> None:
        """Do nothing: there is no job."""
