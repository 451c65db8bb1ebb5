"""Limiters: limits of all lanes that have none of their own, declared or set, live.

Idle lanes cost nothing.
"""

from __future__ import annotations

import pytest
from lease_steps import claim_lane_jobs, live_manager, settle

from headrace.jobs import NewJob, store
from headrace.jobs.errors import InvalidJob, LaneUnknown, LimiterUnknown

NO_LIMITS = {"starts_max": None, "window_s": None, "concurrency": None}


@pytest.fixture
async def queue_id(jobs, registry):
    """The id of a queue `q` of limiter `l`."""
    registry.task("q", limiter="l")(_nothing)
    return (await jobs.queues.declare())["q"].id


@pytest.fixture
async def desk(postgres, config, queue_id):
    """A desk of a living host."""
    return await live_manager(postgres, config, [queue_id])


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def fill(jobs, count, lane="x"):
    return await jobs.enqueue_many([NewJob(queue="q", lane=lane) for _ in range(count)])


async def test_new_lanes_have_their_limiters_limits(jobs, desk, queue_id):
    await jobs.lanes.declare_limiter("l", starts_max=2, window_s=60, concurrency=7)
    await fill(jobs, 3)
    assert len((await claim_lane_jobs(desk, queue_id)).ids) == 2
    lane = await jobs.lanes.get("l", "x")
    assert (lane.starts_max, lane.window_s, lane.concurrency) == (2, 60, 7)
    assert lane.follows_limiter


async def test_a_change_reaches_lanes_without_limits_of_their_own(
    jobs, desk, queue_id, broken_invariants
):
    await jobs.lanes.set_limiter("l", starts_max=1, window_s=60)
    await jobs.lanes.set("l", "own", starts_max=1, window_s=60, concurrency=None)
    for lane in ("own", "x", "y"):
        await fill(jobs, 3, lane)
    assert len((await claim_lane_jobs(desk, queue_id)).ids) == 3
    assert await claim_lane_jobs(desk, queue_id) is None
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60)
    assert sorted((await claim_lane_jobs(desk, queue_id)).lanes) == ["x", "y"]
    await jobs.lanes.reset("l", "own")
    assert list((await claim_lane_jobs(desk, queue_id)).lanes) == ["own"]
    assert await broken_invariants() == []


async def test_a_longer_window_of_the_limiter_counts_what_was_forgotten(jobs, desk, queue_id):
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=0.001, slack_s=0.001)
    await fill(jobs, 4)
    assert len((await claim_lane_jobs(desk, queue_id)).ids) == 2
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60)
    assert await claim_lane_jobs(desk, queue_id) is None


async def test_less_slack_counts_starts_as_late_as_they_may_be(jobs, desk, queue_id, sql):
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60, slack_s=10)
    await fill(jobs, 2)
    await claim_lane_jobs(desk, queue_id)
    [before] = await sql("SELECT at FROM headrace.lane")
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60, slack_s=1)
    [after] = await sql("SELECT at FROM headrace.lane")
    assert (after["at"][0] - before["at"][0]).total_seconds() == 9


async def test_a_persons_word_outlives_what_code_declares(jobs):
    await jobs.lanes.declare_limiter("l", concurrency=1)
    await jobs.lanes.declare_limiter("l", concurrency=2)
    assert (await jobs.lanes.get_limiter("l")).concurrency == 2
    await jobs.lanes.set_limiter("l", concurrency=3)
    await jobs.lanes.declare_limiter("l", concurrency=4)
    found = await jobs.lanes.get_limiter("l")
    assert (found.concurrency, found.is_set) == (3, True)


async def test_a_change_that_was_cut_short_is_finished_by_a_sweep(jobs, desk, queue_id, postgres):
    await fill(jobs, 1)
    await claim_lane_jobs(desk, queue_id)
    assert await store.queues.set_limiter(
        postgres,
        "l",
        starts_max=5,
        window_s=10,
        slack_s=0.25,
        concurrency=None,
        is_set=True,
    )
    assert (await jobs.lanes.get("l", "x")).starts_max is None
    await jobs.sweep()
    assert (await jobs.lanes.get("l", "x")).starts_max == 5
    assert await store.queues.unspread_limiters(postgres) == []


