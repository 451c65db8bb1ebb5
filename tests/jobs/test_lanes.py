"""Lanes with workers, limiters and other queues; the rules that a single claim does not show."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from lease_steps import NO_LIMITS, claim_lane_jobs, most_in_a_window, settle
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, JobContext, Jobs, NewJob, Registry
from headrace.jobs.errors import LaneUnknown, LimiterFixed, LimiterUnknown
from headrace.jobs.model import JobFilter
from headrace.jobs.sql import SQL


@pytest.fixture
def fill(jobs):
    """`await fill(3, "x")`: enqueue into a lane of queue `q`."""

    async def enqueued(count, lane="x", queue="q"):
        return await jobs.enqueue_many([NewJob(queue=queue, lane=lane)] * count)

    return enqueued


@pytest.mark.slow
async def test_windows_hold_at_handler_start(registry, jobs, working, broken_invariants):
    """Four lanes of five starts a second: two queues, two workers, batches and single jobs."""
    starts: dict[str, list[float]] = {}

    @registry.task("batched", batch=3, limiter="fetch")
    async def batched(batch: Batch[dict]):
        for job in batch:
            starts.setdefault(job.lane, []).append(time.monotonic())

    @registry.task("single", concurrency=4, limiter="fetch")
    async def single(job: JobContext[dict]):
        starts.setdefault(job.lane, []).append(time.monotonic())

    for lane in "wxyz":
        await jobs.lanes.set("fetch", lane, starts_max=5, window_s=1.0, concurrency=None)
        for task in (batched, single):
            await jobs.enqueue_many([task.job({}, lane=lane) for _ in range(6)])
    async with working(), working():
        await wait_true(lambda: sum(map(len, starts.values())) == 48)
    for lane, moments in starts.items():
        assert most_in_a_window(moments, 1.0) <= 5, lane
    assert await broken_invariants() == []


async def test_a_worker_returns_jobs_that_it_received_too_late(jobs, registry, working, sql):
    """Without slack every claim arrives late: no job may start."""
    seen = []

    @registry.task("late", limiter="l", batch=5)
    async def late(batch: Batch[dict]):
        seen.extend(batch)

    async def has_started():
        return (await sql("SELECT started_at FROM headrace.lane"))[0]["started_at"]

    await jobs.lanes.set("l", "x", starts_max=5, window_s=60, concurrency=None)
    await sql("UPDATE headrace.lane SET slack_s = 0")
    await jobs.enqueue_many([late.job({}, lane="x") for _ in range(3)])
    async with working():
        await wait_true(has_started)
        assert seen == []
        await sql("UPDATE headrace.lane SET slack_s = 5")
        await wait_true(lambda: len(seen) == 3)
    assert (await jobs.lanes.get("l", "x")).starts_live == 3


async def test_concurrency_holds_and_unused_starts_are_free_again(
    jobs, registry, working, broken_invariants
):
    running, most, finished, seen = 0, 0, 0, []

    @registry.task("full", concurrency=8, limiter="c")
    async def full(number: int):
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        finished += 1

    async def unsure(job: JobContext[dict | None]) -> None:
        seen.append((job.attempt, job.start_before_s is not None))
        if len(seen) < 3:
            job.unstart()

    registry.task("unsure", limiter="u")(unsure)
    registry.task("free")(unsure)
    await jobs.lanes.set("c", "x", starts_max=None, window_s=None, concurrency=2)
    await jobs.enqueue_many([full.job(number=n, lane="x") for n in range(20)])
    await jobs.lanes.set("u", "x", starts_max=1, window_s=60, concurrency=1)
    await jobs.enqueue_many([NewJob(queue="unsure", lane="x")])

    async def is_settled() -> bool:
        return (await jobs.lanes.get("u", "x")).inflight == 0

    async with working():
        await wait_true(lambda: finished == 20 and len(seen) == 3)
        assert (most, seen) == (2, [(1, True)] * 3)
        await wait_true(is_settled)
        assert (await jobs.lanes.get("u", "x")).starts_live == 1
        seen.clear()
        await jobs.enqueue_many([NewJob(queue="free")])
        await wait_true(lambda: len(seen) == 3)
        assert seen == [(1, False)] * 3
    assert await broken_invariants() == []


async def test_a_lane_that_gets_room_wakes_idle_workers(jobs, registry, working):
    seen = []

    @registry.task("quiet", limiter="p")
    async def quiet(job: dict | None):
        seen.append(job)

    await jobs.lanes.set("p", "x", **NO_LIMITS, paused=True)
    job_id = await quiet.enqueue({}, lane="x")

    async def is_paused():
        return (await jobs.why(job_id)).reason == "lane_paused"

    async with working(poll_s=600.0) as worker:
        await wait_true(lambda: worker.is_listening)
        await wait_true(is_paused)
        assert seen == []
        await jobs.lanes.set("p", "x", **NO_LIMITS)
        await wait_true(lambda: seen)


async def test_a_freed_lane_notifies_all_its_queues(jobs, manager, queue_ids, fill, postgres):
    await jobs.lanes.set("l", "x", starts_max=None, window_s=None, concurrency=1)
    await fill(2)
    await fill(1, queue="next")
    lease = await claim_lane_jobs(manager, queue_ids["q"])
    await claim_lane_jobs(manager, queue_ids["next"])
    received, limiters = [], []
    connection = await postgres.connect_unpooled()
    await connection.add_listener("headrace_jobs", lambda *sent: received.append(int(sent[3])))
    try:
        manager.on_settled = limiters.extend
        await settle(manager, lease)
        await wait_true(lambda: set(received) == {queue_ids["q"], queue_ids["next"]})
        assert limiters == ["l"]
        received.clear()
        await jobs.lanes.set("l", "x", **NO_LIMITS)
        await wait_true(lambda: received)
    finally:
        await connection.close()


async def drain(manager, queue_id, jobs_max, *, leases_max, batch):
    """Lanes of the first `jobs_max` jobs, in claims of that size."""
    seen = []
    while len(seen) < jobs_max:
        claims = await manager.claim_lanes(queue_id, leases_max=leases_max, batch=batch)
        assert claims.leases
        for lease in claims.leases:
            seen += lease.lanes
            await settle(manager, lease)
    return seen


@pytest.mark.slow
async def test_lanes_share_by_weight_in_claims_of_every_size(
    jobs, manager, queue_id, fill, broken_invariants
):
    """Of 120 jobs the heavy lane gives 90 and the light one 30, within two shares of a claim."""
    await jobs.lanes.set("l", "heavy", **NO_LIMITS, weight=3)
    for leases_max, batch in ((1, 1), (3, 1), (1, 10)):
        for lane in ("heavy", "light"):
            await fill(150, lane)
        seen = await drain(manager, queue_id, 120, leases_max=leases_max, batch=batch)
        if batch == leases_max == 1:
            runs = "".join("h" if lane == "heavy" else "l" for lane in seen)
            assert "hhhlhhhlhhhl" in runs, runs
        share = max(10, leases_max * batch)
        assert abs(seen[:120].count("heavy") - 90) <= 2 * share, (leases_max, batch)
        await jobs.bulk("cancel", JobFilter(queue="q"))
    assert await broken_invariants() == []


async def test_a_flooded_lane_delays_no_other(manager, queue_ids, fill):
    queue_id = queue_ids["q"]
    await fill(1_000, "flood")
    await drain(manager, queue_id, 1, leases_max=1, batch=1)
    for number in range(20):
        await fill(1, f"calm{number}")
    seen = await drain(manager, queue_id, 60, leases_max=1, batch=20)
    assert sum(lane != "flood" for lane in seen[:60]) == 20
    for lane in "abcde":
        await fill(10, lane, "far")
    seen = [(await claim_lane_jobs(manager, queue_ids["far"], 10)).lanes[0] for _ in range(5)]
    assert sorted(seen) == list("abcde"), "a full batch leaves the other lanes their place"


async def test_shares_end_at_rate_and_concurrency_and_queues_share_a_lane(
    jobs, manager, queue_ids, fill, broken_invariants
):
    await jobs.lanes.set("l", "full", starts_max=None, window_s=None, concurrency=1, weight=3)
    await jobs.lanes.set("l", "slow", starts_max=1, window_s=60, concurrency=None, weight=3)
    for lane in ("full", "slow", "free"):
        await fill(5, lane)
    seen = []
    for _ in range(7):
        claims = await manager.claim_lanes(queue_ids["q"], leases_max=1, batch=1)
        seen += claims.leases[0].lanes if claims.leases else []
    assert Counter(seen) == {"full": 1, "slow": 1, "free": 5}
    await jobs.lanes.set("l", "x", starts_max=10, window_s=60, concurrency=None)
    for queue in ("q", "next"):
        await fill(10, "x", queue)
    shares = Counter()
    for queue in ("q", "next") * 6:
        claims = await manager.claim_lanes(queue_ids[queue], leases_max=1, batch=1)
        shares[queue] += len(claims.leases)
    assert shares == {"q": 5, "next": 5}
    empty = await manager.claim_lanes(queue_ids["q"], leases_max=1, batch=100)
    assert 30 < empty.wait_s <= 61.1
    assert await broken_invariants() == []


async def test_less_slack_counts_starts_as_late_as_they_may_be(jobs, manager, queue_id, fill, sql):
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60, slack_s=10)
    await fill(2)
    await claim_lane_jobs(manager, queue_id)
    [before] = await sql("SELECT at FROM headrace.lane")
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60, slack_s=1)
    [after] = await sql("SELECT at FROM headrace.lane")
    assert (after["at"][0] - before["at"][0]).total_seconds() == 9


async def test_a_limiter_follows_its_operator_and_then_its_code_again(
    jobs, manager, queue_id, fill
):
    await jobs.lanes.set_limiter("l", concurrency=1, is_declared=True)
    await jobs.lanes.set_limiter("l", concurrency=2, is_declared=True)
    await fill(1)
    await claim_lane_jobs(manager, queue_id)
    await jobs.lanes.set_limiter("l", starts_max=5, window_s=60, slack_s=2)
    await jobs.lanes.set_limiter("l", concurrency=4, is_declared=True)
    found = await jobs.lanes.get_limiter("l")
    assert (found.starts_max, found.concurrency, found.is_set) == (5, None, True)
    await jobs.lanes.reset_limiter("l")
    found, lane = await jobs.lanes.get_limiter("l"), await jobs.lanes.get("l", "x")
    assert (found.starts_max, found.concurrency, found.slack_s) == (None, 4, 0.25)
    assert (lane.starts_max, lane.concurrency, found.is_set) == (None, 4, False)
    await jobs.lanes.set_limiter("l", concurrency=5, is_declared=True)
    assert (await jobs.lanes.get("l", "x")).concurrency == 5
    await jobs.lanes.set_limiter("more", concurrency=1)
    limiters = {one.limiter: one for one in await jobs.lanes.limiters()}
    assert sorted(limiters["l"].queues) == ["next", "q"]
    assert limiters["more"].queues == []


async def test_done_jobs_wait_for_no_lane_without_a_concurrency_limit(
    jobs, manager, queue_id, fill, postgres
):
    limits = {"starts_max": 5, "window_s": 60}
    await jobs.lanes.set("l", "x", **limits, concurrency=None)
    await fill(3)
    first, second = [await claim_lane_jobs(manager, queue_id, 1) for _ in range(2)]
    async with postgres.transaction() as tx:
        await jobs.lanes.set("l", "x", **limits, concurrency=1, tx=tx)
        assert await settle(manager, first)
    assert (await jobs.lanes.get("l", "x")).inflight == 1
    assert await claim_lane_jobs(manager, queue_id, 1) is None, "a job from before runs"
    await settle(manager, second)
    assert await wait_true(lambda: claim_lane_jobs(manager, queue_id, 1))


async def test_limits_reach_all_lanes_in_steps_and_after_an_interruption(
    jobs, manager, queue_id, fill, postgres
):
    for number in range(7):
        await fill(1, f"lane{number}")
    await claim_lane_jobs(manager, queue_id)
    limits = {"starts_max": 5, "window_s": 10, "slack_s": 0.25, "is_set": True}
    await postgres.value(SQL.set_limiter, limiter="l", **limits, concurrency=1)
    after, steps = "", 0
    while after is not None:
        after = await postgres.value(SQL.spread_limiter, limiter="l", after=after, lanes_max=3)
        steps += 1
    assert steps == 3
    assert {lane.starts_max for lane in await jobs.lanes.list("l")} == {5}
    await postgres.value(SQL.set_limiter, limiter="l", **limits, concurrency=2)
    await jobs.sweep()
    assert {lane.concurrency for lane in await jobs.lanes.list("l")} == {2}
    assert [row["name"] for row in await postgres.all(SQL.unspread_limiters)] == []


async def test_idle_lanes_are_removed_and_created_again(
    *, jobs, manager, queue_id, fill, sql, broken_invariants
):
    await jobs.lanes.set_limiter("l", starts_max=5, window_s=60)
    await jobs.lanes.set("l", "own", **NO_LIMITS)
    for lane in ("busy", "idle", "recent", "waiting"):
        await fill(1, lane)
    for _ in range(4):
        lease = await claim_lane_jobs(manager, queue_id, 1)
        if lease.lanes[0] != "busy":
            await settle(manager, lease)
    await fill(1, "waiting")
    await claim_lane_jobs(manager, queue_id, 0)
    old = "started_at = now() - interval '2 h', at = '{}', n = '{}'"
    await sql(f"UPDATE headrace.lane SET {old} WHERE name <> 'recent'")
    assert (await jobs.sweep()).lanes_removed == 1
    names = [lane.lane for lane in await jobs.lanes.list("l")]
    assert names == ["busy", "own", "recent", "waiting"]
    assert await broken_invariants() == []
    await fill(2, "idle")
    await sql(f"UPDATE headrace.lane SET {old}")
    await jobs.sweep()
    assert sorted((await claim_lane_jobs(manager, queue_id)).lanes) == ["idle", "idle", "waiting"]
    assert await broken_invariants() == [], "jobs in the journal are safe"


async def test_lanes_are_listed_in_pages_before_their_first_claim(jobs, manager, queue_id, fill):
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60)
    await jobs.lanes.set("l", "b", starts_max=None, window_s=None, concurrency=1)
    for lane in ("c", "a"):
        await fill(3, lane)
    lane = await jobs.lanes.get("l", "a")
    assert (lane.waiting, lane.inflight, lane.starts_live, lane.next_at) == (3, 0, 0, None)
    assert (lane.starts_max, lane.window_s, lane.follows_limiter) == (2, 60, True)
    assert [lane.lane for lane in await jobs.lanes.list("l")] == ["a", "b", "c"]
    assert [lane.lane for lane in await jobs.lanes.list("l", after="a", lanes_max=1)] == ["b"]
    assert len((await claim_lane_jobs(manager, queue_id)).ids) == 4
    assert [lane.waiting for lane in await jobs.lanes.list("l")] == [1, 0, 1]
    with pytest.raises(LimiterUnknown):
        await jobs.lanes.list("nope")


async def test_a_mistyped_limiter_is_refused_unless_it_may_be_created(jobs, queue_id):
    with pytest.raises(LimiterUnknown, match="--create"):
        await jobs.lanes.set("typo", "x", **NO_LIMITS, paused=True, create=False)
    with pytest.raises(LimiterUnknown):
        await jobs.lanes.pause("typo", "x")
    with pytest.raises(LaneUnknown):
        await jobs.lanes.pause("l", "x")
    await jobs.lanes.set("l", "x", **NO_LIMITS, create=False)
    await jobs.lanes.set("ahead", "x", **NO_LIMITS)
    await jobs.lanes.set("ahead", "x", **NO_LIMITS, paused=True, create=False)
    assert (await jobs.lanes.get("ahead", "x")).paused


async def test_a_queue_with_lane_jobs_keeps_its_limiter(queue_id, fill, postgres, config):
    async def never_called(job: dict | None): ...

    await fill(1)
    for queue, error in (("q", LimiterFixed), ("next", None)):
        other = Registry()
        other.task(queue, limiter="changed")(never_called)
        declared = Jobs(postgres, config, other).queues.declare()
        if error is None:
            assert (await declared)[queue].limiter == "changed"
        else:
            with pytest.raises(error):
                await declared
