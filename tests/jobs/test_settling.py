"""Settling: the effect of each outcome; many leases at once; locks, refusals and outages."""

from __future__ import annotations

import asyncio

import pytest
from lease_steps import claim_lane_jobs, claim_one, live_manager, settle, told
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.jobs import JobState, NewGroup, NewJob
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack
from headrace.jobs.outcomes import DONE, AckBuffer, InFlightLease, Outcome


@pytest.fixture
async def queues(jobs, registry):
    """Ids by name: `q` and `next` share a limiter, `far` has another."""
    registry.task("q", limiter="l", lane="optional")(_nothing)
    registry.task("next", limiter="l", lane="optional")(_nothing)
    registry.task("far", limiter="other", lane="optional")(_nothing)
    return {name: row.id for name, row in (await jobs.queues.declare()).items()}


@pytest.fixture
async def manager(postgres, config, queues):
    """The lease manager of a live host."""
    return await live_manager(postgres, config, queues.values())


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def fill(jobs, count=1, **options):
    return await jobs.enqueue_many([NewJob(queue="q", **options) for _ in range(count)])


@pytest.mark.parametrize(
    ("outcome", "state", "attempt", "losses"),
    [
        (Outcome("done"), JobState.GONE, 0, 0),
        (Outcome("retry", 100.0, "why"), JobState.SCHEDULED, 1, 0),
        (Outcome("snooze", 100.0), JobState.SCHEDULED, 0, 0),
        (Outcome("fail", None, "why", "trace"), JobState.FAILED, 1, 0),
        (Outcome("cancel", None, "why"), JobState.CANCELLED, 0, 0),
        (Outcome("returned"), JobState.READY, 0, 0),
        (Outcome("unstarted"), JobState.READY, 0, 0),
        (Outcome("lost"), JobState.READY, 0, 1),
        (Outcome("quarantined"), JobState.QUARANTINED, 0, 1),
    ],
    ids=lambda value: value.kind if isinstance(value, Outcome) else "",
)
@pytest.mark.parametrize("lane", [None, "x"])
async def test_outcomes(
    jobs, manager, queues, *, lane, outcome, state, attempt, losses, broken_invariants
):
    [job_id] = await fill(jobs, lane=lane, unique="key")
    claim = claim_lane_jobs if lane else claim_one
    assert await settle(manager, await claim(manager, queues["q"]), {job_id: outcome})
    job = await jobs.job(job_id)
    assert job.state is state
    if state is not JobState.GONE:
        assert (job.attempt, job.losses, job.lane, job.unique) == (attempt, losses, lane, "key")
    if outcome.kind in ("fail", "cancel"):
        assert (job.error, job.traceback) == (outcome.error, outcome.traceback)
    is_unfinished = state in (JobState.SCHEDULED, JobState.READY)
    assert (await fill(jobs, unique="key") == [job_id]) is is_unfinished
    assert await broken_invariants() == []
    assert manager.leases_held == 0


async def test_a_job_is_lost_for_the_last_time(jobs, manager, queues, sql):
    [job_id] = await fill(jobs)
    await sql("UPDATE headrace.job_ready SET losses = 2")
    await settle(manager, await claim_one(manager, queues["q"]), Outcome("lost"))
    job = await jobs.job(job_id)
    assert (job.state, job.losses) == (JobState.QUARANTINED, 3)
    assert job.error == "the process that ran it died 3 times"


async def test_a_job_moves_to_another_queue_as_new(jobs, manager, queues, sql):
    [job_id] = await fill(jobs, unique="k", priority=2)
    await sql("UPDATE headrace.job_ready SET attempt = 3")
    await settle(manager, await claim_one(manager, queues["q"]), Outcome("moved", queue="next"))
    job = await jobs.job(job_id)
    assert (job.queue, job.state, job.attempt) == ("next", JobState.READY, 0)
    assert (job.priority, job.unique) == (2, "k")
    [key] = await sql("SELECT * FROM headrace.job_unique")
    assert (key["queue"], key["job_id"]) == (queues["next"], job_id)
    await settle(manager, await claim_one(manager, queues["next"]))
    assert await sql("SELECT * FROM headrace.job_unique") == []


