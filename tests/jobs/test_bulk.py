"""Bulk retry, cancel and delete.

In bounded steps, with keys, groups and lanes as in the single verbs.
"""

from __future__ import annotations

import asyncio

import pytest
from lease_steps import claim_lane_jobs, claim_one, live_manager, settle

from headrace.jobs import JobState, NewGroup, NewJob
from headrace.jobs.errors import InvalidFilter, JobNotWaiting, QueueUnknown
from headrace.jobs.model import JobFilter
from headrace.jobs.outcomes import Outcome
from headrace.jobs.service import bulk

FAIL = Outcome("fail", None, "peer: 503")


@pytest.fixture
async def queue_id(jobs, registry):
    """The id of a queue `q`, beside another, `other`."""

    @registry.task("q", limiter="lim", lane="optional")
    async def handle(job: dict | None): ...

    registry.queue("other")
    return (await jobs.queues.declare())["q"].id


@pytest.fixture
async def desk(postgres, config, queue_id):
    """A desk of a living host."""
    return await live_manager(postgres, config, [queue_id])


async def fail_all(desk, queue_id, count):
    claim = await claim_one(desk, queue_id, count)
    assert len(claim.ids) == count
    await settle(desk, claim, FAIL)


async def states(jobs, ids):
    return [(await jobs.job(job_id)).state.value for job_id in ids]


async def test_a_dry_run_changes_nothing(jobs, queue_id):
    ids = await jobs.enqueue_many([NewJob(queue="q")] * 3 + [NewJob(queue="other")])
    done = await jobs.bulk("cancel", JobFilter(queue="q"), dry_run=True)
    assert (done.matched, done.changed, done.skipped, done.more) == (3, 0, 0, False)
    assert await states(jobs, ids) == ["ready"] * 4


async def test_failed_jobs_of_a_queue_are_retried(jobs, desk, queue_id):
    ids = await jobs.enqueue_many([NewJob(queue="q", payload=n, version=3) for n in range(5)])
    await fail_all(desk, queue_id, 5)
    late = await jobs.enqueue(NewJob(queue="q"))
    await jobs.cancel(late)
    done = await jobs.bulk("retry", JobFilter(queue="q", state="failed", q="503"))
    assert (done.matched, done.changed, done.more) == (5, 5, False)
    assert await states(jobs, ids) == ["ready"] * 5
    assert (await jobs.job(late)).state is JobState.CANCELLED
    claim = await claim_one(desk, queue_id)
    assert list(claim.ids) == ids
    assert (set(claim.attempts), set(claim.versions)) == ({0}, {3})


async def test_keys_taken_meanwhile_are_skipped_and_counted(jobs, desk, queue_id, sql):
    old = []
    for key in ("a", "b", "b"):
        old.append(await jobs.enqueue(NewJob(queue="q", unique=key)))
        await fail_all(desk, queue_id, 1)
    taken = await jobs.enqueue(NewJob(queue="q", unique="a"))
    done = await jobs.bulk("retry", JobFilter(queue="q", state="failed"))
    assert (done.matched, done.changed, done.skipped) == (3, 1, 2)
    # Of two with one key the newer one lives on.
    assert await states(jobs, [*old, taken]) == ["failed", "failed", "ready", "ready"]
    rows = await sql("SELECT key, job_id FROM headrace.job_unique ORDER BY key")
    assert [tuple(row) for row in rows] == [("a", taken), ("b", old[2])]
    await jobs.bulk("cancel", JobFilter(queue="q"))
    assert await sql("SELECT key FROM headrace.job_unique") == []


