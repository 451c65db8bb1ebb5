"""Claims: several leases in one call, with the acks of others; who gets nothing.

What is looked at ahead.
"""

from __future__ import annotations

import asyncio

import pytest
from lease_steps import claim_one, live_manager, settle, told

from headrace.jobs import JobState, NewGroup, NewJob
from headrace.jobs.outcomes import Outcome
from headrace.jobs.store.leases import ClaimCursor


@pytest.fixture
async def queue_id(jobs, registry):
    """The id of a queue `q`."""
    registry.task("q", retries=7)(_nothing)
    return (await jobs.queues.declare())["q"].id


@pytest.fixture
async def desk(postgres, config, queue_id):
    """A desk of a living host."""
    return await live_manager(postgres, config, [queue_id])


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def fill(registry, count, **options):
    task = registry.get("q")
    return await task.enqueue_many([task.job({"n": n}, **options) for n in range(count)])


async def test_one_claim_serves_several_slots(registry, desk, queue_id, sql):
    ids = await fill(registry, 25)
    claims = await desk.claim_ready(queue_id, ClaimCursor(), leases_max=5, batch=10)
    assert [len(lease.ids) for lease in claims.leases] == [10, 10, 5]
    assert [job_id for lease in claims.leases for job_id in lease.ids] == ids
    assert (claims.retries, claims.slack_s, claims.moved) == (7, None, 0)
    assert [row["n"] for row in await sql("SELECT count(*) AS n FROM headrace.job_lease")] == [3]
    for lease in claims.leases:
        desk.settle(told(lease))
    assert desk.unsettled == 25
    claims = await desk.claim_ready(queue_id, ClaimCursor(), leases_max=5, batch=10)
    assert (claims.leases, claims.lost, desk.unsettled, desk.leases_held) == ([], (), 0, 0)
    assert await sql("SELECT id FROM headrace.job_lease") == []


async def test_no_more_leases_than_asked_for(registry, desk, queue_id, sql):
    ids = await fill(registry, 9)
    await sql(f"UPDATE headrace.job_ready SET losses = 1 WHERE id IN ({ids[0]}, {ids[4]})")
    claims = await desk.claim_ready(queue_id, ClaimCursor(), leases_max=2, batch=3)
    assert [list(lease.ids) for lease in claims.leases] == [ids[:1], ids[1:4]]
    assert list(claims.leases[0].losses) == [1]
    claims = await desk.claim_ready(queue_id, ClaimCursor(), leases_max=5, batch=3)
    assert [list(lease.ids) for lease in claims.leases] == [ids[4:5], ids[5:8], ids[8:]]


async def test_a_job_that_killed_its_process_is_claimed_alone(
    jobs, registry, desk, *, queue_id, sql, postgres, config
):
    doomed = await live_manager(postgres, config, [queue_id])
    await fill(registry, 3)
    assert len((await claim_one(doomed, queue_id)).ids) == 3
    await sql(f"UPDATE headrace.host SET expires_at = now() WHERE id = {doomed.host_id}")
    assert (await jobs.sweep()).jobs_returned == 3
    for _ in range(3):
        assert len((await claim_one(desk, queue_id)).ids) == 1


async def test_acks_of_every_kind_ride_on_a_claim(jobs, registry, desk, queue_id, sql):
    await fill(registry, 2)
    await fill(registry, 1, unique="k")
    await jobs.enqueue_groups(
        [NewGroup(members=[NewJob(queue="q")], on_done=NewJob(queue="q", priority=9))]
    )
    leases = [await claim_one(desk, queue_id, 1) for _ in range(4)]
    for lease in leases:
        desk.settle(told(lease))
    claims = await desk.claim_ready(queue_id, ClaimCursor(), leases_max=1, batch=10)
    assert desk.unsettled == 0
    assert await sql("SELECT key FROM headrace.job_unique") == []
    [callback] = claims.leases[0].payloads
    assert b'"done":1' in callback


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE headrace.queue SET paused = true",
        "UPDATE headrace.host SET is_draining = true",
        "UPDATE headrace.host SET expires_at = now()",
    ],
)
async def test_who_may_claim_nothing_can_still_ack(registry, desk, queue_id, sql, change):
    await fill(registry, 2)
    lease = await claim_one(desk, queue_id, 1)
    await sql(change)
    desk.settle(told(lease))
    assert await claim_one(desk, queue_id) is None
    assert desk.unsettled == 0
    assert await sql("SELECT id FROM headrace.job_lease") == []
    assert (await desk.claim_lanes(queue_id, leases_max=1, batch=1)).leases == []


