"""Limits of requests: connections per host, and rate tokens of a customer.

**Connections.** A process has a pool per host, and a share of the limit of the whole fleet. A
connection is waited for only as long as the request's rate-limit token is valid (a quarter of a
second). A later request would fall into a window that does not count it, and a host that was silent
for half a minute would receive all of them at once. So a job that gets no connection returns to its
queue with its token. As many jobs may wait as get a connection in time at the host's speed,
WAITERS_MAX at most; the others stay away for a moment, so no host fills the process. A host without
a response for UNRESPONSIVE_S is unresponsive: its jobs stay away longer and longer, up to
BACKOFF_S_MAX.

The photos of a host start in one timeout class, so the fleet's limit is divided by the number of
slots bound to that class, and a connection needs no coordination. Slots of other classes do not
count: hosts that hang need many of them, which must not slow down the others. Photos that a timeout
moved on get what remains of a division by the slots of all classes. Floating slots fetch where no
bound slot does, so they are counted where the plan has no slot, such as right after the start.

**Rate tokens.** Each HTTP request of a photo takes one from the customer's lane. A photo job
arrives with one token, valid for the limiter's slack. libcurl calls a hook right before each
request, also when it repeats one on a new connection because a kept one was dead. Without a token
the hook stops the request. So redirects, repeated requests and second addresses consume tokens like
any other. A token that expired before anything was sent is returned with its job.

Connecting may outlast the slack, and libcurl cannot hold a connection until a token is due. Such a
request is sent late and charges its lane a second token at that moment. So does a request without
a response for HUNG_S: an unresponsive host sees it only when it recovers.

`LaneClient` takes tokens for requests outside of photo jobs: catalogue files and the sampled
photos of a dry run. It uses PostgreSQL where a photo job uses its agent.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from headrace.fetch.host_stats import Classes
from headrace.fetch.model import LIMITER
from headrace.jobs import Jobs
from headrace.jobs.errors import LaneExhausted
from headrace.jobs.job_context import JobLane
from headrace.jobs.service.lanes import SLACK_S
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

UNRESPONSIVE_S: Final = 1.0
BACKOFF_S_MAX: Final = 10.0
HOSTS_MAX: Final = 10_000
WAITERS_MAX: Final = 32
_SMOOTHING: Final = 0.2
REFRESH_S: Final = 30.0
UNPLANNED_S: Final = 5.0
"""Age of the read plan while it has no slot that fetches."""
_LOG: Final = logger(__name__)


@dataclass(slots=True)
class _Host:
    limit: int
    """Of the last request for a connection."""
    busy: int = 0
    alive_s: float = field(default_factory=time.monotonic)
    """Time of the last response, or of the first request after an idle time."""
    is_silent: bool = False
    """The last request ended without a response."""
    changed_s: float = field(default_factory=time.monotonic)
    held_s: float = 0.0
    """Summed connection time since the last release."""
    took_s: float = UNRESPONSIVE_S
    """Smoothed time for which a connection is held (Little's law)."""
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)