async def test_a_moved_job_leaves_a_taken_key(jobs, manager, queues, sql):
    [holder] = await jobs.enqueue_many([NewJob(queue="next", unique="k")])
    [job_id] = await fill(jobs, unique="k")
    await settle(manager, await claim_one(manager, queues["q"]), Outcome("moved", queue="next"))
    assert (await jobs.job(job_id)).unique is None
    await settle(manager, await claim_one(manager, queues["next"]))
    assert await sql("SELECT * FROM headrace.job_unique") == []
    assert (await jobs.job(holder)).state is JobState.GONE


@pytest.mark.parametrize("target", ["next", "far"])
async def test_a_job_of_a_lane_moves_with_its_lane(
    jobs, manager, queues, target, broken_invariants
):
    await jobs.lanes.set("l", "x", starts_max=5, window_s=60, concurrency=1)
    ids = await fill(jobs, 2, lane="x")
    lease = await claim_lane_jobs(manager, queues["q"])
    await settle(manager, lease, Outcome("moved", queue=target))
    assert await broken_invariants() == []
    lane = await jobs.lanes.get("l", "x")
    assert (lane.inflight, lane.starts_live) == (0, 1)
    moved = await claim_lane_jobs(manager, queues[target])
    assert (list(moved.ids), list(moved.lanes)) == (ids[:1], ["x"])
    assert await broken_invariants() == []


async def test_a_job_sent_nowhere_fails(jobs, manager, queues, broken_invariants):
    [job_id] = await fill(jobs, lane="x")
    lease = await claim_lane_jobs(manager, queues["q"])
    await settle(manager, lease, Outcome("moved", queue="no such"))
    job = await jobs.job(job_id)
    assert (job.state, job.error) == (JobState.FAILED, "send_to: queue no such is not known")
    assert await broken_invariants() == []


async def test_an_alias_is_a_queue(jobs, manager, queues, sql):
    await sql(f"INSERT INTO headrace.queue_alias VALUES ('old', {queues['next']})")
    [job_id] = await fill(jobs)
    await settle(manager, await claim_one(manager, queues["q"]), Outcome("moved", queue="old"))
    assert (await jobs.job(job_id)).queue == "next"


async def test_a_cancelled_member_counts_as_one(jobs, manager, queues, sql):
    members = [NewJob(queue="q") for _ in range(2)]
    await jobs.enqueue_groups([NewGroup(members=members, on_done=NewJob(queue="next"))])
    lease = await claim_one(manager, queues["q"])
    kinds = [Outcome("cancel"), Outcome("moved", queue="far")]
    await settle(manager, lease, dict(zip(lease.ids, kinds, strict=True)))
    assert await claim_one(manager, queues["next"]) is None
    await settle(manager, await claim_one(manager, queues["far"]))
    [payload] = (await claim_one(manager, queues["next"])).payloads
    assert b'"done":1,"failed":0,"cancelled":1' in payload


async def test_many_leases_are_settled_in_one_statement(jobs, manager, queues, broken_invariants):
    await fill(jobs, 20)
    for lane in "xyz":
        await fill(jobs, 4, lane=lane)
    plain = [await claim_one(manager, queues["q"], 5) for _ in range(4)]
    laned = [await claim_lane_jobs(manager, queues["q"], 3) for _ in range(4)]
    first = {plain[0].ids[0]: Outcome("fail"), plain[0].ids[1]: DONE}
    manager.settle(told(plain[0], first))
    manager.settle(told(plain[1]))
    manager.settle(told(laned[0], Outcome("unstarted")))
    manager.settle(told(laned[1], Outcome("returned")))
    manager.settle(told(laned[2]))
    assert manager.unsettled == 16
    await manager.flush()
    assert (manager.unsettled, manager.leases_held) == (0, 4)
    assert await broken_invariants() == []
    manager.settle(told(plain[0]))
    await manager.flush()
    assert manager.leases_held == 3
    states = [(await jobs.job(job_id)).state.value for job_id in plain[0].ids]
    assert states == ["failed"] + ["gone"] * 4


