"""A dead worker loses no job; one that was taken for dead records nothing any more, and says so.

The processes that users run, killed and stopped whole. Hosts are aged in SQL instead of waiting 30
s for them.
"""

from __future__ import annotations

import signal

import pytest
from recorded_fleet import ROLES
from tests.kit.checkers import counted_twice, overlapping
from tests.kit.waiting import wait_true

from headrace.jobs import NewGroup, NewJob

pytestmark = pytest.mark.slow
EACH_ROLE = pytest.mark.parametrize("role", ROLES)
UNHURRIED = {
    "HEADRACE_JOBS_LEASE": "30m",
    "HEADRACE_JOBS_HEARTBEAT": "10m",
    "HEADRACE_POSTGRES_CONNECT_TIMEOUT": "30s",
    "HEADRACE_POSTGRES_STATEMENT_TIMEOUT": "30s",
}
"""The worker checks its leases only after the end of the test, and waits long for the database."""


@EACH_ROLE
async def test_a_killed_worker_loses_no_job(fleet, role):
    ids = await _hold(fleet, role)
    [doomed] = fleet.processes
    fleet.kill(doomed)
    assert (await fleet.jobs.sweep()).jobs_returned == 0, "its host had not expired yet"
    await fleet.expire_hosts()
    assert (await fleet.jobs.sweep()).jobs_returned == 5
    fleet.let_go()
    fleet.start(role, host="heir")
    await wait_true(lambda: fleet.ended(ids))
    assert set(fleet.started().values()) == {2}
    await _require_one_effect_each(fleet, ids)


@EACH_ROLE
async def test_a_stopped_worker_is_refused_when_it_wakes(fleet, role):
    ids = await _hold(fleet, role)
    [zombie] = fleet.processes
    fleet.signal(zombie, signal.SIGSTOP)
    fleet.note_lost(zombie)
    await fleet.expire_hosts()
    assert (await fleet.jobs.sweep()).jobs_returned == 5
    fleet.start(role, host="heir", **UNHURRIED)
    # What was lost with a process comes back one by one.
    await wait_true(lambda: max(fleet.started().values()) == 2)
    fleet.let_go()
    await wait_true(lambda: fleet.ended(ids))
    fleet.signal(zombie, signal.SIGCONT)
    refused = await wait_true(lambda: fleet.history.of("fail", what="effect"))
    assert {event.pid for event in refused} <= set(zombie.family())
    # What became of its batch is refused as well.
    await wait_true(lambda: zombie.events("lease_lost"))
    await _require_one_effect_each(fleet, ids)
    assert not await fleet.leased()


@EACH_ROLE
async def test_a_worker_that_was_taken_for_dead_begins_anew(fleet, role):
    """Nothing stopped it: it merely was not heard.

    Its late acks are refused, then it has another row.
    """
    ids = await _hold(fleet, role, HEADRACE_JOBS_HEARTBEAT="3s")
    [zombie] = fleet.processes
    fleet.note_lost(zombie)
    await fleet.expire_hosts()
    assert (await fleet.jobs.sweep()).jobs_returned == 5
    fleet.let_go()
    await wait_true(lambda: zombie.events("lease_lost"))
    await wait_true(lambda: len(zombie.events("host_registered")) == 2)
    assert zombie.events("host_lost")
    await wait_true(lambda: fleet.ended(ids))
    await _require_one_effect_each(fleet, ids)


@pytest.mark.parametrize("role", ["agent", pytest.param("work", marks=pytest.mark.soak)])
async def test_workers_killed_at_random_lose_and_double_nothing(fleet, role):
    """Three kills over 200 jobs: each is settled once, and its group calls back once."""
    members = [NewJob(queue="noted", payload={"key": f"{n}", "hold_s": 0.02}) for n in range(200)]
    group = NewGroup(members=members, on_done=NewJob(queue="told"))
    await fleet.jobs.enqueue_groups([group])
    for number in range(4):
        process = fleet.start(role, host=f"host-{number}")
        # A busy machine may have let the process before start every job by the time it was killed.
        least = min(len(fleet.started()) + 20, len(members))
        await wait_true(lambda least=least: len(fleet.started()) >= least)
        if number < 3:
            fleet.kill(process)
            await fleet.expire_hosts()
            await wait_true(lambda: _is_swept(fleet))
    await wait_true(lambda: fleet.history.of("end", what="told"))
    [told] = fleet.history.of("start", what="told")
    assert (told.facts["done"], told.facts["failed"], told.facts["quarantined"]) == (200, 0, 0)
    assert set(fleet.history.told("end", "noted", "key")) == {f"{n}" for n in range(200)}
    assert fleet.findings() == []
    status = await fleet.jobs.queues.get("noted")
    assert (status.ready, status.leased, status.failed) == (0, 0, 0)


async def _hold(fleet, role, **env):
    """Five jobs that a process of that role has begun; their ids."""
    await fleet.begin_effects()
    ids = await fleet.enqueue([NewJob(queue="gated", payload={})] * 5)
    fleet.start(role, **{**UNHURRIED, **env})
    await wait_true(lambda: len(fleet.started()) == 5)
    return ids


async def _require_one_effect_each(fleet, ids):
    """One committed effect a job, none under a lease that had passed on, and nothing lost."""
    rows = await fleet.effects()
    assert counted_twice("effect", rows) == []
    assert rows == ids
    assert overlapping(fleet.history) == []
    assert fleet.findings() == []


async def _is_swept(fleet):
    await fleet.jobs.sweep()
    return not await fleet.leased()