class HostPool:
    """Connections of this process, at most `per_host` to each host, or the limit of a call."""

    def __init__(self, per_host: int) -> None:
        self._per_host = per_host
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    async def acquire(
        self,
        host: str,
        *,
        until_s: float | None,
        limit: int | None = None,
        ignores_queue_limit: bool = False,
    ) -> bool:
        """Acquire a connection to `host`; return False if none is free in time.

        `until_s`: the end of the wait, by `time.monotonic`. `limit`: connections to `host` from now
        on; held ones stay held. `ignores_queue_limit`: wait behind any number of others.
        """
        found = self._of(host)
        found.limit = limit or self._per_host
        if found.busy < found.limit and not found.waiters:
            self._begin(found)
            return True
        left_s = None if until_s is None else until_s - time.monotonic()
        is_queue_full = not ignores_queue_limit and len(found.waiters) >= self._waiters_max(
            found, left_s
        )
        if is_queue_full or (left_s is not None and left_s <= 0):
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found.waiters.append(waiter)
        try:
            async with asyncio.timeout(left_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                # It was assigned at the same moment: pass it to the next waiter.
                self._end(found)
            else:
                with suppress(ValueError):
                    found.waiters.remove(waiter)
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def release(self, host: str, *, is_answered: bool = True) -> None:
        """Release a connection and record whether the host responded."""
        found = self._of(host)
        found.is_silent = not is_answered
        if is_answered:
            found.alive_s = time.monotonic()
        self._end(found)

    def backoff_s(self, host: str) -> float:
        """Delay of a job that got no connection to `host`; 0: retry at once."""
        found = self._of(host)
        silent_s = time.monotonic() - found.alive_s
        wait_s = 0.0
        if found.busy and silent_s > UNRESPONSIVE_S:
            wait_s = min(2 * silent_s, BACKOFF_S_MAX)
        elif len(found.waiters) >= found.limit:
            wait_s = min(UNRESPONSIVE_S, found.took_s * (1 + len(found.waiters) / found.limit))
        return wait_s * (0.5 + random.random() / 2)

    def _waiters_max(self, found: _Host, left_s: float | None) -> int:
        """Jobs that may wait if their token is valid for `left_s`."""
        if left_s is None or (found.busy and time.monotonic() - found.alive_s > UNRESPONSIVE_S):
            return found.limit
        in_time = int(left_s / max(found.took_s, 0.001) * found.limit)
        return max(found.limit, min(in_time, WAITERS_MAX))

    def _of(self, host: str) -> _Host:
        found = self._hosts.get(host)
        if found is None:
            found = self._hosts[host] = _Host(self._per_host)
            if len(self._hosts) > HOSTS_MAX:
                self._forget_idle()
        return found

    def _forget_idle(self) -> None:
        """Delete hosts without connections, except the newest."""
        *old, _newest = self._hosts
        for host in old:
            if not self._hosts[host].busy and not self._hosts[host].waiters:
                del self._hosts[host]

    def _begin(self, found: _Host) -> None:
        if found.busy == 0 and not found.is_silent:
            found.alive_s = time.monotonic()
        self._count(found, 1)

    def _end(self, found: _Host) -> None:
        self._count(found, -1)
        found.took_s += _SMOOTHING * (found.held_s - found.took_s)
        found.held_s = 0.0
        while found.waiters and found.busy < found.limit:
            waiter = found.waiters.popleft()
            if not waiter.done():
                self._count(found, 1)
                waiter.set_result(None)

    def _count(self, found: _Host, change: int) -> None:
        now_s = time.monotonic()
        found.held_s += found.busy * (now_s - found.changed_s)
        found.changed_s = now_s
        found.busy += change


class HostQuota:
    """This process's shares of the fleet's connections to a host, by timeout class."""

    def __init__(self, jobs: Jobs, classes: Classes, *, connections: int) -> None:
        self._jobs = jobs
        self._queues = [c.queue for c in (*classes.listed, *classes.former)]
        self._connections = connections
        # One connection until the plan is read: other processes may have all of theirs.
        self._slots: Mapping[str, int] = dict.fromkeys(self._queues, connections)
        """Processes by queue; a worker without slots of its own works all of them."""
        self._all_slots = connections
        self._due_s = 0.0
        self._is_read = False
        self._refreshing: asyncio.Task[None] | None = None

    def share(self, queue: str, *, is_first: bool) -> int:
        """Connections of this process to one host for photos of `queue`.

        `is_first`: photos of the host start in this class.
        """
        slots = self._slots.get(queue, 0) if is_first else self._all_slots
        return share_of(self._connections, slots, is_first=is_first)

    async def refresh(self) -> None:
        """Start to read the fleet's plan if the last read is too old; wait for the first one."""
        if time.monotonic() >= self._due_s and self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        if not self._is_read and self._refreshing is not None:
            await asyncio.shield(self._refreshing)

    async def close(self) -> None:
        """Cancel a running refresh."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def _refresh(self) -> None:
        valid_s = UNPLANNED_S
        try:
            state = await self._jobs.fleet.state()
            hosts = [host for host in state.hosts if not host.is_silent]
            workers = sum(host.kind == "work" for host in hosts)
            floats = sum(slot.queue is None for host in hosts for slot in host.slots)
            planned = {q: sum(host.planned.get(q, 0) for host in hosts) for q in self._queues}
            self._slots = {queue: workers + (slots or floats) for queue, slots in planned.items()}
            self._all_slots = workers + (sum(planned.values()) or floats)
            self._is_read = True
            if any(planned.values()) or len(hosts) == workers:
                valid_s = REFRESH_S
        except HeadraceError as error:
            _LOG.info("host_quota_not_read", error=error.text)
        finally:
            self._due_s = time.monotonic() + valid_s
            self._refreshing = None


def share_of(connections: int, slots: int, *, is_first: bool) -> int:
    """Share of one of `slots` processes; at least one. Only first classes get what is left over."""
    share = connections / max(1, slots)
    return max(1, math.ceil(share) if is_first else int(share))


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


class HostPaused(Exception):
    """A redirect leads to a host that requested a pause; requeue the job after `after_s`."""

    def __init__(self, after_s: float) -> None:
        super().__init__("the host requested a pause")
        self.after_s = after_s


class TokenDebts:
    """Outstanding tokens of lanes, charged in the background; shared by the photos of a process."""

    def __init__(self) -> None:
        self.lead_s = 0.0
        """Recent largest time from a token to its request.

        A request that would leave late costs its lane a second token, so the job is requeued
        instead.
        """
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
        """Drop the outstanding tokens."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pay(self, lane: JobLane) -> None:
        """Charge all outstanding tokens of the lane, as one batch.

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
            self.valid_until_s is None or now_s + self._debts.lead_s <= self.valid_until_s
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
            lead_s = max(now_s - self._acquired_s, self._debts.lead_s * _FADING)
            self._debts.lead_s = min(LEAD_S_MAX, lead_s)
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