async def test_a_lost_ack_is_told_where_it_rode(jobs, registry, desk, queue_id, sql):
    lost = []
    desk.on_lost = lost.append
    await fill(registry, 1)
    lease = await claim_one(desk, queue_id)
    await sql("DELETE FROM headrace.host")
    await jobs.sweep()
    desk.settle(told(lease))
    await claim_one(desk, queue_id)
    assert lost == [lease.lease_id]
    assert (desk.unsettled, desk.leases_held) == (0, 0)


async def test_the_waiting_ack_does_not_need_a_claim(registry, desk, queue_id):
    await fill(registry, 1)
    desk.settle(told(await claim_one(desk, queue_id)))
    async with asyncio.timeout(60):
        while desk.unsettled:
            await asyncio.sleep(0)
    assert desk.leases_held == 0


async def test_every_eighth_claim_serves_the_lowest_priority(registry, desk, queue_id):
    scan = ClaimCursor()
    [last] = await fill(registry, 1, priority=9)
    await fill(registry, 50, priority=0)
    seen = [(await claim_one(desk, queue_id, 1, scan)).ids[0] for _ in range(8)]
    assert seen.index(last) == 7


async def test_a_persons_retries_win(jobs, registry, desk, queue_id, sql):
    await fill(registry, 1)
    await sql(f"INSERT INTO headrace.queue_override (queue, retries) VALUES ({queue_id}, 1)")
    claims = await desk.claim_ready(queue_id, ClaimCursor(), leases_max=1, batch=1)
    assert claims.retries == 1


async def test_versions_stay_with_their_payloads(jobs, registry, desk, queue_id):
    ids = await jobs.enqueue_many(
        [NewJob(queue="q", version=3), NewJob(queue="q", lane="x", version=4)]
    )
    lease = await claim_one(desk, queue_id)
    assert (list(lease.ids), list(lease.versions)) == (ids[:1], [3])
    await settle(desk, lease, Outcome("returned"))
    assert list((await claim_one(desk, queue_id)).versions) == [3]
    [laned] = (await desk.claim_lanes(queue_id, leases_max=1, batch=5)).leases
    assert list(laned.versions) == [4]


async def test_lane_jobs_are_claimed_for_several_slots(registry, desk, queue_id, broken_invariants):
    for lane in "abc":
        await fill(registry, 10, lane=lane)
    claims = await desk.claim_lanes(queue_id, leases_max=4, batch=6)
    assert [len(lease.ids) for lease in claims.leases] == [6, 6, 6, 6]
    assert claims.slack_s == pytest.approx(0.25)
    assert await broken_invariants() == []
    for lease in claims.leases:
        desk.settle(told(lease))
    await desk.flush()
    rest = await desk.claim_lanes(queue_id, leases_max=4, batch=6)
    assert [len(lease.ids) for lease in rest.leases] == [6]
    assert await broken_invariants() == []


async def test_a_lossy_lane_job_is_alone(registry, desk, queue_id, sql, broken_invariants):
    ids = await fill(registry, 4, lane="a")
    await sql(f"UPDATE headrace.lane_job SET losses = 1 WHERE id = {ids[1]}")
    claims = await desk.claim_lanes(queue_id, leases_max=2, batch=3)
    assert sorted(len(lease.ids) for lease in claims.leases) == [1, 3]
    assert await broken_invariants() == []


async def test_work_ahead(jobs, registry, desk, queue_id):
    registry.task("other")(_nothing)
    other_id = (await jobs.queues.declare())["other"].id
    both = [queue_id, other_id]
    ahead = await desk.queues_with_work(both)
    assert (ahead.queue_ids, ahead.next_s) == (frozenset(), None)
    await fill(registry, 1, after_s=100)
    ahead = await desk.queues_with_work(both)
    assert ahead.queue_ids == frozenset()
    assert 60 < ahead.next_s <= 100
    await jobs.lanes.set("other", "x", starts_max=1, window_s=50, concurrency=None)
    await jobs.enqueue_many([NewJob(queue="other", lane="x")] * 2)
    ahead = await desk.queues_with_work(both)
    assert (ahead.ready, ahead.laned) == (frozenset(), {other_id})
    await desk.claim_lanes(other_id, leases_max=1, batch=5)
    ahead = await desk.queues_with_work(both)
    assert ahead.queue_ids == frozenset()
    assert 20 < ahead.next_s < 51
    await fill(registry, 1, priority=9)
    assert (await desk.queues_with_work(both)).ready == {queue_id}
    await jobs.queues.pause("q")
    assert (await desk.queues_with_work(both)).queue_ids == frozenset()


async def test_a_claim_that_is_cancelled_loses_no_ack(jobs, registry, desk, queue_id):
    [job_id, _] = await fill(registry, 2)
    desk.settle(told(await claim_one(desk, queue_id, 1)))
    claim = asyncio.create_task(claim_one(desk, queue_id, 1))
    await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert desk.unsettled == 1
    await desk.flush()
    assert (await jobs.job(job_id)).state is JobState.GONE