async def test_the_first_outcome_counts(jobs, manager, queues):
    [job_id] = await fill(jobs)
    lease = await claim_one(manager, queues["q"])
    manager.settle(told(lease, Outcome("fail", None, "first")))
    manager.settle(told(lease))
    await manager.flush()
    manager.settle(told(lease, Outcome("cancel")))
    await manager.flush()
    assert (await jobs.job(job_id)).error == "first"


async def test_a_lease_that_a_handler_holds_is_settled_after_its_transaction(
    jobs, manager, queues, postgres
):
    """It does not delay other leases."""
    await fill(jobs, 2)
    held, free = [await claim_one(manager, queues["q"], 1) for _ in range(2)]
    async with postgres.transaction() as tx:
        await jobs.lock_lease(tx, held.lease_id)
        manager.settle(told(held))
        manager.settle(told(free))
        assert await claim_one(manager, queues["q"]) is None
        await wait_true(lambda: manager.unsettled == 1)
        assert (await jobs.job(held.ids[0])).state is JobState.LEASED
    await manager.flush()
    assert (await jobs.job(held.ids[0])).state is JobState.GONE


@pytest.mark.slow
async def test_a_lane_that_a_user_holds_does_not_stop_the_others(jobs, manager, queues, postgres):
    for lane in "xy":
        await fill(jobs, 1, lane=lane)
    x, y = [await claim_lane_jobs(manager, queues["q"], 1) for _ in range(2)]
    assert (x.lanes[0], y.lanes[0]) in (("x", "y"), ("y", "x"))
    async with postgres.transaction() as tx:
        await jobs.lanes.set("l", x.lanes[0], starts_max=None, window_s=None, concurrency=1, tx=tx)
        manager.settle(told(x))
        manager.settle(told(y))
        await wait_true(lambda: manager.unsettled == 1)
        assert (await jobs.job(y.ids[0])).state is JobState.GONE
    await manager.flush()
    assert manager.leases_held == 0


async def test_what_the_database_refuses_becomes_a_failed_run(jobs, manager, queues):
    """PostgreSQL cannot store the interval: its lease is refused, other leases are recorded."""
    ids = await fill(jobs, 2)
    bad, good = [await claim_one(manager, queues["q"], 1) for _ in range(2)]
    manager.settle(told(bad, Outcome("retry", 1e300)))
    manager.settle(told(good, Outcome("fail", None, "no")))
    await manager.flush()
    assert (await jobs.job(ids[1])).error == "no"
    job = await jobs.job(ids[0])
    assert (job.state, job.attempt) in ((JobState.SCHEDULED, 1), (JobState.READY, 1))
    assert manager.leases_held == 0


async def test_nothing_is_lost_while_the_database_is_away(jobs, manager, queues, config):
    """Outcomes are buffered, counted and recorded after the outage; a repetition is harmless."""
    ids = await fill(jobs, 3)
    lease = await claim_one(manager, queues["q"])
    working, manager._postgres = (
        manager._postgres,
        Postgres("postgresql://x@127.0.0.1:1/x", PostgresConfig()),
    )
    manager.settle(told(lease, {ids[0]: Outcome("fail", None, "one")}))
    flushing = asyncio.create_task(manager.flush())
    await wait_true(lambda: lease.lease_id in manager._unsure)
    manager.settle(told(lease))
    assert manager.unsettled == 3
    manager._postgres = working
    await flushing
    assert (manager.unsettled, manager.leases_held) == (0, 0)
    assert [(await jobs.job(i)).state.value for i in ids] == ["failed", "gone", "gone"]


async def test_an_ack_that_may_have_been_recorded_is_no_loss(jobs, manager, queues):
    lost = []
    manager.on_lost = lost.append
    await fill(jobs)
    lease = await claim_one(manager, queues["q"])
    manager.settle(told(lease))
    await manager.flush()
    manager._leases[lease.lease_id] = InFlightLease(
        lease.lease_id, lease.ids, lease.attempts, retries=0
    )
    manager._unsure.add(lease.lease_id)
    manager.settle(Ack(lease_id=lease.lease_id))
    await manager.flush()
    assert lost == []


