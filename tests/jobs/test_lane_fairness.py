"""Lanes share the claimed jobs by weight, even in small claims, and no lane waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from lease_steps import live_manager, settle

from headrace.jobs import NewJob

NO_LIMITS = {"starts_max": None, "window_s": None, "concurrency": None}


@pytest.fixture
async def queues(jobs, registry):
    """Ids of two queues of one limiter."""
    registry.task("q", limiter="l")(_nothing)
    registry.task("p", limiter="l")(_nothing)
    return {name: row.id for name, row in (await jobs.queues.declare()).items()}


@pytest.fixture
async def desk(postgres, config, queues):
    """A desk of a living host."""
    return await live_manager(postgres, config, queues.values())


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def drain(desk, queue_id, jobs_max, *, leases_max, batch):
    """Lanes of the first `jobs_max` jobs handed out, in claims of that size."""
    seen = []
    while len(seen) < jobs_max:
        claims = await desk.claim_lanes(queue_id, leases_max=leases_max, batch=batch)
        assert claims.leases
        for lease in claims.leases:
            seen += lease.lanes
            await settle(desk, lease)
    return seen


@pytest.mark.parametrize(
    ("leases_max", "batch"), [(1, 1), (3, 1), (1, 7), (1, 10), (2, 20), (1, 100)]
)
@pytest.mark.slow
async def test_weights_1_and_3(jobs, desk, queues, *, broken_invariants, leases_max, batch):
    """Of 240 jobs the heavy lane gives 180 and the light one 60, give or take a turn."""
    await jobs.lanes.set("l", "heavy", **NO_LIMITS, weight=3)
    for lane in ("heavy", "light"):
        await jobs.enqueue_many([NewJob(queue="q", lane=lane) for _ in range(300)])
    seen = Counter((await drain(desk, queues["q"], 240, leases_max=leases_max, batch=batch))[:240])
    turn = max(10, leases_max * batch)
    assert abs(seen["heavy"] - 180) <= 2 * turn, seen
    assert await broken_invariants() == []


async def test_claims_of_one_job_alternate(jobs, desk, queues):
    await jobs.lanes.set("l", "heavy", **NO_LIMITS, weight=3)
    for lane in ("heavy", "light"):
        await jobs.enqueue_many([NewJob(queue="q", lane=lane) for _ in range(20)])
    seen = await drain(desk, queues["q"], 16, leases_max=1, batch=1)
    runs = "".join("h" if lane == "heavy" else "l" for lane in seen)
    assert "hhhlhhhlhhhl" in runs, runs


async def test_a_flooded_lane_holds_up_nobody(jobs, desk, queues):
    await jobs.enqueue_many([NewJob(queue="q", lane="flood") for _ in range(2_000)])
    await drain(desk, queues["q"], 1, leases_max=1, batch=1)
    await jobs.enqueue_many([NewJob(queue="q", lane=f"calm{n}") for n in range(20)])
    seen = await drain(desk, queues["q"], 60, leases_max=1, batch=20)
    assert sum(lane != "flood" for lane in seen[:60]) == 20


async def test_a_turn_ends_where_rate_or_concurrency_do(jobs, desk, queues, broken_invariants):
    await jobs.lanes.set("l", "full", starts_max=None, window_s=None, concurrency=1, weight=3)
    await jobs.lanes.set("l", "slow", starts_max=1, window_s=60, concurrency=None, weight=3)
    for lane in ("full", "slow", "free"):
        await jobs.enqueue_many([NewJob(queue="q", lane=lane) for _ in range(5)])
    seen = []
    for _ in range(7):
        claims = await desk.claim_lanes(queues["q"], leases_max=1, batch=1)
        seen += claims.leases[0].lanes if claims.leases else []
    assert Counter(seen) == {"full": 1, "slow": 1, "free": 5}
    assert await broken_invariants() == []


async def test_queues_of_one_limiter_share_their_lane(jobs, desk, queues, broken_invariants):
    await jobs.lanes.set("l", "x", starts_max=10, window_s=60, concurrency=None)
    for queue in ("q", "p"):
        await jobs.enqueue_many([NewJob(queue=queue, lane="x") for _ in range(10)])
    seen = Counter()
    for queue in ("q", "p") * 6:
        claims = await desk.claim_lanes(queues[queue], leases_max=1, batch=1)
        seen[queue] += len(claims.leases)
    assert seen == {"q": 5, "p": 5}
    assert await broken_invariants() == []
