"""Leases: fencing, partial settling, sweeps, cursor marks."""

from __future__ import annotations

import asyncio

import pytest
from lease_steps import claim_one, live_manager, settle, told
from tests.kit.waiting import wait_true

from headrace.jobs import JobState, LeaseLost, store
from headrace.jobs.leases import LeaseManager
from headrace.jobs.outcomes import DONE, RETURNED, Outcome
from headrace.jobs.store.leases import ClaimCursor


@pytest.fixture
async def manager(jobs, registry, postgres, config):
    """The lease manager of a live host, with a queue `q`."""
    registry.task("q")(_nothing)
    queues = await jobs.queues.declare()
    return await live_manager(postgres, config, [queues["q"].id])


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def claim(jobs, manager, jobs_max=10):
    queues = await jobs.queues.declare()
    return await claim_one(manager, queues["q"].id, jobs_max)


async def expire_hosts(sql):
    await sql("UPDATE headrace.host SET expires_at = now() - interval '1 s'")


async def test_a_returned_lease_refuses_its_old_holder(jobs, registry, manager, sql, postgres):
    job_id = await registry.get("q").enqueue({"n": 1})
    lease = await claim(jobs, manager)
    async with postgres.transaction() as tx:
        await jobs.lock_lease(tx, lease.lease_id)
    await expire_hosts(sql)
    swept = await jobs.sweep()
    assert (swept.leases_returned, swept.jobs_returned, swept.more) == (1, 1, False)
    assert not await settle(manager, lease)
    async with postgres.transaction() as tx:
        with pytest.raises(LeaseLost):
            await jobs.lock_lease(tx, lease.lease_id)
    job = await jobs.job(job_id)
    assert (job.state, job.losses, job.attempt) == (JobState.READY, 1, 0)
    assert (await jobs.sweep()).leases_returned == 0


async def test_an_expired_host_claims_nothing_and_cannot_renew(
    jobs, registry, manager, sql, postgres
):
    await registry.get("q").enqueue({})
    await expire_hosts(sql)
    assert await claim(jobs, manager) is None
    assert not await store.leases.renew_host(postgres, manager.host_id, 30)
    assert (await jobs.sweep()).hosts_dropped == 1


async def test_a_job_lost_three_times_is_quarantined(jobs, registry, manager, sql, postgres):
    job_id = await registry.get("q").enqueue({}, unique="poison")
    for _ in range(3):
        queues = await jobs.queues.declare()
        doomed = await live_manager(postgres, manager.config, [queues["q"].id])
        assert await claim(jobs, doomed) is not None
        await sql(f"UPDATE headrace.host SET expires_at = now() WHERE id = {doomed.host_id}")
        await jobs.sweep()
    job = await jobs.job(job_id)
    assert (job.state, job.losses) == (JobState.QUARANTINED, 3)
    assert job.error == "the process that ran it died 3 times"
    assert await sql("SELECT key FROM headrace.job_unique") == []


async def test_settling_in_parts_and_twice_changes_nothing_twice(jobs, registry, manager, sql):
    ids = await registry.get("q").enqueue_many([{"n": n} for n in range(4)])
    lease = await claim(jobs, manager)
    fail = Outcome("fail", None, "no")
    for _ in range(2):
        assert await settle(manager, lease, {ids[0]: DONE, ids[1]: fail})
    assert [job.id for job in (await jobs.find(state="failed")).jobs] == [ids[1]]
    assert (await jobs.job(ids[0])).state is JobState.GONE
    assert (await jobs.job(ids[2])).state is JobState.LEASED
    await expire_hosts(sql)
    assert (await jobs.sweep()).jobs_returned == 2
    assert [(await jobs.job(i)).state.value for i in ids] == ["gone", "failed", "ready", "ready"]


async def test_a_handlers_own_transaction_holds_its_lease(jobs, registry, manager, sql, postgres):
    await registry.get("q").enqueue({})
    lease = await claim(jobs, manager)
    async with postgres.transaction() as tx:
        await jobs.lock_lease(tx, lease.lease_id)
        await expire_hosts(sql)
        assert (await jobs.sweep()).leases_returned == 0
    assert (await jobs.sweep()).leases_returned == 1