async def test_an_abandoned_manager_records_nothing(jobs, manager, queues):
    await fill(jobs)
    lease = await claim_one(manager, queues["q"])
    manager.settle(told(lease))
    await manager.abandon()
    assert manager.unsettled == 0
    assert (await jobs.job(lease.ids[0])).state is JobState.LEASED


async def test_takers_lose_nothing_by_going_away(jobs, queues, sql):
    [job_id] = await fill(jobs)
    taken = await jobs.takes.take("q", lease_s=60)
    await sql("UPDATE headrace.host SET expires_at = now()")
    assert (await jobs.sweep()).jobs_returned == 1
    assert (await jobs.job(job_id)).losses == 0
    assert taken.jobs[0].id == job_id


async def test_a_freed_lane_wakes_who_waits_for_it(jobs, manager, queues, postgres):
    await jobs.lanes.set("l", "x", starts_max=None, window_s=None, concurrency=1)
    await fill(jobs, 2, lane="x")
    await jobs.enqueue_many([NewJob(queue="next", lane="x")])
    lease = await claim_lane_jobs(manager, queues["q"])
    await claim_lane_jobs(manager, queues["next"])
    receive = []
    connection = await postgres.connect_unpooled()
    await connection.add_listener("headrace_jobs", lambda *message: receive.append(int(message[3])))
    try:
        told_limiters = []
        manager.on_settled = told_limiters.extend
        await settle(manager, lease)
        await wait_true(lambda: set(receive) == {queues["q"], queues["next"]})
        assert told_limiters == ["l"]
        receive.clear()
        await jobs.lanes.set("l", "x", starts_max=None, window_s=None, concurrency=None)
        await wait_true(lambda: receive)
    finally:
        await connection.close()


async def test_two_managers_cannot_settle_the_same_lease(
    jobs, manager, queues, *, postgres, config, sql
):
    await fill(jobs, 50, lane="x")
    claimed = [await claim_lane_jobs(manager, queues["q"], 5) for _ in range(10)]
    other = LeaseManager(postgres, config, manager.host_id)
    lost = []
    manager.on_lost = other.on_lost = lost.append
    for lease in claimed:
        manager.settle(told(lease))
        other.settle(told(lease, Outcome("cancel")))
    await asyncio.gather(manager.flush(), other.flush())
    assert sorted(lost) == sorted(lease.lease_id for lease in claimed)
    assert await sql("SELECT id FROM headrace.job_lease") == []


def test_batches_are_taken_in_order_and_put_back_first():
    buffer = AckBuffer()
    buffer.add(1, {10: Outcome("fail")})
    buffer.add_done(2, 5, may_ride=True)
    buffer.add_done(3, 5, may_ride=False)
    assert buffer.jobs == 11
    assert buffer.take_riders(10).done == {2: 5}
    batch = buffer.take(leases_max=10, jobs_max=100)
    assert (batch.done, list(batch.outcomes), batch.jobs) == ({3: 5}, [1], 6)
    buffer.add(1, {10: Outcome("done"), 11: Outcome("done")})
    buffer.put_back(batch)
    assert buffer.jobs == 7
    again = buffer.take(leases_max=10, jobs_max=100)
    assert {job_id: said.kind for job_id, said in again.outcomes[1].items()} == {
        10: "fail",
        11: "done",
    }
    assert not buffer
    assert 1 not in buffer


def test_a_batch_is_bounded_by_leases_and_jobs():
    buffer = AckBuffer()
    for lease_id in range(5):
        buffer.add(lease_id, {lease_id * 10 + n: Outcome("done") for n in range(4)})
    assert len(buffer.take(leases_max=10, jobs_max=8).outcomes) == 2
    assert len(buffer.take(leases_max=10, jobs_max=1).outcomes) == 1
    assert len(buffer.take(leases_max=1, jobs_max=100).outcomes) == 1
    assert buffer.jobs == 4
