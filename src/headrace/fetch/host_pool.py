"""Connections per host: the pool of this process, and its share of the limit of the whole fleet.

A connection is waited for only as long as the request's rate-limit token is valid (a quarter of a
second). A later request would fall into a window that does not count it, and a host that was silent
for half a minute would receive all of them at once. So a job that gets no connection returns to its
queue with its token. As many jobs may wait as get a connection in time at the host's speed,
WAITERS_MAX at most; the others stay away for a moment, so no host fills the process. A host without
a response for JAMMED_S is jammed: its jobs stay away longer and longer, up to BACKOFF_S_MAX.

The fleet's limit is divided by the number of slots bound to a timeout class, whichever hosts they
work for, so a connection needs no coordination. Floating slots are not counted: they fetch where
no bound slot does.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from headrace.fetch.routing import Classes
from headrace.jobs import Jobs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

JAMMED_S: Final = 1.0
BACKOFF_S_MAX: Final = 10.0
HOSTS_MAX: Final = 10_000
WAITERS_MAX: Final = 32
_SMOOTHING: Final = 0.2
REFRESH_S: Final = 30.0
_LOG: Final = logger(__name__)


@dataclass(slots=True)
class _Host:
    busy: int = 0
    alive_s: float = field(default_factory=time.monotonic)
    """Time of the last response, or of the first request after an idle time."""
    is_silent: bool = False
    """The last request ended without a response."""
    changed_s: float = field(default_factory=time.monotonic)
    held_s: float = 0.0
    """Summed connection time since the last release."""
    took_s: float = JAMMED_S
    """Smoothed time for which a connection is held (Little's law)."""
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)


class HostPool:
    """Connections of this process, at most `per_host` to each host."""

    def __init__(self, per_host: int) -> None:
        self.per_host = per_host
        """May change at any time; held connections stay held."""
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    async def acquire(
        self, host: str, *, until_s: float | None, ignores_queue_limit: bool = False
    ) -> bool:
        """Acquire a connection to `host`; return False if none is free in time.

        `until_s`: the end of the wait, by `time.monotonic`.

        `ignores_queue_limit`: wait behind any number of others.
        """
        found = self._of(host)
        if found.busy < self.per_host and not found.waiters:
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
        if found.busy and silent_s > JAMMED_S:
            wait_s = min(2 * silent_s, BACKOFF_S_MAX)
        elif len(found.waiters) >= self.per_host:
            wait_s = min(JAMMED_S, found.took_s * (1 + len(found.waiters) / self.per_host))
        return wait_s * (0.5 + random.random() / 2)

    def _waiters_max(self, found: _Host, left_s: float | None) -> int:
        """Jobs that may wait if their token is valid for `left_s`."""
        if left_s is None or (found.busy and time.monotonic() - found.alive_s > JAMMED_S):
            return self.per_host
        in_time = int(left_s / max(found.took_s, 0.001) * self.per_host)
        return max(self.per_host, min(in_time, WAITERS_MAX))

    def _of(self, host: str) -> _Host:
        found = self._hosts.get(host)
        if found is None:
            found = self._hosts[host] = _Host()
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
        while found.waiters and found.busy < self.per_host:
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
    """Keeps `pool.per_host` at this process's share of the fleet's connections."""

    def __init__(self, jobs: Jobs, classes: Classes, pool: HostPool, *, connections: int) -> None:
        self._jobs = jobs
        self._queues = {c.queue for c in (*classes.listed, *classes.former)}
        self._pool = pool
        self._connections = connections
        self._due_s = 0.0
        self._refreshing: asyncio.Task[None] | None = None

    def refresh_soon(self) -> None:
        """Start to read the fleet's plan if the last read is older than REFRESH_S."""
        if time.monotonic() >= self._due_s and self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())

    async def close(self) -> None:
        """Cancel a running refresh."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def _refresh(self) -> None:
        try:
            state = await self._jobs.fleet.state()
            slots = sum(
                1 if host.kind == "work" else planned_slots(host.planned, self._queues)
                for host in state.hosts
                if not host.is_silent
            )
            self._pool.per_host = quota_of(self._connections, slots)
        except HeadraceError as error:
            _LOG.info("host_quota_not_read", error=error.text)
        finally:
            self._due_s = time.monotonic() + REFRESH_S
            self._refreshing = None


def planned_slots(planned: dict[str, int], queues: set[str]) -> int:
    """Number of a host's slots that are bound to one of `queues`."""
    return sum(slots for queue, slots in planned.items() if queue in queues)


def quota_of(connections: int, slots: int) -> int:
    """Connections to one host per process, with `slots` processes; at least one."""
    return max(1, math.ceil(connections / max(1, slots)))
