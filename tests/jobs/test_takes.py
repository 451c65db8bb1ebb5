"""Takes: jobs for other code and people, under leases of their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from headrace.jobs import JobState, LeaseLost, NewJob
from headrace.jobs.errors import InvalidTake, QueueUnknown
from headrace.jobs.model import TakenOutcome


@pytest.fixture
async def queues(jobs, registry):
    """Queues `q` and `next`; `q` keeps results."""
    registry.task("q", retries=1)(_nothing)
    registry.task("next")(_nothing)
    return await jobs.queues.declare()


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def fill(jobs, count=1, **options):
    return await jobs.enqueue_many(
        [NewJob(queue="q", payload={"n": n}, **options) for n in range(count)]
    )


@pytest.mark.usefixtures("queues")
async def test_take_and_ack(jobs, sql):
    ids = await fill(jobs, 3)
    taken = await jobs.takes.take("q", 2, lease_s=60)
    assert [(job.id, job.payload, job.attempt) for job in taken.jobs] == [
        (ids[0], {"n": 0}, 1),
        (ids[1], {"n": 1}, 1),
    ]
    left = taken.expires_at - datetime.now(UTC)
    assert timedelta(seconds=50) < left <= timedelta(seconds=61)
    job = await jobs.job(ids[0])
    assert (job.state, job.host, job.lease_id) == (JobState.LEASED, "taker", taken.lease_id)
    await jobs.takes.ack(taken.lease_id, {ids[0]: TakenOutcome()})
    await jobs.takes.ack(taken.lease_id, {ids[0]: TakenOutcome(outcome="fail")})
    assert (await jobs.job(ids[1])).state is JobState.LEASED
    await jobs.takes.ack(taken.lease_id, {ids[1]: TakenOutcome(outcome="fail", why="no")})
    assert (await jobs.job(ids[1])).error == "no"
    assert await sql("SELECT id FROM headrace.host") == []
    with pytest.raises(LeaseLost):
        await jobs.takes.ack(taken.lease_id, {ids[0]: TakenOutcome()})


@pytest.mark.usefixtures("queues")
async def test_a_take_of_nothing_leaves_nothing(jobs, sql):
    await fill(jobs, 1, after_s=100)
    taken = await jobs.takes.take("q", 5)
    assert (taken.lease_id, taken.jobs, taken.expires_at) == (None, [], None)
    assert await sql("SELECT id FROM headrace.host") == []
    await jobs.queues.pause("q")
    await fill(jobs)
    assert (await jobs.takes.take("q")).jobs == []


@pytest.mark.usefixtures("queues")
async def test_every_outcome(jobs):
    ids = await fill(jobs, 7)
    taken = await jobs.takes.take("q", 7)
    await jobs.takes.ack(
        taken.lease_id,
        dict(
            zip(
                ids,
                [
                    TakenOutcome(outcome="done"),
                    TakenOutcome(outcome="retry", after_s=100, why="later"),
                    TakenOutcome(outcome="fail", why="no"),
                    TakenOutcome(outcome="snooze", after_s=100),
                    TakenOutcome(outcome="cancel"),
                    TakenOutcome(outcome="send_to", queue="next"),
                    TakenOutcome(outcome="return"),
                ],
                strict=True,
            )
        ),
    )
    found = [await jobs.job(job_id) for job_id in ids]
    assert [job.state.value for job in found] == [
        "gone",
        "scheduled",
        "failed",
        "scheduled",
        "cancelled",
        "ready",
        "ready",
    ]
    assert [job.attempt for job in found] == [0, 1, 1, 0, 0, 0, 0]
    assert found[5].queue == "next"


@pytest.mark.usefixtures("queues")
async def test_the_last_retry_fails(jobs, sql):
    [job_id] = await fill(jobs)
    for _ in range(2):
        await sql("UPDATE headrace.job_ready SET run_at = now()")
        taken = await jobs.takes.take("q")
        await jobs.takes.ack(taken.lease_id, {job_id: TakenOutcome(outcome="retry", why="again")})
    job = await jobs.job(job_id)
    assert (job.state, job.attempt, job.error) == (JobState.FAILED, 2, "again")


@pytest.mark.usefixtures("queues")
async def test_extend(jobs, sql):
    [job_id] = await fill(jobs)
    taken = await jobs.takes.take("q", lease_s=10)
    later = await jobs.takes.extend(taken.lease_id, 1000)
    assert later - taken.expires_at > timedelta(seconds=900)
    await sql("UPDATE headrace.host SET expires_at = now()")
    with pytest.raises(LeaseLost):
        await jobs.takes.extend(taken.lease_id, 10)
    await jobs.sweep()
    with pytest.raises(LeaseLost):
        await jobs.takes.ack(taken.lease_id, {job_id: TakenOutcome()})
    assert (await jobs.job(job_id)).state is JobState.READY


@pytest.mark.usefixtures("queues")
async def test_taken_jobs_of_lanes_keep_their_limits(jobs, broken_invariants):
    await jobs.lanes.set("q", "x", starts_max=2, window_s=60, concurrency=None)
    await fill(jobs, 5, lane="x")
    taken = await jobs.takes.take("q", 5)
    assert [job.lane for job in taken.jobs] == ["x", "x"]
    assert (await jobs.takes.take("q", 5)).jobs == []
    assert (await jobs.takes.take("q", 5)).jobs == []
    await jobs.takes.ack(taken.lease_id, {job.id: TakenOutcome() for job in taken.jobs})
    assert await broken_invariants() == []
    assert (await jobs.lanes.get("q", "x")).starts_live == 2


@pytest.mark.usefixtures("queues")
async def test_lanes_and_the_rest_take_turns(jobs):
    await fill(jobs, 2)
    await fill(jobs, 2, lane="x")
    lanes = [(await jobs.takes.take("q")).jobs[0].lane for _ in range(4)]
    assert sorted(lanes, key=str) == [None, None, "x", "x"]
    assert lanes[0] != lanes[1]


@pytest.mark.usefixtures("queues")
async def test_an_agents_lease_is_not_for_takers(jobs, postgres, config, queues):
    from lease_steps import claim_one, live_manager

    [job_id] = await fill(jobs)
    desk = await live_manager(postgres, config, [queues["q"].id])
    lease = await claim_one(desk, queues["q"].id)
    with pytest.raises(LeaseLost):
        await jobs.takes.ack(lease.lease_id, {job_id: TakenOutcome()})
    with pytest.raises(LeaseLost):
        await jobs.takes.extend(lease.lease_id)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("n", [0, -1, 1001, True, "3"])
async def test_a_number_of_jobs_that_is_none(jobs, n):
    with pytest.raises(InvalidTake):
        await jobs.takes.take("q", n)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("lease_s", [0, 0.5, 86_401, float("nan"), float("inf"), "1h", None])
async def test_a_lease_that_is_none(jobs, lease_s):
    with pytest.raises(InvalidTake):
        await jobs.takes.take("q", lease_s=lease_s)
    with pytest.raises(InvalidTake):
        await jobs.takes.extend(1, lease_s)


@pytest.mark.parametrize("queue", ["nope", "", "a\0b", "\ud800"])
async def test_an_unknown_queue(jobs, queue):
    with pytest.raises(QueueUnknown):
        await jobs.takes.take(queue)


@pytest.mark.parametrize("lease_id", [0, -1, 12345, 2**63, 2**80])
async def test_an_unknown_lease(jobs, lease_id):
    with pytest.raises(LeaseLost):
        await jobs.takes.ack(lease_id, {1: TakenOutcome()})
    with pytest.raises(LeaseLost):
        await jobs.takes.extend(lease_id)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize(
    "outcome",
    [
        TakenOutcome(outcome="finished"),
        TakenOutcome(outcome="snooze"),
        TakenOutcome(outcome="retry", after_s=-1),
        TakenOutcome(outcome="retry", after_s=float("nan")),
        TakenOutcome(outcome="retry", after_s=1e12),
        TakenOutcome(outcome="send_to"),
        TakenOutcome(outcome="done", queue="next"),
        TakenOutcome(outcome="done", result="x" * 70_000),
    ],
)
async def test_outcomes_that_mean_nothing_settle_nothing(jobs, outcome):
    ids = await fill(jobs, 2)
    taken = await jobs.takes.take("q", 2)
    with pytest.raises(InvalidTake):
        await jobs.takes.ack(taken.lease_id, {ids[0]: TakenOutcome(), ids[1]: outcome})
    assert [(await jobs.job(i)).state for i in ids] == [JobState.LEASED] * 2


@pytest.mark.usefixtures("queues")
async def test_jobs_of_others_and_unknown_queues(jobs):
    [job_id] = await fill(jobs)
    taken = await jobs.takes.take("q")
    with pytest.raises(InvalidTake, match="expected a job of this lease"):
        await jobs.takes.ack(taken.lease_id, {job_id: TakenOutcome(), 99: TakenOutcome()})
    with pytest.raises(QueueUnknown):
        await jobs.takes.ack(
            taken.lease_id, {job_id: TakenOutcome(outcome="send_to", queue="nowhere")}
        )
    assert (await jobs.job(job_id)).state is JobState.LEASED