async def test_a_lease_whose_claim_was_never_answered_is_given_back(
    jobs, registry, manager, postgres, config
):
    job_id = await registry.get("q").enqueue({})
    forgetful = LeaseManager(postgres, config, manager.host_id)
    await claim(jobs, forgetful)
    await manager.return_unknown()
    assert (await jobs.job(job_id)).state is JobState.LEASED
    await manager.return_unknown()
    assert (await jobs.job(job_id)).state is JobState.READY


async def test_the_lowest_priority_gets_its_turn():
    cursor = ClaimCursor()
    orders = [cursor.next_order() for _ in range(16)]
    assert [order[0] for order in orders] == ([0] * 7 + [9]) * 2


class Unhurried(ClaimCursor):
    """A cursor with a fixed time, so that a slow machine does not drop its marks."""

    def note(self, claims, *, jobs_max, now_s, took_s=0.0, leases_max=None):
        super().note(claims, jobs_max=jobs_max, now_s=1.0, leases_max=leases_max)


async def test_marks_move_on_full_claims_and_are_dropped_on_short_ones(jobs, registry, manager):
    await registry.get("q").enqueue_many([{"n": n} for n in range(5)])
    queues, cursor = await jobs.queues.declare(), Unhurried()
    first = cursor.marks[5]
    await claim_one(manager, queues["q"].id, 2, cursor)
    lease = await claim_one(manager, queues["q"].id, 2, cursor)
    assert cursor.marks[5] == (lease.run_ats[-1], lease.ids[-1])
    late = await claim_one(manager, queues["q"].id, 2, cursor)
    assert len(late.ids) == 1
    # It used its one lease, so it may have stopped at a job that needs its own lease: the next
    # claim shows that none is left.
    assert await claim_one(manager, queues["q"].id, 2, cursor) is None
    assert cursor.marks[5] == first


async def test_many_claimers_share_without_doubling(jobs, registry, postgres, config, manager):
    ids = await registry.get("q").enqueue_many([{"n": n} for n in range(500)])
    queues = await jobs.queues.declare()

    async def drain():
        own, cursor, found = LeaseManager(postgres, config, manager.host_id), ClaimCursor(), []
        while lease := await claim_one(own, queues["q"].id, 7, cursor):
            found += lease.ids
            own.settle(told(lease))
        await own.flush()
        return found

    found = await asyncio.gather(*(drain() for _ in range(4)))
    claimed = [job_id for part in found for job_id in part]
    assert sorted(claimed) == ids


async def test_a_fenced_worker_drops_its_jobs_and_begins_anew(jobs, registry, working, sql, config):
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
    import dataclasses

    async with working(dataclasses.replace(config, heartbeat_s=0.05)) as worker:
        await wait_true(lambda: runs)
        await expire_hosts(sql)
        await wait_true(lambda: worker.statistics()["hosts_lost"] == 1)
        assert ended == [1]
        await jobs.sweep()
        await wait_true(lambda: _is_gone(jobs, job_id))
    assert runs == [1, 1]


async def test_failed_jobs_are_forgotten_in_time(jobs, registry, sql):
    registry.task("q")(_nothing)
    old, new = [await registry.get("q").enqueue({}) for _ in range(2)]
    await jobs.cancel(old)
    await jobs.cancel(new)
    await sql(f"UPDATE headrace.job_failed SET ended_at = now() - interval '15 d' WHERE id = {old}")
    assert (await jobs.sweep()).failed_dropped == 1
    assert (await jobs.job(old)).state is JobState.GONE
    assert (await jobs.job(new)).state is JobState.CANCELLED


async def test_returned_jobs_keep_their_place(jobs, registry, manager):
    ids = await registry.get("q").enqueue_many([{"n": n} for n in range(2)])
    lease = await claim(jobs, manager, 1)
    assert await settle(manager, lease, RETURNED)
    assert list((await claim(jobs, manager, 1)).ids) == ids[:1]


async def _is_gone(jobs, job_id):
    return (await jobs.job(job_id)).state is JobState.GONE
