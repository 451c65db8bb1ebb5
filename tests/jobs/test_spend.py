"""Tokens for further starts of a lane: strict beside claims, in order, bounded, refusable."""

from __future__ import annotations

import asyncio
import random

import pytest
from lane_invariants import most_in_a_window
from lease_steps import claim_lane_jobs, live_manager, settle
from tests.kit.waiting import wait_true

from headrace.jobs import JobContext, NewJob
from headrace.jobs.errors import InvalidJob
from headrace.jobs.outcomes import UNSTARTED

NO_LIMITS = {"starts_max": None, "window_s": None, "concurrency": None}


@pytest.fixture
async def queue_id(jobs, registry):
    """The id of a queue `q` of limiter `l`."""
    registry.task("q", limiter="l")(_nothing)
    return (await jobs.queues.declare())["q"].id


@pytest.fixture
async def leases(postgres, config, queue_id):
    """The lease manager of a live host."""
    return await live_manager(postgres, config, [queue_id])


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def fill(jobs, count):
    return await jobs.enqueue_many([NewJob(queue="q", lane="x") for _ in range(count)])


async def test_a_lane_with_room_gives_at_once(jobs, leases, queue_id, broken_invariants):
    await jobs.lanes.set("l", "x", starts_max=5, window_s=60, concurrency=1)
    assert await leases.spend(queue_id, "x", 3, 0.0) == 0
    assert (await jobs.lanes.get("l", "x")).starts_live == 3
    await fill(jobs, 5)
    await jobs.lanes.set("l", "x", starts_max=5, window_s=60, concurrency=None)
    assert len((await claim_lane_jobs(leases, queue_id)).ids) == 2
    assert await broken_invariants() == []


async def test_a_full_lane_says_when_or_refuses(jobs, leases, queue_id):
    await jobs.lanes.set("l", "x", starts_max=2, window_s=60, concurrency=None)
    assert await jobs.lanes.spend("l", "x", 2) == 0
    assert await jobs.lanes.spend("l", "x", wait_max_s=30) is None
    assert (await jobs.lanes.get("l", "x")).starts_live == 2
    first = await jobs.lanes.spend("l", "x", wait_max_s=100)
    second = await jobs.lanes.spend("l", "x", wait_max_s=100)
    assert 30 < first <= 61.1
    assert second == pytest.approx(first, abs=20)
    assert await jobs.lanes.spend("l", "x", wait_max_s=100) is None
    assert 90 < await jobs.lanes.spend("l", "x", wait_max_s=3_600) <= 122.1
    assert queue_id


async def test_whoever_waits_is_not_overtaken_by_claims(jobs, leases, queue_id, sql):
    await jobs.lanes.set("l", "x", starts_max=2, window_s=60, concurrency=None)
    await fill(jobs, 4)
    await jobs.lanes.spend("l", "x", 2)
    assert await jobs.lanes.spend("l", "x", 2, wait_max_s=100) > 30
    await sql(
        "UPDATE headrace.lane SET at = ARRAY[at[1] - interval '61 s', at[2] - interval '55 s']"
    )
    await sql("UPDATE headrace.lane_queue SET ready_at = now()")
    assert await claim_lane_jobs(leases, queue_id) is None
    claims = await leases.claim_lanes(queue_id, leases_max=1, batch=1)
    assert 30 < claims.wait_s < 70


async def test_more_than_the_limit_is_refused(jobs, leases):
    await jobs.lanes.set("l", "x", starts_max=2, window_s=1, concurrency=None)
    assert await jobs.lanes.spend("l", "x", 3, wait_max_s=3_600) is None
    assert (await jobs.lanes.get("l", "x")).starts_live == 0
    assert leases.leases_held == 0


async def test_a_paused_lane_refuses(jobs, leases, queue_id):
    await jobs.lanes.set("l", "x", **NO_LIMITS, paused=True)
    assert await leases.spend(queue_id, "x", 1, 100.0) is None


