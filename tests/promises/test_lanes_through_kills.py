"""However workers are killed and stopped.

No window of a lane has a start too many, and no job is lost.

Judged by the moments at which handlers began, which they noted themselves. A stopped worker is the
hard case: it wakes with jobs in hand whose window is over.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from contextlib import suppress

import pytest
from recorded_fleet import HEARTBEAT_S, LEASE_S, ROLES
from tests.kit.chaos import ChaosProxy
from tests.kit.checkers import over_concurrency, over_limit
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob

EACH_ROLE = pytest.mark.parametrize("role", ROLES)
STARTS_MAX, WINDOW_S, CONCURRENCY = 3, 0.5, 2
WORKERS = 3
LANES = "abcd"
PATIENT = {
    "HEADRACE_POSTGRES_STATEMENT_TIMEOUT": "10s",
    "HEADRACE_JOBS_HEARTBEAT": "10s",
    "HEADRACE_JOBS_LEASE": "30s",
}
"""It does not look for leases that it knows nothing of before the test is over."""
LOST_AFTER_S = LEASE_S - HEARTBEAT_S - 0.2


@pytest.mark.slow
@EACH_ROLE
async def test_no_window_is_over_through_kills_and_stops(fleet, role):
    await _storm(fleet, role, jobs_a_lane=10, faults=8, pause_s_max=0.4)


@pytest.mark.soak
@EACH_ROLE
async def test_no_window_is_over_through_many_kills_and_long_stops(fleet, role):
    await _storm(fleet, role, jobs_a_lane=150, faults=60, pause_s_max=0.8)


@pytest.mark.slow
@EACH_ROLE
async def test_a_grant_that_arrives_late_starts_nothing(fleet, database_url, role):
    """The worst moment for a worker to stand still.

    Granted, not yet started, until others had the next window.
    """
    await fleet.jobs.lanes.set(
        "laned", "a", starts_max=STARTS_MAX, window_s=WINDOW_S, concurrency=None
    )
    with ChaosProxy(database_url) as proxy:
        slow = fleet.start(role, url=proxy.url, **PATIENT)
        quick = fleet.start(role, host="another")
        await wait_true(lambda: fleet.has_hosts(2))
        for process in (slow, quick):
            fleet.signal(process, signal.SIGSTOP)
        claims = [(b"headrace.claim_lanes", about) for about in await _claim_arguments(fleet)]
        holds = [proxy.hold_reply(*claim, times=1_000) for claim in claims]
        ids = await fleet.enqueue([NewJob(queue="laned", lane="a", payload={})] * 9)
        fleet.signal(slow, signal.SIGCONT)
        await wait_true(fleet.leased, what="the slow one is granted its jobs")
        fleet.signal(quick, signal.SIGCONT)
        await wait_true(lambda: len(fleet.started()) == STARTS_MAX, what="the next window is full")
        assert any(hold.fired for hold in holds)
        for hold in holds:
            proxy.release(hold)
        await wait_true(lambda: fleet.ended(ids))
    assert over_limit(fleet.history, starts_max=STARTS_MAX, window_s=WINDOW_S) == []
    assert set(fleet.started().values()) == {1}
    assert fleet.findings() == []


async def _claim_arguments(fleet):
    """How the protocol spells the first two arguments of a claim: each host, and the queue."""
    queue = (await fleet.jobs.queues.declare())["laned"].id
    return [struct.pack("!iqii", 8, host, 4, queue) for host in await fleet.hosts()]


async def _storm(fleet, role, *, jobs_a_lane, faults, pause_s_max):
    """Work all lanes off while workers are stopped, woken, killed and replaced."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for lane in LANES:
        await fleet.jobs.lanes.set(
            "laned", lane, starts_max=STARTS_MAX, window_s=WINDOW_S, concurrency=CONCURRENCY
        )
    workers = [_Worker(fleet, role, f"host-{number}") for number in range(WORKERS)]
    await wait_true(lambda: fleet.has_hosts(WORKERS))
    jobs = [
        NewJob(queue="laned", lane=lane, payload={"hold_s": chance.uniform(0, 0.2)})
        for _ in range(jobs_a_lane)
        for lane in LANES
    ]
    ids = await fleet.enqueue(jobs)
    for number in range(faults):
        next_s = time.monotonic() + chance.uniform(0, pause_s_max)
        await wait_true(lambda next_s=next_s: time.monotonic() > next_s)
        chance.choice(workers).suffer(chance, is_fatal=number % 5 == 2)
        await _sweep(fleet, workers)
    for worker in workers:
        worker.wake()
    await wait_true(lambda: fleet.ended(ids), deadline_s=jobs_a_lane + 30)
    history = fleet.history
    assert over_limit(history, starts_max=STARTS_MAX, window_s=WINDOW_S) == []
    assert over_concurrency(history, concurrency=CONCURRENCY) == []
    assert fleet.findings() == []


class _Worker:
    """One of the workers; who replaces a killed one takes its place."""

    def __init__(self, fleet, role, host):
        self.fleet, self.role, self.host = fleet, role, host
        self.process = fleet.start(role, host=host)
        self.stopped_s = None
        self.stopped = []

    def suffer(self, chance, *, is_fatal):
        """Be killed or stopped, whole or one process of it, or woken."""
        family = self.process.family()
        if is_fatal:
            self._die(chance.choice(family[1:]) if family[1:] and chance.random() < 0.5 else None)
        elif self.stopped_s is None:
            self.stopped = chance.choice([family, [chance.choice(family)]])
            self._send(self.stopped, signal.SIGSTOP)
            self.stopped_s = time.monotonic()
        else:
            self.wake()

    def wake(self):
        """Go on, if it was stopped."""
        if self.stopped_s is not None:
            self.note_lost()
            self._send(self.stopped, signal.SIGCONT)
            self.stopped_s = None

    def _die(self, pid):
        """One process below it, which it has to replace, or all of it, which we do."""
        if pid is not None:
            self.fleet.recorder.note("lost", "process", pid=pid)
            self._send([pid], signal.SIGKILL)
            return
        self.fleet.kill(self.process)
        self.process = self.fleet.start(self.role, host=self.host)
        self.stopped_s = None

    def _send(self, pids, number):
        for pid in set(pids) & set(self.process.family()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def note_lost(self):
        """Say that its host may have expired by now, so that others may have its jobs."""
        if self.stopped_s is not None and time.monotonic() - self.stopped_s > LOST_AFTER_S:
            self.fleet.note_lost(self.process)


async def _sweep(fleet, workers):
    for worker in workers:
        worker.note_lost()
    await fleet.jobs.sweep()
