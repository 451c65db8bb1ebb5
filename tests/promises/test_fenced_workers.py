"""A worker that was declared dead commits and starts nothing, whatever it still holds.

Precise interleavings that a storm meets only by chance: both roles are processes as users run
them, hosts are expired in SQL.
"""

from __future__ import annotations

import signal
import struct
import time

import pytest
from tests.kit.chaos import ChaosProxy
from tests.kit.checkers import counted_twice, over_limit, overlapping
from tests.kit.storm.fleet import LEASE_S, LONG_LEASE, ROLES
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import JobState, NewJob

pytestmark = pytest.mark.slow
EACH_ROLE = pytest.mark.parametrize("role", ROLES)
STARTS_MAX, WINDOW_S = 3, 0.5
HELD = compile_query(
    "held",
    "-- Slots that a host may use.\nSELECT coalesce(sum(slots), 0) FROM headrace.slot_allowance"
    " WHERE host = :host",
)


def one_role_each_run(first):
    """One role in every run, the other one in the soak run."""
    [other] = set(ROLES) - {first}
    return pytest.mark.parametrize("role", [first, pytest.param(other, marks=pytest.mark.soak)])


async def hold(fleet, role, **settings):
    """Five jobs that a process has begun, now of an expired host; their ids and the process."""
    await fleet.begin_effects()
    ids = await fleet.add("gated", 5)
    zombie = fleet.start(role, **{**LONG_LEASE, **settings})
    await wait_true(lambda: len(fleet.started()) == 5)
    return ids, zombie


async def require_one_effect_each(fleet, ids):
    """One committed effect a job, none under an old lease, and nothing lost."""
    rows = await fleet.effect_rows()
    assert counted_twice("effect", rows) == []
    assert rows == ids
    assert overlapping(fleet.history) == []
    assert fleet.findings() == []


@one_role_each_run("work")
async def test_a_stopped_worker_is_refused_when_it_wakes(fleet, role):
    ids, zombie = await hold(fleet, role)
    fleet.signal(zombie, signal.SIGSTOP)
    fleet.note_lost(zombie)
    assert (await fleet.jobs.sweep()).jobs_returned == 0, "its host had not expired yet"
    await fleet.expire_hosts()
    assert (await fleet.jobs.sweep()).jobs_returned == 5
    fleet.start(role, host="heir", **LONG_LEASE)
    # Jobs lost with a process return one by one.
    await wait_true(lambda: max(fleet.started().values()) == 2)
    fleet.let_go()
    await wait_true(lambda: fleet.ended(ids))
    fleet.signal(zombie, signal.SIGCONT)
    refused = await wait_true(lambda: fleet.history.of("fail", what="effect"))
    assert {event.pid for event in refused} <= set(zombie.family())
    await wait_true(lambda: zombie.events("lease_lost"), what="its acks are refused, too")
    await require_one_effect_each(fleet, ids)
    assert not await fleet.leased()


@one_role_each_run("agent")
async def test_a_worker_whose_heartbeats_were_late_registers_again(fleet, role):
    """Its late acks are refused."""
    ids, zombie = await hold(fleet, role, JOBS_HEARTBEAT="3s")
    fleet.note_lost(zombie)
    await fleet.expire_hosts()
    assert (await fleet.jobs.sweep()).jobs_returned == 5
    fleet.let_go()
    await wait_true(lambda: zombie.events("lease_lost"))
    await wait_true(lambda: len(zombie.events("host_registered")) == 2)
    assert zombie.events("host_lost")
    await wait_true(lambda: fleet.ended(ids))
    await require_one_effect_each(fleet, ids)


