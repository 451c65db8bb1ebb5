"""Bad input at the door: the exact error, nothing enqueued, and the next good call works."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest

from penstock.jobs import NewJob
from penstock.jobs.errors import BatchTooLarge, InvalidJob, PayloadTooLarge, QueueUnknown
from penstock.kernel.errors import PenstockError

FAR = datetime.now(UTC) + timedelta(days=400)
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001
BEFORE_ALL = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
JOBS = {
    "queue": (QueueUnknown, {"queue": "nobody"}),
    "queue_nul": (QueueUnknown, {"queue": "a\0"}),
    "priority_low": (InvalidJob, {"priority": -1}),
    "priority_high": (InvalidJob, {"priority": 10}),
    "priority_text": (InvalidJob, {"priority": "5"}),
    "priority_bool": (InvalidJob, {"priority": True}),
    "at_far": (InvalidJob, {"at": FAR}),
    "at_naive": (InvalidJob, {"at": NAIVE}),
    "at_before_the_calendar": (InvalidJob, {"at": BEFORE_ALL}),
    "at_text": (InvalidJob, {"at": "noon"}),
    "at_and_after": (InvalidJob, {"at": datetime.now(UTC), "after_s": 1}),
    "after_negative": (InvalidJob, {"after_s": -1}),
    "after_nan": (InvalidJob, {"after_s": float("nan")}),
    "after_far": (InvalidJob, {"after_s": 4e7}),
    "lane_empty": (InvalidJob, {"lane": ""}),
    "lane_long": (InvalidJob, {"lane": "x" * 129}),
    "lane_nul": (InvalidJob, {"lane": "a\0b"}),
    "lane_surrogate": (InvalidJob, {"lane": "\ud800"}),
    "unique_long": (InvalidJob, {"unique": "x" * 129}),
    "unique_newline": (InvalidJob, {"unique": "a\n"}),
    "payload_object": (InvalidJob, {"payload": object()}),
    "payload_surrogate": (InvalidJob, {"payload": "\ud800"}),
    "payload_huge": (PayloadTooLarge, {"payload": "x" * 65_536}),
}


@pytest.fixture
def door(registry, jobs, sql):
    """A declared queue; ends by checking that a good job still goes in, alone."""

    @registry.task("q")
    async def handle(job: dict): ...

    async def check(call, error):
        with pytest.raises(error) as raised:
            await call()
        assert isinstance(raised.value, PenstockError)
        good = await handle.enqueue({})
        rows = await sql("SELECT id FROM penstock.job_ready UNION SELECT id FROM penstock.lane_job")
        assert [row["id"] for row in rows] == [good]
        return raised.value

    return check


@pytest.mark.parametrize("name", JOBS)
async def test_one_bad_job_stops_the_whole_call(door, jobs, name):
    error, fault = JOBS[name]
    bad = NewJob(**{"queue": "q", **fault})
    raised = await door(lambda: jobs.enqueue_many([NewJob(queue="q"), bad]), error)
    if error is InvalidJob and raised.problems:
        assert raised.problems[0].pointer.startswith("/1/")


async def test_every_fault_of_a_call_is_told(door, jobs):
    bad = [NewJob(queue="q", priority=11, lane="") for _ in range(70)]
    raised = await door(lambda: jobs.enqueue_many(bad), InvalidJob)
    assert len(raised.problems) == 100


async def test_too_many_jobs_and_bytes(door, jobs):
    many = [NewJob(queue="q")] * 10_001
    await door(lambda: jobs.enqueue_many(many), BatchTooLarge)


async def test_too_many_bytes(door, jobs):
    heavy = [NewJob(queue="q", payload="x" * 65_000)] * 260
    await door(lambda: jobs.enqueue_many(heavy), BatchTooLarge)


async def test_the_largest_call_passes(jobs, registry):
    @registry.task("q")
    async def handle(job: dict): ...

    ids = await jobs.enqueue_many([NewJob(queue="q", payload="x" * 1000)] * 10_000)
    assert ids == sorted(set(ids))
    assert len(ids) == 10_000
    assert await jobs.enqueue_many([]) == []


async def test_what_json_can_hold_comes_back(jobs, registry):
    @registry.task("q")
    async def handle(job: dict): ...

    payload = {"nul": "\0", "emoji": "\N{PILE OF POO}", "deep": [[[1.5, None, True]]], "": ""}
    job_id = await jobs.enqueue(
        NewJob(queue="q", payload=payload, lane="ж" * 128, unique="🦭" * 128)
    )
    job = await jobs.job(job_id)
    assert job.payload == payload
    assert json.dumps(job.payload) == json.dumps(payload)


@pytest.mark.parametrize("job_id", [0, -1, 2**62, 2**63, -(2**70)])
async def test_ids_never_given(jobs, job_id):
    for verb in (jobs.job, jobs.why, jobs.cancel, jobs.retry):
        with pytest.raises(PenstockError) as raised:
            await verb(job_id)
        assert raised.value.code == "jobs.job_unknown"


async def test_queues_never_declared(jobs):
    for verb in (jobs.queue, jobs.pause_queue, jobs.resume_queue):
        with pytest.raises(QueueUnknown):
            await verb("nobody")
        for name in ("\0", "\ud800"):
            with pytest.raises(QueueUnknown):
                await verb(name)
