"""What is kept of done jobs, in partitions that go whole; and how far running jobs say they are."""

from __future__ import annotations

import asyncio

import pytest
from lease_steps import claim_one, live_manager, settle, told
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob, store
from headrace.jobs.messages import Progress
from headrace.jobs.model import TakenOutcome
from headrace.jobs.outcomes import DONE, Outcome


@pytest.fixture
async def queue_id(jobs, registry, sql):
    """The id of a queue `q` that keeps done jobs for a day."""
    registry.task("q")(_nothing)
    queue_id = (await jobs.queues.declare())["q"].id
    await sql("UPDATE headrace.queue SET keep_done_s = 86400")
    return queue_id


@pytest.fixture
async def desk(postgres, config, queue_id):
    """A desk of a living host."""
    return await live_manager(postgres, config, [queue_id])


async def _nothing(job: dict | None) -> None:
    """Never called."""


async def partitions(sql):
    rows = await sql("""
        SELECT i.inhrelid::regclass::text AS name FROM pg_inherits i
        WHERE i.inhparent = 'headrace.job_done'::regclass ORDER BY 1""")
    return [row["name"].removeprefix("headrace.") for row in rows]


async def test_done_jobs_are_kept(jobs, desk, queue_id, postgres, sql):
    [job_id] = await jobs.enqueue_many([NewJob(queue="q", payload=[1], unique="k", version=2)])
    lease = await claim_one(desk, queue_id)
    assert not lease.is_plain
    assert await settle(desk, lease)
    row = await store.jobs.find_done(postgres, job_id)
    assert (row["state"], row["queue"], row["payload"]) == ("done", "q", b"[1]")
    assert (row["unique_key"], row["version"], row["result"]) == ("k", 2, None)
    [kept] = await sql("SELECT drop_at - ended_at AS kept FROM headrace.job_done")
    assert kept["kept"].total_seconds() == 86_400
    assert await store.jobs.find_done(postgres, job_id + 1) is None


async def test_results_are_kept_where_the_queue_says_so(jobs, desk, queue_id, postgres, sql):
    ids = await jobs.enqueue_many([NewJob(queue="q") for _ in range(3)])
    lease = await claim_one(desk, queue_id)
    outcomes = [Outcome("done", result=b"1"), DONE, Outcome("fail")]
    assert await settle(desk, lease, dict(zip(ids, outcomes, strict=True)))
    assert (await store.jobs.find_done(postgres, ids[0]))["result"] is None
    await sql("UPDATE headrace.queue SET keep_done_s = NULL, keep_result = true")
    ids = await jobs.enqueue_many([NewJob(queue="q") for _ in range(2)])
    lease = await claim_one(desk, queue_id)
    desk.settle(told(lease, {ids[0]: Outcome("done", result=b"[7]")}))
    desk.settle(told(lease))
    await desk.flush()
    rows = [await store.jobs.find_done(postgres, job_id) for job_id in ids]
    assert [row["result"] for row in rows] == [b"[7]", None]


async def test_a_takers_result_is_kept(jobs, queue_id, postgres, sql):
    await sql("UPDATE headrace.queue SET keep_result = true")
    [job_id] = await jobs.enqueue_many([NewJob(queue="q")])
    taken = await jobs.takes.take("q")
    await jobs.takes.ack(taken.lease_id, {job_id: TakenOutcome(result={"ok": True})})
    assert (await store.jobs.find_done(postgres, job_id))["result"] == b'{"ok":true}'
    assert queue_id


async def test_partitions_are_made_ahead_and_dropped_whole(jobs, desk, queue_id, postgres, sql):
    made = await store.jobs.maintain_done_partitions(postgres)
    names = await partitions(sql)
    assert len(names) == made + 1
    assert 6 <= made <= 8
    assert await store.jobs.maintain_done_partitions(postgres) == 0
    await jobs.enqueue_many([NewJob(queue="q")])
    await settle(desk, await claim_one(desk, queue_id))
    [row] = await sql("SELECT tableoid::regclass::text AS name FROM headrace.job_done")
    assert row["name"].removeprefix("headrace.") in names
    old = "job_done_2020010106"
    await sql(
        f"CREATE TABLE headrace.{old} PARTITION OF headrace.job_done"
        " FOR VALUES FROM ('2020-01-01 06:00Z') TO ('2020-01-01 12:00Z')"
    )
    assert await store.jobs.maintain_done_partitions(postgres) == 1
    assert await partitions(sql) == names


async def test_a_partition_in_use_is_dropped_later(postgres, sql):
    old = "job_done_2020010106"
    await sql(
        f"CREATE TABLE headrace.{old} PARTITION OF headrace.job_done"
        " FOR VALUES FROM ('2020-01-01 06:00Z') TO ('2020-01-01 12:00Z')"
    )
    async with postgres.transaction() as tx:
        await tx.connection.execute(f"LOCK TABLE headrace.{old} IN ACCESS SHARE MODE")
        assert await store.jobs.maintain_done_partitions(postgres) == 0
    assert await store.jobs.maintain_done_partitions(postgres) == 1