async def test_spreading_goes_in_steps(jobs, desk, queue_id, postgres):
    for n in range(7):
        await fill(jobs, 1, f"lane{n}")
    await claim_lane_jobs(desk, queue_id)
    await store.queues.set_limiter(
        postgres, "l", starts_max=5, window_s=10, slack_s=0.25, concurrency=1, is_set=True
    )
    after, steps = "", 0
    while after is not None:
        after = await store.queues.spread_limiter(postgres, "l", after=after, lanes_max=3)
        steps += 1
    assert steps == 3
    assert {lane.starts_max for lane in await jobs.lanes.list("l")} == {5}


async def test_concurrency_alone_is_a_limit(jobs, desk, queue_id, broken_invariants):
    await jobs.lanes.set_limiter("l", concurrency=2)
    await fill(jobs, 5)
    lease = await claim_lane_jobs(desk, queue_id)
    assert len(lease.ids) == 2
    claims = await desk.claim_lanes(queue_id, leases_max=1, batch=5)
    assert (claims.leases, claims.wait_s) == ([], None)
    await settle(desk, lease)
    assert len((await claim_lane_jobs(desk, queue_id)).ids) == 2
    assert await broken_invariants() == []


async def test_idle_lanes_go_and_come_back(jobs, desk, queue_id, sql, broken_invariants):
    await jobs.lanes.set_limiter("l", starts_max=5, window_s=60)
    await jobs.lanes.set("l", "own", **NO_LIMITS)
    for lane in ("busy", "idle", "recent", "waiting"):
        await fill(jobs, 1, lane)
    for _ in range(4):
        lease = await claim_lane_jobs(desk, queue_id, 1)
        if lease.lanes[0] != "busy":
            await settle(desk, lease)
    await fill(jobs, 1, "waiting")
    await claim_lane_jobs(desk, queue_id, 0)
    await sql(
        "UPDATE headrace.lane SET started_at = now() - interval '2 h', at = '{}', n = '{}'"
        " WHERE name <> 'recent'"
    )
    assert (await jobs.sweep()).lanes_removed == 1
    assert [lane.lane for lane in await jobs.lanes.list("l")] == [
        "busy",
        "own",
        "recent",
        "waiting",
    ]
    assert await broken_invariants() == []
    await fill(jobs, 2, "idle")
    lanes = list((await claim_lane_jobs(desk, queue_id)).lanes)
    assert sorted(lanes) == ["idle", "idle", "waiting"]
    assert await broken_invariants() == []


async def test_an_idle_lane_with_a_line_in_the_journal_is_safe(
    jobs, desk, queue_id, sql, broken_invariants
):
    await fill(jobs, 1)
    await settle(desk, await claim_lane_jobs(desk, queue_id))
    await sql("UPDATE headrace.lane SET started_at = now() - interval '2 h'")
    await fill(jobs, 3)
    assert (await jobs.sweep()).lanes_removed == 1
    assert await broken_invariants() == []
    assert len((await claim_lane_jobs(desk, queue_id)).ids) == 3
    assert await broken_invariants() == []


async def test_lanes_are_listed_in_pages(jobs, desk, queue_id):
    for n in range(5):
        await fill(jobs, n + 1, f"lane{n}")
    await desk.claim_lanes(queue_id, leases_max=1, batch=1)
    page = await jobs.lanes.list("l", lanes_max=3)
    assert [lane.lane for lane in page] == ["lane0", "lane1", "lane2"]
    rest = await jobs.lanes.list("l", after=page[-1].lane, lanes_max=3)
    assert [(lane.lane, lane.waiting + lane.inflight) for lane in rest] == [
        ("lane3", 4),
        ("lane4", 5),
    ]
    assert await jobs.lanes.list("nope") == []


async def test_limiters_are_those_that_are_set_or_used(jobs, queue_id):
    await jobs.lanes.set_limiter("other", concurrency=1)
    found = {one.limiter: one for one in await jobs.lanes.limiters()}
    assert found.keys() >= {"l", "other"}
    assert (found["l"].queues, found["l"].starts_max) == (["q"], None)
    with pytest.raises(LimiterUnknown):
        await jobs.lanes.get_limiter("nope")
    with pytest.raises(LimiterUnknown):
        await jobs.lanes.get_limiter("a\0")
    with pytest.raises(LaneUnknown):
        await jobs.lanes.reset("l", "nope")
    assert queue_id