async def test_a_lane_that_nobody_used_is_made(jobs, leases, queue_id):
    await jobs.lanes.set_limiter("l", starts_max=1, window_s=60)
    assert await leases.spend(queue_id, "new", 1, 0.0) == 0
    assert await leases.spend(queue_id, "new", 1, 0.0) is None
    assert await jobs.lanes.spend("free", "new") == 0


async def test_big_limits_keep_a_short_log_of_spends(jobs, leases, sql):
    await jobs.lanes.set("l", "x", starts_max=1000, window_s=600, concurrency=None)
    for _ in range(50):
        assert await jobs.lanes.spend("l", "x") == 0
    [row] = await sql("SELECT n FROM headrace.lane")
    assert sum(row["n"]) == 50
    assert len(row["n"]) <= 2
    assert leases.leases_held == 0


@pytest.mark.parametrize(
    ("starts", "wait_max_s"), [(0, 0), (-1, 0), (True, 0), (1, -1), (1, float("nan")), (1, 1e9)]
)
async def test_spends_that_mean_nothing(jobs, starts, wait_max_s):
    with pytest.raises(InvalidJob):
        await jobs.lanes.spend("l", "x", starts, wait_max_s=wait_max_s)


@pytest.mark.slow
@pytest.mark.parametrize("starts_max", [4, 40])
async def test_claims_spends_and_hand_backs_hold_the_window_together(
    jobs, leases, queue_id, *, sql, broken_invariants, starts_max
):
    """Starts from the lane's log, read after each step; window and slack are 0.15 s together."""
    await jobs.lanes.set_limiter("l", starts_max=starts_max, window_s=0.1, slack_s=0.05)
    await fill(jobs, 600)
    dice = random.Random(7)
    granted = []
    returned_ack = 0

    async def step():
        nonlocal returned_ack
        if dice.random() < 0.5:
            count = dice.randint(1, 4)
            wait_s = await jobs.lanes.spend("l", "x", count, wait_max_s=dice.choice([0, 0.3]))
            if wait_s is not None:
                [row] = await sql(
                    "SELECT (SELECT max(a) FROM unnest(at) a) AS at FROM headrace.lane"
                )
                granted.extend([row["at"].timestamp()] * count)
            return
        claims = await leases.claim_lanes(queue_id, leases_max=2, batch=3)
        for lease in claims.leases:
            if dice.random() < 0.3:
                returned_ack += len(lease.ids)
                await settle(leases, lease, UNSTARTED)
            else:
                granted.extend([claims.claimed_at.timestamp()] * len(lease.ids))
                await settle(leases, lease)

    async with asyncio.timeout(60):
        while len(granted) < 5 * starts_max or returned_ack == 0:
            await step()
    assert most_in_a_window(granted, 0.1) <= starts_max
    assert await broken_invariants() == []


async def test_a_start_that_was_not_used_is_free_again(jobs, registry, working, broken_invariants):
    """With one start per minute, a job that returned its start gets it again at once."""
    seen = []

    async def unsure(job: JobContext[dict | None]) -> None:
        seen.append((job.attempt, job.start_before_s is not None))
        if len(seen) < 3:
            job.unstart()

    registry.task("unsure", limiter="l")(unsure)
    registry.task("free")(unsure)
    await jobs.lanes.set("l", "x", starts_max=1, window_s=60, concurrency=1)
    await jobs.enqueue_many([NewJob(queue="unsure", lane="x")])
    async with working():
        await wait_true(lambda: len(seen) == 3, what="it ran three times")
        assert seen == [(1, True)] * 3

        async def is_free() -> bool:
            return (await jobs.lanes.get("l", "x")).inflight == 0

        await wait_true(is_free, what="it is settled")
        assert (await jobs.lanes.get("l", "x")).starts_live == 1
        seen.clear()
        await jobs.enqueue_many([NewJob(queue="free")])
        await wait_true(lambda: len(seen) == 3, what="without a lane it comes back, too")
        assert seen == [(1, False)] * 3
    assert await broken_invariants() == []
