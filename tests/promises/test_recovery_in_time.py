"""How soon the jobs of the dead are ready again.

A host's after its lease and a sweep, a slot's at once.

Nobody takes a dead host's place here, and nobody sweeps but the schedulers that users run. Times
are the contract's with a shorter lease, and in the soak run the contract's own.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from recorded_fleet import LEASE_S, ROLES
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob

SWEEP_S = 3.0
MACHINE_S = 10
"""What a busy machine may add; the soak run asks for the contract's seconds."""
QUICK_PLANS = {"HEADRACE_JOBS_PLAN_EVERY": "1s"}
EACH_ROLE = pytest.mark.parametrize("role", ROLES)


@pytest.mark.slow
@EACH_ROLE
async def test_a_dead_hosts_jobs_are_ready_after_its_lease_and_a_sweep(fleet, role):
    await _start_leader(fleet)
    doomed = await _hold(fleet, role, host="first")
    assert await _kill_and_wait(fleet, doomed) <= LEASE_S + SWEEP_S + MACHINE_S


@pytest.mark.soak
@EACH_ROLE
async def test_a_dead_hosts_jobs_are_ready_within_35_s(fleet, role):
    """With the settings that users have."""
    await _start_leader(fleet)
    settings = {"HEADRACE_JOBS_LEASE": "30s", "HEADRACE_JOBS_HEARTBEAT": "10s"}
    doomed = await _hold(fleet, role, host="first", **settings)
    # Just renewed is the worst moment.
    assert 15 < await _kill_and_wait(fleet, doomed) <= 35


@pytest.mark.slow
async def test_whichever_scheduler_dies_another_sweeps(fleet):
    leader = await _start_leader(fleet)
    for number in range(2):
        heir = fleet.start("scheduler", **QUICK_PLANS)
        doomed = await _hold(fleet, "work", host=f"host-{number}")
        fleet.kill(leader)
        assert await _kill_and_wait(fleet, doomed) <= LEASE_S + SWEEP_S + MACHINE_S
        leader = await _wait_leads(heir)


@pytest.mark.slow
async def test_a_dead_slots_jobs_are_ready_at_once(fleet):
    agent = await _hold(fleet, "agent", host="first", HEADRACE_JOBS_LEASE="5m")
    [slot] = {event.pid for event in fleet.history.of("start")}
    # So that nobody claims them before they are seen.
    await fleet.jobs.queues.set("gated", paused=True)
    fleet.recorder.note("lost", "process", pid=slot)
    os.kill(slot, signal.SIGKILL)
    # Its host goes on with a lease of 5 min, which is what this must not wait for.
    await wait_true(lambda: _are_ready(fleet))
    assert agent.events("host_lost") == []


async def _start_leader(fleet):
    """The scheduler that leads."""
    return await _wait_leads(fleet.start("scheduler", **QUICK_PLANS))


async def _wait_leads(scheduler):
    await wait_true(lambda: scheduler.events("lead_taken"))
    return scheduler


async def _hold(fleet, role, *, host, **env):
    """A process of that role that has begun five jobs."""
    if not await _are_ready(fleet):
        await fleet.enqueue([NewJob(queue="gated", payload={})] * 5)
    seen = sum(fleet.started().values())
    process = fleet.start(role, host=host, HEADRACE_JOBS_FLOATS="1", **env)
    await wait_true(lambda: sum(fleet.started().values()) > seen)
    return process


async def _kill_and_wait(fleet, doomed):
    """Seconds from its death until nothing is leased any more and all jobs are ready."""
    fleet.kill(doomed)
    killed_s = time.monotonic()
    await wait_true(lambda: _are_ready(fleet))
    return time.monotonic() - killed_s


async def _are_ready(fleet):
    status = await fleet.jobs.queues.get("gated")
    return (status.ready, status.leased) == (5, 0)