@pytest.mark.parametrize(
    "limits",
    [
        {"starts_max": 0, "window_s": 1},
        {"starts_max": 5},
        {"concurrency": 0},
        {"slack_s": 0},
        {"slack_s": 61},
        {"slack_s": float("nan")},
    ],
)
async def test_limits_that_mean_nothing(jobs, limits):
    with pytest.raises(InvalidJob):
        await jobs.lanes.set_limiter("l", **limits)
    with pytest.raises(LimiterUnknown):
        await jobs.lanes.get_limiter("l")


async def test_a_lane_is_known_before_its_first_claim(jobs, desk, queue_id):
    await jobs.lanes.set_limiter("l", starts_max=2, window_s=60)
    await jobs.lanes.set("l", "b", starts_max=None, window_s=None, concurrency=1)
    for lane in ("c", "a"):
        await fill(jobs, 3, lane)
    lane = await jobs.lanes.get("l", "a")
    assert (lane.waiting, lane.inflight, lane.starts_live, lane.next_at) == (3, 0, 0, None)
    assert (lane.starts_max, lane.window_s, lane.follows_limiter) == (2, 60, True)
    assert [lane.lane for lane in await jobs.lanes.list("l")] == ["a", "b", "c"]
    assert [lane.lane for lane in await jobs.lanes.list("l", after="a", lanes_max=1)] == ["b"]
    assert len((await claim_lane_jobs(desk, queue_id)).ids) == 4
    assert [lane.waiting for lane in await jobs.lanes.list("l")] == [1, 0, 1]


async def test_a_pause_leaves_the_limits_alone(jobs, desk, queue_id, broken_invariants):
    await jobs.lanes.set("l", "own", starts_max=2, window_s=60, concurrency=3, weight=4)
    await jobs.lanes.set_limiter("l", concurrency=1)
    await fill(jobs, 5, "own")
    await fill(jobs, 5, "x")
    before = [await jobs.lanes.get("l", lane) for lane in ("own", "x")]
    for lane in ("own", "x"):
        await jobs.lanes.pause("l", lane)
    assert await claim_lane_jobs(desk, queue_id) is None
    assert all(lane.paused for lane in await jobs.lanes.list("l"))
    for lane in ("own", "x"):
        await jobs.lanes.resume("l", lane)
    assert [await jobs.lanes.get("l", lane) for lane in ("own", "x")] == before
    assert len((await claim_lane_jobs(desk, queue_id)).ids) == 3
    await jobs.lanes.pause("l", "own")
    await jobs.lanes.resume("l", "own")
    assert await claim_lane_jobs(desk, queue_id) is None, "the window counts on through a pause"
    assert await broken_invariants() == []
    with pytest.raises(LaneUnknown):
        await jobs.lanes.pause("l", "nobody")


async def test_a_limiter_is_given_back_to_its_code(jobs, desk, queue_id):
    await jobs.lanes.declare_limiter("l", concurrency=1)
    await fill(jobs, 1)
    await claim_lane_jobs(desk, queue_id)
    await jobs.lanes.set_limiter("l", starts_max=5, window_s=60, slack_s=2)
    await jobs.lanes.declare_limiter("l", concurrency=4)
    await jobs.lanes.reset_limiter("l")
    found, lane = await jobs.lanes.get_limiter("l"), await jobs.lanes.get("l", "x")
    assert (found.starts_max, found.concurrency, found.slack_s) == (None, 4, 0.25)
    assert (lane.starts_max, lane.concurrency, found.is_set) == (None, 4, False)
    await jobs.lanes.reset_limiter("l")
    await jobs.lanes.declare_limiter("l", concurrency=5)
    assert (await jobs.lanes.get("l", "x")).concurrency == 5
    with pytest.raises(LimiterUnknown):
        await jobs.lanes.reset_limiter("nobody")


async def test_a_mistyped_limiter_is_refused_unless_it_is_to_be_made(jobs, queue_id):
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