@EACH_ROLE
async def test_a_lost_row_frees_its_allowances_before_the_next_one(fleet, role):
    """Otherwise a host that loses one row after another keeps a queue of few slots from all."""
    worker = fleet.start(role, **{**LONG_LEASE, "JOBS_HEARTBEAT": "300ms"})
    [first] = await wait_true(lambda: worker.events("host_registered"))

    async def held() -> int:
        return await fleet.postgres.value(HELD, host=first["host_id"])

    await fleet.add("narrow")
    await wait_true(held, what="it has slots of the queue")
    fleet.note_lost(worker)
    await fleet.expire_hosts()
    await wait_true(lambda: len(worker.events("host_registered")) == 2)
    assert await held() == 0


@EACH_ROLE
async def test_a_grant_that_arrives_late_starts_nothing(fleet, database_url, role):
    """The worker is suspended between a lane's grant and the start, until the next window."""
    await fleet.jobs.lanes.set(
        "laned", "a", starts_max=STARTS_MAX, window_s=WINDOW_S, concurrency=None
    )
    slow_settings = {**LONG_LEASE, "JOBS_HEARTBEAT": "10s", "JOBS_LEASE": "30s"}
    with ChaosProxy(database_url) as proxy:
        slow = fleet.start(role, url=proxy.url, **slow_settings)
        quick = fleet.start("work", host="another")
        await wait_true(lambda: fleet.has_hosts(2))
        for process in (slow, quick):
            fleet.signal(process, signal.SIGSTOP)
        queue = (await fleet.jobs.queues.declare())["laned"].id
        # The first two arguments of a claim as the protocol sends them.
        arguments = [struct.pack("!iqii", 8, n, 4, queue) for n in await fleet.host_ids()]
        holds = [proxy.hold_reply(b"headrace.claim_lanes", a, times=1_000) for a in arguments]
        ids = await fleet.enqueue([NewJob(queue="laned", lane="a", payload={})] * 9)
        fleet.signal(slow, signal.SIGCONT)
        await wait_true(fleet.leased, what="the slow worker is granted its jobs")
        fleet.signal(quick, signal.SIGCONT)
        await wait_true(lambda: len(fleet.started()) == STARTS_MAX, what="the next window is full")
        assert any(hold.fired for hold in holds)
        for hold in holds:
            proxy.release(hold)
        await wait_true(lambda: fleet.ended(ids))
    assert over_limit(fleet.history, starts_max=STARTS_MAX, window_s=WINDOW_S) == []
    assert set(fleet.started().values()) == {1}
    assert fleet.findings() == []


@one_role_each_run("agent")
async def test_a_handlers_open_transaction_delays_no_renewal(fleet, role):
    await fleet.begin_effects()
    [held] = await fleet.add("locking")
    process = fleet.start(role)
    await wait_true(lambda: fleet.noted("locked"))
    ends_s = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < ends_s:
        others = await fleet.add("noted", 5)
        await wait_true(lambda others=others: fleet.ended(others))
    assert await fleet.state(held) is JobState.LEASED
    assert process.events("host_lost") == []
    fleet.let_go()
    await wait_true(lambda: fleet.ended([held]))
    assert set(fleet.started().values()) == {1}
    assert await fleet.effect_rows() == [held]
    assert fleet.findings() == []


@one_role_each_run("work")
async def test_a_stopped_process_delays_only_the_lease_that_it_locked(fleet, role):
    await fleet.begin_effects()
    [held] = await fleet.add("locking")
    others = await fleet.add("gated", 5)
    stopped = fleet.start(role, **LONG_LEASE)
    await wait_true(lambda: fleet.noted("locked") and len(fleet.started()) == 6)
    fleet.signal(stopped, signal.SIGSTOP)
    fleet.note_lost(stopped)
    await fleet.expire_hosts()
    assert (await fleet.jobs.sweep()).jobs_returned == 5
    fleet.let_go()
    fleet.start(role, host="heir", **LONG_LEASE)
    await wait_true(lambda: fleet.ended(others))
    assert await fleet.state(held) is JobState.LEASED
    # With its process its transaction ends.
    fleet.kill(stopped)
    await wait_true(lambda: fleet.ended([held]))
    await require_one_effect_each(fleet, [held, *others])
