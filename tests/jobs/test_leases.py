"""Leases while locks, outages, deaths and other hosts interfere; what a claim reads and skips."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from lease_steps import (
    FAIL,
    NO_LIMITS,
    claim_lane_jobs,
    claim_one,
    settle,
    told,
)
from tests.kit.chaos import ChaosProxy, delay
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.jobs import Jobs, JobState, LeaseLost, NewJob, store
from headrace.jobs.leases import HostLost, LeaseManager
from headrace.jobs.messages import Ack
from headrace.jobs.outcomes import DONE, RETURNED, AckBuffer, InFlightLease, Outcome
from headrace.jobs.store.claim_cursor import ClaimCursor, LaneCursor


@pytest.fixture
def fill(jobs):
    """`await fill(3, lane="x")`: enqueue into queue `q`."""

    async def enqueued(count=1, queue="q", **options):
        return await jobs.enqueue_many([NewJob(queue=queue, **options)] * count)

    return enqueued


async def expire_hosts(sql):
    await sql("UPDATE headrace.host SET expires_at = now() - interval '1 s'")


async def states(jobs, ids):
    return [(await jobs.job(job_id)).state.value for job_id in ids]


async def test_ending_all_hosts_after_a_restore_spares_takers(sql, queue_id, postgres):
    for kind in ("agent", "work", "taker"):
        host = await store.leases.add_host(postgres, kind, [queue_id], 3600, kind=kind)
        await sql(
            "INSERT INTO headrace.slot_allowance (queue, host, slots, call)"
            f" VALUES ({queue_id}, {host}, 2, 1)"
        )
    for _ in range(2):
        await store.leases.end_hosts(postgres)
        live = await sql("SELECT name FROM headrace.host WHERE expires_at > now()")
        assert [row["name"] for row in live] == ["taker"]
        assert [row["host"] for row in await sql("SELECT host FROM headrace.slot_allowance")] == [
            host
        ]


async def test_a_returned_lease_refuses_its_old_holder(
    jobs, manager, queue_id, *, fill, sql, postgres
):
    first, second = await fill(2)
    early, late = [await claim_one(manager, queue_id, 1) for _ in range(2)]
    async with postgres.transaction() as tx:
        await jobs.lock_lease(tx, late.lease_id)
        assert await jobs.lock_leases(tx, [late.lease_id, 10**9]) == {late.lease_id}
        await expire_hosts(sql)
        assert await settle(manager, early), "not returned yet"
        assert (await jobs.sweep()).leases_returned == 0, "the handler's transaction holds it"
    assert (await jobs.sweep()).leases_returned == 1
    assert not await settle(manager, late)
    async with postgres.transaction() as tx:
        with pytest.raises(LeaseLost):
            await jobs.lock_lease(tx, late.lease_id)
    assert await states(jobs, [first, second]) == ["gone", "ready"]
    assert (await jobs.job(second)).losses == 1
    with pytest.raises(HostLost):
        await manager.renew()


async def test_a_suspended_transaction_does_not_keep_its_lease(
    postgres, config, registry, manager, queue_id, *, fill, sql
):
    """The server ends the transaction; the embedded one alone would do so after 60 s."""
    jobs = Jobs(postgres, replace(config, lease_s=2.0), registry)
    await fill()
    lease = await claim_one(manager, queue_id, 1)
    await expire_hosts(sql)

    async def is_returned():
        return (await jobs.sweep()).leases_returned == 1

    async def hold():
        async with postgres.transaction() as tx:
            await jobs.lock_leases(tx, [lease.lease_id])
            await wait_true(is_returned, what="the lease is returned", deadline_s=30)

    with pytest.raises(PostgresDown):
        await hold()


async def test_a_locked_lease_or_lane_delays_no_other(jobs, manager, queue_id, fill, postgres):
    await jobs.lanes.set_limiter("l", concurrency=9)
    await fill(2)
    for lane in "xy":
        await fill(lane=lane)
    held, free = [await claim_one(manager, queue_id, 1) for _ in range(2)]
    x, y = [await claim_lane_jobs(manager, queue_id, 1) for _ in range(2)]
    async with postgres.transaction() as tx:
        await jobs.lock_lease(tx, held.lease_id)
        await jobs.lanes.set("l", x.lanes[0], **NO_LIMITS, tx=tx)
        for lease in (held, free, x, y):
            manager.settle(told(lease))
        assert await claim_one(manager, queue_id) is None
        await wait_true(lambda: manager.unsettled == 2)
        assert await states(jobs, [*free.ids, *y.ids]) == ["gone"] * 2
        assert await states(jobs, [*held.ids, *x.ids]) == ["leased"] * 2
    await manager.flush()
    assert await states(jobs, [*held.ids, *x.ids]) == ["gone"] * 2
    assert manager.leases_held == 0


async def test_an_outcome_that_the_database_refuses_is_a_failed_run(jobs, manager, queue_id, fill):
    """PostgreSQL cannot store the interval of one outcome; those of other leases are recorded."""
    ids = await fill(2)
    bad, good = [await claim_one(manager, queue_id, 1) for _ in range(2)]
    manager.settle(told(bad, Outcome("retry", 1e300)))
    manager.settle(told(good, Outcome("fail", None, "no")))
    await manager.flush()
    assert (await jobs.job(ids[1])).error == "no"
    job = await jobs.job(ids[0])
    assert (job.state, job.attempt) in ((JobState.SCHEDULED, 1), (JobState.READY, 1))
    assert manager.leases_held == 0


async def test_outcomes_are_buffered_while_the_database_is_down(jobs, manager, queue_id, fill):
    """They are counted and recorded after the outage; a repeated ack reports no loss."""
    ids = await fill(3)
    lease = await claim_one(manager, queue_id)
    working = manager._postgres
    manager._postgres = Postgres("postgresql://x@127.0.0.1:1/x", PostgresConfig())
    manager.settle(told(lease, {ids[0]: Outcome("fail", None, "one"), ids[1]: DONE}))
    flushing = asyncio.create_task(manager.flush())
    await wait_true(lambda: lease.lease_id in manager._unsure)
    manager.settle(told(lease, {ids[1]: FAIL}))
    manager.settle(told(lease))
    assert manager.unsettled == 3
    manager._postgres = working
    await flushing
    assert (manager.unsettled, manager.leases_held) == (0, 0)
    assert await states(jobs, ids) == ["failed", "gone", "gone"], "the first outcome wins"


async def test_an_ack_that_may_have_been_recorded_is_no_loss(manager, queue_id, fill):
    lost = []
    await fill()
    lease = await claim_one(manager, queue_id)
    assert await settle(manager, lease)
    manager.on_lost = lost.append
    manager._leases[lease.lease_id] = InFlightLease(
        lease.lease_id, lease.ids, lease.attempts, retries=0
    )
    manager._unsure.add(lease.lease_id)
    manager.settle(Ack(lease_id=lease.lease_id))
    await manager.flush()
    assert lost == []
    manager.settle(Ack(lease_id=lease.lease_id))
    await manager.flush()
    assert lost == [lease.lease_id]


async def test_an_abandoned_manager_records_nothing(jobs, manager, queue_id, fill):
    await fill()
    lease = await claim_one(manager, queue_id)
    manager.settle(told(lease))
    await manager.abandon()
    assert manager.unsettled == 0
    assert await states(jobs, lease.ids) == ["leased"]


async def test_acks_need_no_claim_and_survive_a_cancelled_one(jobs, manager, queue_id, fill):
    ids = await fill(3)
    manager.settle(told(await claim_one(manager, queue_id, 1)))
    async with asyncio.timeout(60):
        while manager.unsettled:
            await asyncio.sleep(0)
    manager.settle(told(await claim_one(manager, queue_id, 1)))
    claim = asyncio.create_task(claim_one(manager, queue_id, 1))
    await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert manager.unsettled == 1
    await manager.flush()
    assert await states(jobs, ids[:2]) == ["gone", "gone"]


async def test_hosts_that_compete_claim_and_settle_each_job_once(
    manager, queue_id, *, fill, postgres, config, sql
):
    ids = await fill(300) + await fill(100, lane="x")
    lost = []

    async def drain(outcome):
        own = LeaseManager(postgres, config, manager.host_id)
        twin = LeaseManager(postgres, config, manager.host_id)
        own.on_lost = twin.on_lost = lost.append
        cursor, found = ClaimCursor(), []
        while lease := (
            await claim_one(own, queue_id, 7, cursor) or await claim_lane_jobs(own, queue_id, 7)
        ):
            found.append(lease)
            own.settle(told(lease))
            twin.settle(told(lease, outcome))
            await asyncio.gather(own.flush(), twin.flush())
        return found

    claimed = await asyncio.gather(*(drain(outcome) for outcome in (FAIL, RETURNED, DONE)))
    leases = [lease for part in claimed for lease in part]
    assert {job_id for lease in leases for job_id in lease.ids} == set(ids)
    assert sorted(lost) == sorted(lease.lease_id for lease in leases), "one of two acks counts"
    assert await sql("SELECT id FROM headrace.job_lease") == []


async def test_a_worker_that_lost_its_host_row_drops_its_jobs_and_registers_again(
    jobs, registry, working, sql, wait_state
):
    runs, ended = [], []

    @registry.task("held")
    async def held():
        runs.append(1)
        try:
            if len(runs) == 1:
                await asyncio.Event().wait()
        finally:
            ended.append(1)

    job_id = await held.enqueue()
    async with working(heartbeat_s=0.05) as worker:
        await wait_true(lambda: runs)
        await expire_hosts(sql)
        await wait_true(lambda: worker.statistics()["hosts_lost"] == 1)
        assert ended == [1]
        await jobs.sweep()
        await wait_state(job_id, "gone")
    assert runs == [1, 1]


async def test_failed_jobs_are_deleted_after_their_time(jobs, fill, sql, queue_id):
    old, new = await fill(2)
    for job_id in (old, new):
        await jobs.cancel(job_id)
    await sql(f"UPDATE headrace.job_failed SET ended_at = now() - interval '15 d' WHERE id = {old}")
    assert (await jobs.sweep()).failed_dropped == 1
    assert await states(jobs, [old, new]) == ["gone", "cancelled"]


async def test_every_eighth_claim_begins_with_the_lowest_priority(manager, queue_id, fill):
    cursor = ClaimCursor()
    [last] = await fill(priority=9)
    await fill(20, priority=0)
    found = [(await claim_one(manager, queue_id, 1, cursor)).ids[0] for _ in range(8)]
    assert found.index(last) == 7


class FixedTimeCursor(ClaimCursor):
    """A cursor with a fixed time, so that a slow machine does not drop its marks."""

    def note(self, claims, *, jobs_max, now_s, leases_max=None):
        super().note(claims, jobs_max=jobs_max, now_s=1.0, leases_max=leases_max)


async def test_marks_move_on_full_claims_and_are_dropped_on_short_ones(manager, queue_id, fill):
    await fill(5)
    cursor = FixedTimeCursor()
    first = cursor.marks[5]
    await claim_one(manager, queue_id, 2, cursor)
    lease = await claim_one(manager, queue_id, 2, cursor)
    assert cursor.marks[5] == (lease.run_ats[-1], lease.ids[-1])
    late = await claim_one(manager, queue_id, 2, cursor)
    assert len(late.ids) == 1
    # It used its one lease, so it may have stopped at a job that needs its own lease: the next
    # claim shows that none is left.
    assert await claim_one(manager, queue_id, 2, cursor) is None
    assert cursor.marks[5] == first


async def test_claims_return_versions_and_the_retries_in_force(jobs, manager, queue_ids, fill, sql):
    await jobs.queues.set("q", retries=1)
    await fill(version=3)
    await fill(lane="x", version=4)
    claims = await manager.claim_ready(queue_ids["q"], ClaimCursor(), leases_max=1, batch=1)
    assert (claims.retries, list(claims.leases[0].versions)) == (1, [3])
    await settle(manager, claims.leases[0], RETURNED)
    assert list((await claim_one(manager, queue_ids["q"])).versions) == [3]
    assert list((await claim_lane_jobs(manager, queue_ids["q"])).versions) == [4]
    await sql(f"INSERT INTO headrace.queue_alias VALUES ('old', {queue_ids['next']})")
    [job_id] = await fill()
    await settle(manager, await claim_one(manager, queue_ids["q"]), Outcome("moved", queue="old"))
    assert (await jobs.job(job_id)).queue == "next"


async def test_work_ahead(jobs, manager, queue_ids, fill):
    both = [queue_ids["q"], queue_ids["far"]]
    ahead = await manager.queues_with_work(both)
    assert (ahead.queue_ids, ahead.next_s) == (frozenset(), None)
    await fill(after_s=100)
    ahead = await manager.queues_with_work(both)
    assert ahead.queue_ids == frozenset()
    assert 60 < ahead.next_s <= 100
    await jobs.lanes.set("other", "x", starts_max=1, window_s=50, concurrency=None)
    await fill(2, queue="far", lane="x")
    ahead = await manager.queues_with_work(both)
    assert (ahead.ready, ahead.laned) == (frozenset(), {queue_ids["far"]})
    await manager.claim_lanes(queue_ids["far"], leases_max=1, batch=5)
    ahead = await manager.queues_with_work(both)
    assert ahead.queue_ids == frozenset()
    assert 20 < ahead.next_s < 51
    await fill(priority=9)
    assert (await manager.queues_with_work(both)).ready == {queue_ids["q"]}
    await jobs.queues.pause("q")
    assert (await manager.queues_with_work(both)).queue_ids == frozenset()


async def test_claims_that_find_lanes_enough_leave_the_journal(manager, queue_id, fill, sql):
    """A claim of 2 jobs visits 2 lanes."""
    cursor = LaneCursor()
    for lane in "abc":
        await fill(2, lane=lane)

    async def claimed():
        claims = await manager.claim_lanes(queue_id, leases_max=1, batch=2, cursor=cursor)
        return claims.leases[0].ids if claims.leases else []

    async def journal():
        return len(await sql("SELECT FROM headrace.lane_event"))

    ids = [*await claimed()]
    assert not cursor.is_folding
    await fill(2, lane="d")
    ids += await claimed()
    assert await journal() == 1
    assert await manager.fold_lanes(queue_id, cursor, 100) == 1
    assert await journal() == 0
    while more := await claimed():
        ids += more
    assert len(set(ids)) == len(ids) == 8
    assert cursor.is_folding


def test_batches_of_acks_are_taken_in_order_and_put_back_first():
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
    kinds = {job_id: outcome.kind for job_id, outcome in again.outcomes[1].items()}
    assert kinds == {10: "fail", 11: "done"}
    assert not buffer
    assert 1 not in buffer


def test_a_batch_of_acks_is_bounded_by_leases_and_jobs():
    buffer = AckBuffer()
    for lease_id in range(5):
        buffer.add(lease_id, {lease_id * 10 + n: Outcome("done") for n in range(4)})
    assert len(buffer.take(leases_max=10, jobs_max=8).outcomes) == 2
    assert len(buffer.take(leases_max=10, jobs_max=1).outcomes) == 1
    assert len(buffer.take(leases_max=1, jobs_max=100).outcomes) == 1
    assert buffer.jobs == 4


async def test_a_claim_that_waited_for_its_commit_is_no_slow_search(
    manager, queue_id, fill, database_url
):
    """After slow searches claims skip jobs that were committed late, for up to 30 s."""
    with ChaosProxy(database_url) as proxy:
        manager._postgres = Postgres(proxy.url, PostgresConfig())
        await claim_one(manager, queue_id)
        proxy.set(delay(0.2))
        await fill(1)
        cursor = ClaimCursor()
        assert await claim_one(manager, queue_id, cursor=cursor)
        assert not cursor.is_costly
        await manager._postgres.close()
