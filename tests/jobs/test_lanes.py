"""Lanes: strict windows at handler start, concurrency, pauses, several queues.

The books always balance.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from lane_invariants import most_in_a_window
from lease_steps import claim_lane_jobs, live_manager, settle
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, JobContext, Jobs, JobState, NewJob, Registry
from headrace.jobs.errors import InvalidJob, LaneUnknown, LimiterFixed
from headrace.jobs.outcomes import DONE, RETURNED, UNSTARTED, Outcome

NO_LIMITS = {"starts_max": None, "window_s": None, "concurrency": None}


@pytest.fixture
async def desk(jobs, registry, postgres, config):
    """A desk of a living host, with queues `a` and `b` of one limiter."""
    for queue in ("a", "b"):
        registry.task(queue, limiter="fetch")(_nothing)
    queues = await jobs.queues.declare()
    return await live_manager(postgres, config, [row.id for row in queues.values()])


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def claim(jobs, desk, queue="a", jobs_max=100):
    queues = await jobs.queues.declare()
    return await claim_lane_jobs(desk, queues[queue].id, jobs_max)


async def fill(registry, count, *, queue="a", lane="x", **options):
    task = registry.get(queue)
    jobs = [task.job({"n": n}, lane=lane, **options) for n in range(count)]
    return await task.jobs().enqueue_many(jobs)


@pytest.mark.slow
async def test_windows_hold_at_handler_start(registry, jobs, working, config, broken_invariants):
    """4 lanes of 5 a second over two queues and two workers, batches and single jobs."""
    starts: dict[str, list[float]] = {}

    @registry.task("batched", batch=3, limiter="fetch")
    async def batched(batch: Batch[dict]):
        for job in batch:
            starts.setdefault(job.lane, []).append(time.monotonic())

    @registry.task("single", concurrency=4, limiter="fetch")
    async def single(job: JobContext[dict]):
        starts.setdefault(job.payload["lane"], []).append(time.monotonic())

    for lane in "wxyz":
        await jobs.lanes.set("fetch", lane, starts_max=5, window_s=1.0, concurrency=None)
        await jobs.enqueue_many([batched.job({}, lane=lane) for _ in range(9)])
        await jobs.enqueue_many([_in_lane(single, lane) for _ in range(9)])
    async with working(config), working(config):
        await wait_true(lambda: sum(map(len, starts.values())) == 72)
    for lane, moments in starts.items():
        assert most_in_a_window(moments, 1.0) <= 5, lane
        assert max(moments) - min(moments) < 40, f"{lane} was held back too long"
    assert await broken_invariants() == []


def _in_lane(task, lane):
    return NewJob(queue=task.queue, payload={"lane": lane}, lane=lane)


async def test_a_claim_gives_no_more_than_the_window(jobs, registry, desk, broken_invariants):
    await jobs.lanes.set("fetch", "x", starts_max=3, window_s=60, concurrency=None)
    await fill(registry, 5, queue="a")
    await fill(registry, 5, queue="b")
    queues = await jobs.queues.declare()
    claims = await desk.claim_lanes(queues["a"].id, leases_max=1, batch=100)
    [first] = claims.leases
    assert (len(first.ids), first.lanes[0], claims.slack_s) == (3, "x", 1.0)
    empty = await desk.claim_lanes(queues["b"].id, leases_max=1, batch=100)
    assert (empty.leases, empty.slack_s) == ([], None)
    empty = await desk.claim_lanes(queues["b"].id, leases_max=1, batch=100)
    assert 30 < empty.wait_s <= 61.1
    why = await jobs.why(first.ids[-1] + 1)
    assert (why.reason, why.until_at is not None) == ("lane_over_rate", True)
    assert await broken_invariants() == []


async def test_unstarted_jobs_give_their_grants_back(jobs, registry, desk, broken_invariants):
    await jobs.lanes.set("fetch", "x", starts_max=3, window_s=60, concurrency=2)
    await fill(registry, 3)
    lease = await claim(jobs, desk)
    assert len(lease.ids) == 2
    await settle(desk, lease, UNSTARTED)
    lane = await jobs.lanes.get("fetch", "x")
    assert (lane.waiting, lane.inflight, lane.starts_live) == (3, 0, 0)
    again = await claim(jobs, desk)
    await settle(desk, again, RETURNED)
    lane = await jobs.lanes.get("fetch", "x")
    assert (lane.waiting, lane.inflight, lane.starts_live) == (3, 0, 2)
    assert len((await claim(jobs, desk)).ids) == 1
    assert await broken_invariants() == []


async def test_a_late_lease_is_handed_back_by_the_worker(jobs, registry, working, sql, config):
    """With no slack at all every claim arrives late: nothing may start."""
    seen = []

    @registry.task("late", limiter="l", batch=5)
    async def late(batch: Batch[dict]):
        seen.extend(batch)

    await jobs.lanes.set("l", "x", starts_max=5, window_s=60, concurrency=None)
    await sql("UPDATE headrace.lane SET slack_s = 0")
    await jobs.enqueue_many([late.job({}, lane="x") for _ in range(3)])
    async with working(config):
        await wait_true(lambda: _has_started(sql))
        assert seen == []
        await sql("UPDATE headrace.lane SET slack_s = 5")
        await wait_true(lambda: len(seen) == 3)
    assert (await jobs.lanes.get("l", "x")).starts_live == 3


async def _has_started(sql):
    return (await sql("SELECT started_at FROM headrace.lane"))[0]["started_at"]


async def test_concurrency_holds_and_is_freed(jobs, registry, working, broken_invariants):
    running, most, finished = 0, 0, 0

    @registry.task("full", concurrency=8, limiter="c")
    async def full(number: int):
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        finished += 1

    await jobs.lanes.set("c", "x", starts_max=None, window_s=None, concurrency=2)
    await jobs.enqueue_many(
        [NewJob(queue="full", payload={"number": n}, lane="x") for n in range(20)]
    )
    async with working():
        await wait_true(lambda: finished == 20)
    assert most == 2
    assert await broken_invariants() == []


async def test_a_paused_lane_waits_and_a_resumed_one_is_woken(jobs, registry, working, config):
    seen = []

    @registry.task("quiet", limiter="p")
    async def quiet(job: dict | None):
        seen.append(job)

    await jobs.lanes.set("p", "x", **NO_LIMITS, paused=True)
    job_id = await quiet.enqueue({}, lane="x")
    async with working(dataclasses.replace(config, poll_s=600.0)) as worker:
        await wait_true(lambda: worker.is_listening)
        await wait_true(lambda: _reason(jobs, job_id, "lane_paused"))
        assert seen == []
        await jobs.lanes.set("p", "x", **NO_LIMITS)
        await wait_true(lambda: seen)


async def _reason(jobs, job_id, reason):
    return (await jobs.why(job_id)).reason == reason


async def test_weight_and_quantum_share_a_claim(jobs, registry, desk):
    await jobs.lanes.set("fetch", "heavy", **NO_LIMITS, weight=3)
    for lane in ("heavy", "light"):
        await fill(registry, 50, lane=lane)
    lease = await claim(jobs, desk)
    assert sorted(lease.lanes) == ["heavy"] * 50 + ["light"] * 25


async def test_a_full_batch_leaves_the_other_lanes_their_place(
    jobs, registry, desk, broken_invariants
):
    for lane in "abcde":
        await fill(registry, 10, lane=lane)
    seen = [(await claim(jobs, desk, jobs_max=10)).lanes[0] for _ in range(5)]
    assert sorted(seen) == list("abcde")
    assert await broken_invariants() == []


async def test_delayed_and_retried_lane_jobs_come_back_to_their_lane(
    jobs, registry, desk, sql, broken_invariants
):
    [later] = await fill(registry, 1, after_s=3600)
    [now] = await fill(registry, 1)
    lease = await claim(jobs, desk)
    assert list(lease.ids) == [now]
    await settle(desk, lease, {now: Outcome("retry", 3600)})
    assert [(await jobs.job(i)).state for i in (later, now)] == [JobState.SCHEDULED] * 2
    await sql("UPDATE headrace.job_ready SET run_at = now()")
    assert (await jobs.sweep()).lane_jobs_moved == 2
    again = await claim(jobs, desk)
    assert sorted(zip(again.ids, again.attempts, strict=True)) == [(later, 0), (now, 1)]
    await settle(desk, again)
    assert await broken_invariants() == []


async def test_a_cancelled_lane_job_leaves_the_books_right(jobs, registry, desk, broken_invariants):
    ids = await fill(registry, 3)
    await jobs.cancel(ids[0])
    assert await broken_invariants() == []
    assert list((await claim(jobs, desk)).ids) == ids[1:]
    assert await broken_invariants() == []


async def test_big_limits_keep_a_short_log(jobs, registry, desk, sql):
    await jobs.lanes.set("fetch", "x", starts_max=1000, window_s=600, concurrency=None)
    await fill(registry, 60)
    for _ in range(6):
        await claim(jobs, desk)
    [row] = await sql("SELECT n FROM headrace.lane")
    assert sum(row["n"]) == 60
    assert len(row["n"]) <= 2


async def test_a_longer_window_counts_what_was_forgotten(jobs, registry, desk):
    await jobs.lanes.set("fetch", "x", starts_max=2, window_s=0.001, concurrency=None)
    await fill(registry, 6)
    assert len((await claim(jobs, desk)).ids) == 2
    await jobs.lanes.set("fetch", "x", starts_max=2, window_s=60, concurrency=None)
    assert await claim(jobs, desk) is None
    await jobs.lanes.set("fetch", "x", **NO_LIMITS)
    assert len((await claim(jobs, desk)).ids) == 4
    await jobs.lanes.set("fetch", "x", starts_max=9, window_s=60, concurrency=None)
    await fill(registry, 1)
    assert await claim(jobs, desk) is None


async def test_many_claimers_keep_the_books(jobs, registry, desk, postgres, broken_invariants):
    """Enqueue, claim and settle at once on few lanes.

    The counts agree, nothing is lost or doubled.
    """
    for lane in "xyz":
        await jobs.lanes.set("fetch", lane, starts_max=50_000, window_s=1, concurrency=7)
    done = []

    async def produce():
        for _ in range(10):
            for lane in "xyz":
                await fill(registry, 4, lane=lane)

    async def consume(queue, word):
        empty = 0
        while empty < 30:
            lease = await claim(jobs, desk, queue, 5)
            if lease is None:
                empty += 1
                continue
            some = dict.fromkeys(lease.ids[1:], DONE)
            some[lease.ids[0]] = Outcome(word)
            done.extend(job_id for job_id, outcome in some.items() if outcome.kind == "done")
            assert await settle(desk, lease, some)
            empty = 0

    await asyncio.gather(produce(), *(consume("a", w) for w in ("done", "unstarted", "returned")))

    async def all_are_done():
        # A job that was just given back may be ready a moment after a claim that found none.
        while lease := await claim(jobs, desk):
            done.extend(lease.ids)
            await settle(desk, lease)
        return len(done) >= 120

    await wait_true(all_are_done, what="every job was done")
    assert len(done) == len(set(done)) == 120
    assert await broken_invariants() == []


async def test_a_lane_that_nobody_used_is_unknown(jobs):
    with pytest.raises(LaneUnknown):
        await jobs.lanes.get("fetch", "nobody")


@pytest.mark.usefixtures("desk")
async def test_a_queue_with_lanes_keeps_its_limiter(registry, postgres, config):
    await fill(registry, 1)
    other = Registry()
    other.task("a", limiter="other")(_nothing)
    with pytest.raises(LimiterFixed):
        await Jobs(postgres, config, other).queues.declare()
    other = Registry()
    other.task("b", limiter="other")(_nothing)
    assert (await Jobs(postgres, config, other).queues.declare())["b"].limiter == "other"


@pytest.mark.parametrize(
    "change",
    [
        {"starts_max": 0, "window_s": 1},
        {"starts_max": -1, "window_s": 1},
        {"starts_max": 5},
        {"window_s": 5},
        {"starts_max": 5, "window_s": 0},
        {"starts_max": 5, "window_s": float("nan")},
        {"concurrency": 0},
        {"weight": 0},
    ],
)
async def test_limits_that_mean_nothing_are_refused(jobs, change):
    with pytest.raises(InvalidJob):
        await jobs.lanes.set("fetch", "x", **{**NO_LIMITS, **change})
    with pytest.raises(LaneUnknown):
        await jobs.lanes.get("fetch", "x")