async def test_what_came_before_its_partition_is_forgotten_too(jobs, desk, queue_id, postgres, sql):
    ids = await jobs.enqueue_many([NewJob(queue="q") for _ in range(2)])
    await settle(desk, await claim_one(desk, queue_id))
    assert (await sql("SELECT count(*) AS n FROM headrace.job_done_rest"))[0]["n"] == 2
    await sql(f"UPDATE headrace.job_done SET drop_at = now() WHERE id = {ids[0]}")
    await jobs.sweep()
    assert await store.jobs.find_done(postgres, ids[0]) is None
    assert await store.jobs.find_done(postgres, ids[1]) is not None
    assert len(await partitions(sql)) > 4


async def test_queues_that_keep_nothing_make_no_partitions(postgres, sql):
    assert await store.jobs.maintain_done_partitions(postgres) == 0
    assert await partitions(sql) == ["job_done_rest"]


async def test_progress_is_told_and_ends_with_the_job(jobs, desk, queue_id, postgres, sql):
    [job_id, other] = await jobs.enqueue_many([NewJob(queue="q") for _ in range(2)])
    lease = await claim_one(desk, queue_id)
    for ratio in (0.1, 0.5):
        desk.note_progress(Progress(job_id, ratio, "half"))
    desk.note_progress(Progress(other, 0.2, "\0"))
    await wait_true(lambda: store.jobs.find_progress(postgres, other))
    found = await store.jobs.find_progress(postgres, job_id)
    assert (found.ratio, found.text) == (0.5, "half")
    desk.settle(told(lease))
    await desk.flush()
    assert await store.jobs.find_progress(postgres, job_id) is None
    assert await sql("SELECT job_id FROM headrace.job_progress") == []


async def test_progress_that_comes_after_the_ack_leaves_nothing(
    jobs, desk, queue_id, postgres, sql
):
    [job_id] = await jobs.enqueue_many([NewJob(queue="q")])
    lease = await claim_one(desk, queue_id)
    await settle(desk, lease)
    # A statement that a frozen server runs after all, or one that another connection overtook.
    await store.jobs.write_progress(postgres, [(lease.lease_id, Progress(job_id, 0.5, "late"))])
    assert await sql("SELECT job_id FROM headrace.job_progress") == []


async def test_progress_that_an_ack_overtook_in_an_open_lease_leaves_nothing(
    jobs, desk, queue_id, postgres, sql
):
    [first, second] = await jobs.enqueue_many([NewJob(queue="q") for _ in range(2)])
    lease = await claim_one(desk, queue_id)
    desk.settle(told(lease, {first: DONE}))
    await desk.flush()
    both = [(lease.lease_id, Progress(job_id, 0.5, "")) for job_id in (first, second)]
    await store.jobs.write_progress(postgres, both)
    left = await sql("SELECT job_id FROM headrace.job_progress")
    assert [row["job_id"] for row in left] == [second]
    desk.note_progress(Progress(first, 0.6, "of a job that is settled"))
    desk.note_progress(Progress(second, 0.6, "told together with the other"))
    await wait_true(lambda: _is_told(postgres, second, 0.6))
    left = await sql("SELECT job_id FROM headrace.job_progress")
    assert [row["job_id"] for row in left] == [second]
    await settle(desk, lease)
    assert await sql("SELECT job_id FROM headrace.job_progress") == []


async def _is_told(postgres, job_id, ratio):
    found = await store.jobs.find_progress(postgres, job_id)
    return found is not None and round(found.ratio, 3) == ratio


async def test_progress_goes_with_its_lease_when_the_host_died(jobs, desk, queue_id, postgres, sql):
    [job_id] = await jobs.enqueue_many([NewJob(queue="q")])
    lease = await claim_one(desk, queue_id)
    await store.jobs.write_progress(postgres, [(lease.lease_id, Progress(job_id, 0.5, ""))])
    await sql("UPDATE headrace.host SET expires_at = now() - interval '1 s'")
    await jobs.sweep()
    assert await sql("SELECT job_id FROM headrace.job_progress") == []


async def test_progress_under_a_lock_of_its_lease_does_not_wait(
    jobs, desk, queue_id, postgres, sql
):
    [job_id] = await jobs.enqueue_many([NewJob(queue="q")])
    lease = await claim_one(desk, queue_id)
    async with postgres.transaction() as tx:
        await tx.connection.execute("SELECT FROM headrace.job_lease FOR UPDATE")
        async with asyncio.timeout(5):
            await store.jobs.write_progress(postgres, [(lease.lease_id, Progress(job_id, 0.5, ""))])
    assert await sql("SELECT job_id FROM headrace.job_progress") == []