async def test_cancelling_jobs_of_lanes_keeps_the_books(
    jobs, desk, queue_id, sql, broken_invariants
):
    lanes = ("a", "b", "c")
    ids = await jobs.enqueue_many([NewJob(queue="q", lane=lane) for lane in lanes for _ in "1234"])
    later = await jobs.enqueue_many([NewJob(queue="q", lane="a", after_s=60)])
    await claim_lane_jobs(desk, queue_id, 2)
    done = await jobs.bulk("cancel", JobFilter(lane="a"))
    waiting = await jobs.find(lane="a", state="leased")
    assert done.changed == 5 - len(waiting.jobs)
    assert (await jobs.job(later[0])).state is JobState.CANCELLED
    await jobs.bulk("delete", JobFilter(lane="b", state="ready"))
    assert await broken_invariants() == []
    while (claim := await claim_lane_jobs(desk, queue_id)) is not None:
        await settle(desk, claim)
    assert await broken_invariants() == []
    left = await states(jobs, ids)
    assert "ready" not in left
    assert [lane.waiting for lane in await jobs.lanes.list("lim")] == [0, 0, 0]


@pytest.mark.parametrize("action", ["cancel", "delete"])
async def test_groups_count_what_was_taken_out(jobs, desk, queue_id, action):
    [group_id] = await jobs.enqueue_groups(
        [
            NewGroup(
                members=[NewJob(queue="q", lane=lane) for lane in (None, "a", None)],
                on_done=NewJob(queue="q", priority=0),
            )
        ]
    )
    await settle(desk, await claim_one(desk, queue_id, 1))
    done = await jobs.bulk(action, JobFilter(queue="q"))
    assert done.changed == 2
    claim = await claim_one(desk, queue_id)
    assert len(claim.ids) == 1
    counts = f'"id":{group_id},"done":1,"failed":0,"cancelled":2,"quarantined":0'
    assert counts.encode() in bytes(claim.payloads[0])


async def test_deleting_takes_every_state_but_leased(jobs, desk, queue_id, sql):
    leased = await jobs.enqueue(NewJob(queue="q"))
    await claim_one(desk, queue_id)
    failed = await jobs.enqueue_many([NewJob(queue="q")] * 2)
    await fail_all(desk, queue_id, 2)
    waiting = await jobs.enqueue_many(
        [NewJob(queue="q", unique="k"), NewJob(queue="q", after_s=60), NewJob(queue="q", lane="a")]
    )
    done = await jobs.bulk("delete", JobFilter(queue="q"))
    assert (done.matched, done.changed) == (5, 5)
    assert await states(jobs, failed + waiting) == ["gone"] * 5
    assert (await jobs.job(leased)).state is JobState.LEASED
    assert await sql("SELECT key FROM headrace.job_unique") == []


async def test_age_and_ids_choose(jobs, desk, queue_id, sql):
    ids = await jobs.enqueue_many([NewJob(queue="q")] * 4)
    await fail_all(desk, queue_id, 4)
    await sql(
        f"UPDATE headrace.job_failed SET ended_at = now() - interval '2 h' WHERE id < {ids[2]}"
    )
    old = JobFilter(queue="q", older_than_s=3600)
    assert (await jobs.bulk("delete", old, dry_run=True)).matched == 2
    chosen = JobFilter(ids=[ids[0], ids[3], 10**9])
    done = await jobs.bulk("retry", chosen)
    assert (done.matched, done.changed) == (2, 2)
    assert await states(jobs, ids) == ["ready", "failed", "failed", "ready"]
    # One that was given another life is due since now.
    assert (await jobs.bulk("delete", old)).changed == 1
    assert await states(jobs, ids) == ["ready", "gone", "failed", "ready"]


async def test_steps_are_bounded_and_go_on(jobs, queue_id, monkeypatch):
    monkeypatch.setattr(bulk, "JOBS_PER_STEP", 10)
    monkeypatch.setattr(bulk, "BULK_S", 0.0)
    await jobs.enqueue_many([NewJob(queue="q")] * 25)
    first = await jobs.bulk("cancel", JobFilter(queue="q"))
    assert (first.changed, first.more) == (10, True)
    newer = await jobs.enqueue(NewJob(queue="q"))
    second = await jobs.bulk("cancel", JobFilter(queue="q"), before=first.next_before)
    third = await jobs.bulk("cancel", JobFilter(queue="q"), before=second.next_before)
    assert (second.changed, third.changed, third.more) == (10, 5, False)
    assert (await jobs.job(newer)).state is JobState.READY


@pytest.mark.slow
async def test_many_at_once_and_workers_beside(jobs, desk, queue_id, broken_invariants):
    """Two cancel, one deletes, one claims and fails: each job ends once, nothing deadlocks."""
    lanes = (None, "a", "b", "c")
    jobs_given = [NewJob(queue="q", lane=lanes[n % 4], unique=str(n)) for n in range(3000)]
    ids = await jobs.enqueue_many(jobs_given)

    async def claim():
        count = 0
        for _ in range(30):
            one = await claim_one(desk, queue_id, 20) or await claim_lane_jobs(desk, queue_id, 20)
            if one is not None:
                count += len(one.ids)
                await settle(desk, one, FAIL)
        return count

    some = JobFilter(queue="q", state="ready")
    *steered, claimed = await asyncio.gather(
        jobs.bulk("cancel", some), jobs.bulk("cancel", some), jobs.bulk("delete", some), claim()
    )
    assert sum(done.changed for done in steered) + claimed == len(ids)
    assert await broken_invariants() == []
    kept = (await jobs.bulk("retry", JobFilter(queue="q"), dry_run=True)).matched
    assert kept == steered[0].changed + steered[1].changed + claimed
    status = await jobs.queues.get("q")
    assert (status.ready, status.leased) == (0, 0)


@pytest.mark.parametrize(
    ("action", "wanted", "pointer"),
    [
        ("erase", {"queue": "q"}, "/action"),
        ("cancel", {}, "/filter"),
        ("delete", {"q": "x"}, "/filter"),
        ("delete", {"older_than_s": 1}, "/filter"),
        ("cancel", {"state": "failed"}, "/state"),
        ("retry", {"state": "ready"}, "/state"),
        ("delete", {"state": "leased"}, "/state"),
        ("cancel", {"queue": "q", "q": "x"}, "/q"),
        ("retry", {"queue": "q", "older_than_s": -1}, "/older_than_s"),
        ("retry", {"queue": "q", "older_than_s": float("nan")}, "/older_than_s"),
        ("retry", {"ids": [0]}, "/ids"),
        ("retry", {"ids": [2**63]}, "/ids"),
        ("retry", {"ids": [1] * 10_001}, "/ids"),
    ],
)
async def test_what_means_nothing_does_nothing(jobs, queue_id, action, wanted, pointer):
    job_id = await jobs.enqueue(NewJob(queue="q"))
    with pytest.raises(InvalidFilter) as raised:
        await jobs.bulk(action, JobFilter(**wanted))
    assert raised.value.problems[0].pointer == pointer
    with pytest.raises(QueueUnknown):
        await jobs.bulk("cancel", JobFilter(queue="nobody"))
    assert (await jobs.job(job_id)).state is JobState.READY
    assert (await jobs.bulk("cancel", JobFilter(ids=[]))).matched == 0


async def test_a_job_is_removed_for_good(jobs, desk, queue_id):
    leased = await jobs.enqueue(NewJob(queue="q"))
    await claim_one(desk, queue_id)
    waiting = await jobs.enqueue(NewJob(queue="q", lane="a", unique="k"))
    await jobs.delete(waiting)
    assert (await jobs.job(waiting)).state is JobState.GONE
    assert await jobs.enqueue(NewJob(queue="q", unique="k")) != waiting
    for job_id, text in ((leased, "test runs it"), (waiting, "nothing is kept")):
        with pytest.raises(JobNotWaiting, match=text):
            await jobs.delete(job_id)
    with pytest.raises(JobNotWaiting, match="test runs it"):
        await jobs.cancel(leased)
