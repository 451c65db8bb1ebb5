"""What is kept: done jobs in partitions, results, progress, and statistics per minute."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from lease_steps import claim_one, settle, told
from tests.kit.queue_counts import add_counts
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob, store
from headrace.jobs.errors import InvalidFilter
from headrace.jobs.messages import Progress
from headrace.jobs.model import TakenOutcome
from headrace.jobs.outcomes import DONE, Outcome
from headrace.jobs.sql import SQL
from headrace.jobs.store.claim_cursor import PRIORITIES, ClaimCursor

DAY = timedelta(days=1)
OLD_PARTITION = (
    "CREATE TABLE headrace.job_done_2020010106 PARTITION OF headrace.job_done"
    " FOR VALUES FROM ('2020-01-01 06:00Z') TO ('2020-01-01 12:00Z')"
)


@pytest.fixture
async def keeping(queue_id, sql):
    """The id of queue `q`, which keeps done jobs for a day."""
    await sql("UPDATE headrace.queue SET keep_done_s = 86400 WHERE name = 'q'")
    return queue_id


async def partitions(sql):
    rows = await sql("""
        SELECT i.inhrelid::regclass::text AS name FROM pg_inherits i
        WHERE i.inhparent = 'headrace.job_done'::regclass ORDER BY 1""")
    return [row["name"].removeprefix("headrace.") for row in rows]


async def test_done_jobs_and_results_are_kept_as_the_queue_declares(
    jobs, manager, keeping, postgres, sql
):
    given = NewJob(queue="q", payload=[1], unique="k", version=2)
    [job_id, other] = await jobs.enqueue_many([given, NewJob(queue="q")])
    lease = await claim_one(manager, keeping)
    outcomes = {job_id: Outcome("done", result=b"1"), other: Outcome("fail")}
    assert await settle(manager, lease, outcomes)
    job = await jobs.job(job_id)
    assert (job.state, job.queue, job.payload) == ("done", "q", [1])
    assert (job.unique, job.result) == ("k", None)
    [kept] = await sql("SELECT drop_at - ended_at AS kept, version FROM headrace.job_done")
    assert (kept["kept"].total_seconds(), kept["version"]) == (86_400, 2)
    await sql("UPDATE headrace.queue SET keep_done_s = NULL, keep_result = true")
    ids = await jobs.enqueue_many([NewJob(queue="q") for _ in range(2)])
    lease = await claim_one(manager, keeping)
    manager.settle(told(lease, {ids[0]: Outcome("done", result=b"[7]")}))
    manager.settle(told(lease))
    await manager.flush()
    ids += await jobs.enqueue_many([NewJob(queue="q")])
    taken = await jobs.takes.take("q")
    await jobs.takes.ack(taken.lease_id, {ids[2]: TakenOutcome(result={"ok": True})})
    assert [(await jobs.job(job_id)).result for job_id in ids] == [[7], None, {"ok": True}]


async def test_partitions_are_created_ahead_and_dropped_whole(
    jobs, manager, queue_id, *, postgres, sql
):
    assert await postgres.value(SQL.maintain_done_partitions) == 0, "no queue keeps anything"
    assert await partitions(sql) == ["job_done_rest"]
    await sql("UPDATE headrace.queue SET keep_done_s = 86400 WHERE name = 'q'")
    created = await postgres.value(SQL.maintain_done_partitions)
    names = await partitions(sql)
    assert len(names) == created + 1
    assert 6 <= created <= 8
    assert await postgres.value(SQL.maintain_done_partitions) == 0
    await jobs.enqueue_many([NewJob(queue="q")])
    await settle(manager, await claim_one(manager, queue_id))
    [row] = await sql("SELECT tableoid::regclass::text AS name FROM headrace.job_done")
    assert row["name"].removeprefix("headrace.") in names
    await sql(OLD_PARTITION)
    async with postgres.transaction() as tx:
        await tx.connection.execute("LOCK TABLE headrace.job_done_2020010106 IN ACCESS SHARE MODE")
        assert await postgres.value(SQL.maintain_done_partitions) == 0, "a reader uses it"
    assert await postgres.value(SQL.maintain_done_partitions) == 1
    assert await partitions(sql) == names


async def test_jobs_that_ended_before_their_partition_existed_are_dropped_too(
    jobs, manager, keeping, postgres, sql
):
    ids = await jobs.enqueue_many([NewJob(queue="q") for _ in range(2)])
    await settle(manager, await claim_one(manager, keeping))
    assert (await sql("SELECT count(*) AS n FROM headrace.job_done_rest"))[0]["n"] == 2
    await sql(f"UPDATE headrace.job_done SET drop_at = now() WHERE id = {ids[0]}")
    await jobs.sweep()
    assert [(await jobs.job(job_id)).state for job_id in ids] == ["gone", "done"]
    assert len(await partitions(sql)) > 4


async def test_progress_is_stored_while_its_job_runs(jobs, manager, queue_id, postgres, sql):
    async def stored():
        rows = await sql("SELECT job_id FROM headrace.job_progress")
        return [row["job_id"] for row in rows]

    first, second = await jobs.enqueue_many([NewJob(queue="q") for _ in range(2)])
    lease = await claim_one(manager, queue_id)
    for ratio in (0.1, 0.5):
        manager.note_progress(Progress(first, ratio, "half"))
    manager.note_progress(Progress(second, 0.2, "\0"))

    async def progress_of(job_id):
        return (await jobs.job(job_id)).progress

    await wait_true(lambda: progress_of(second))
    found = await progress_of(first)
    assert (found.ratio, found.text) == (0.5, "half"), "the latest report counts"
    manager.settle(told(lease, {first: DONE}))
    await manager.flush()
    assert await stored() == [second]
    both = [(lease.lease_id, Progress(job_id, 0.5, "")) for job_id in (first, second)]
    await store.jobs.write_progress(postgres, both)
    assert await stored() == [second], "an ack overtook the report"
    async with postgres.transaction() as tx:
        await tx.connection.execute("SELECT FROM headrace.job_lease FOR UPDATE")
        async with asyncio.timeout(5):
            await store.jobs.write_progress(postgres, both)
    await settle(manager, lease)
    await store.jobs.write_progress(postgres, both)
    assert await stored() == [], "a report after the last ack is ignored"
    [third] = await jobs.enqueue_many([NewJob(queue="q")])
    lease = await claim_one(manager, queue_id)
    await store.jobs.write_progress(postgres, [(lease.lease_id, Progress(third, 0.5, ""))])
    await sql("UPDATE headrace.host SET expires_at = now() - interval '1 s'")
    await jobs.sweep()
    assert await stored() == [], "the host died"


async def test_minutes_of_a_span(jobs, postgres, queue_id, sql):
    await add_counts(postgres, queue_id, done=3, claimed=3, wait_s=1.5)
    await sql("UPDATE headrace.queue_minute SET minute = minute - interval '90 minutes'")
    await add_counts(postgres, queue_id, slot_s=60.0)
    assert await jobs.queues.minutes("q") == [], "idle slots have no line"
    await add_counts(postgres, queue_id, done=4, lost=1)
    assert [minute.done for minute in await jobs.queues.minutes("q")] == [4]
    now = datetime.now(UTC)
    found = await jobs.queues.minutes("q", from_at=now - DAY, to_at=now + timedelta(minutes=1))
    assert [(m.done, m.wait_s, m.lost) for m in found] == [(3, 1.5, 0), (4, 0.0, 1)]
    assert await jobs.queues.minutes("q", to_at=now - DAY) == []
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for from_at, to_at in (
        (start, datetime(2026, 1, 3, 0, 0, 1, tzinfo=UTC)),
        (start + DAY, start),
        (start, start),
        (datetime(2026, 1, 1), datetime(2026, 1, 1, 1)),  # noqa: DTZ001
        (None, datetime.min.replace(tzinfo=UTC)),
        (datetime.fromisoformat("0001-01-01T00:00:00+14:00"), None),
    ):
        with pytest.raises(InvalidFilter):
            await jobs.queues.minutes("q", from_at=from_at, to_at=to_at)
    await sql("UPDATE headrace.queue_minute SET minute = minute - interval '9 d' WHERE done = 3")
    assert (
        await postgres.value(
            SQL.drop_old, table="queue_minute", column="minute", kept_s=8 * 86400, rows_max=100
        )
        == 1
    )
    assert await store.fleet.recent_outcomes(postgres, minutes=10) == {queue_id: (4, 0)}


async def claims_of(runner, host_id, queue_id, *, done=()):
    claims = await store.leases.claim_ready(
        runner,
        host_id,
        queue_id,
        leases_max=5,
        batch=10,
        priorities=PRIORITIES,
        marks=ClaimCursor().marks,
        done=done,
    )
    return claims.leases


async def test_counts_are_exact_after_lost_answers_and_rollbacks(jobs, manager, queue_id, postgres):
    await jobs.enqueue_many([NewJob(queue="q") for _ in range(25)])
    host_id = manager.host_id

    async def claim_settle_and_fail():
        async with postgres.transaction() as tx:
            [lease, *_] = await claims_of(tx, host_id, queue_id)
            await store.leases.settle(tx, whole=[lease.lease_id], losses_max=3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await claim_settle_and_fail()
    leases = await claims_of(postgres, host_id, queue_id)
    assert [len(lease.ids) for lease in leases] == [10, 10, 5]
    first, second, third = (lease.lease_id for lease in leases)
    outcomes = {second: {job_id: Outcome("done") for job_id in leases[1].ids[:4]}}
    for _ in range(2):
        await store.leases.settle(postgres, jobs=outcomes, whole=[first], losses_max=3)
    await claims_of(postgres, host_id, queue_id, done=[first, second])
    await store.leases.expire_host(postgres, host_id)
    for _ in range(2):
        await jobs.sweep()
    names = ("done", "failed", "retried", "lost", "claimed")
    minutes = await jobs.queues.minutes("q")
    assert [sum(getattr(m, name) for m in minutes) for name in names] == [20, 0, 0, 5, 25]
    assert await postgres.value(SQL.return_lease, lease=third, losses_max=3) == 0


async def test_cancelled_jobs_are_counted_and_no_failures(jobs, manager, queue_id, postgres):
    ids = await jobs.enqueue_many([NewJob(queue="q") for _ in range(3)])
    [lease] = await claims_of(postgres, manager.host_id, queue_id)
    by_handler, in_killed_slot, fails = ids
    await jobs.cancel(in_killed_slot, running=True)
    outcomes = {by_handler: Outcome("cancel"), in_killed_slot: Outcome("returned")}
    outcomes[fails] = Outcome("fail")
    await store.leases.settle(postgres, jobs={lease.lease_id: outcomes}, whole=[], losses_max=3)
    await jobs.sweep()
    minutes = await jobs.queues.minutes("q")
    assert [sum(getattr(m, name) for m in minutes) for name in ("cancelled", "failed")] == [2, 1]
    outcomes_by_queue = await store.fleet.recent_outcomes(postgres, minutes=9)
    assert outcomes_by_queue == {queue_id: (0, 1)}, "the alert many_fail sees one failure"
    await postgres.run(SQL.sum_hours)
    assert [hour.cancelled for hour in await jobs.queues.hours("q")] == [2]
    readings = await store.fleet.record_backlog(postgres, count_max=100)
    totals = {one.queue: (one.cancelled, one.failed) for one in readings}
    assert totals["q"] == (2, 1)


async def test_waits_are_counted_by_the_claim_with_lanes_and_without(jobs, queue_id, sql):
    for lane in (None, "a"):
        await jobs.enqueue_many([NewJob(queue="q", lane=lane) for _ in range(3)])
    for table in ("job_ready", "lane_job"):
        await sql(f"UPDATE headrace.{table} SET run_at = run_at - id * interval '1 min'")
    taken = [await jobs.takes.take("q", 10) for _ in range(2)]
    assert [len(one.jobs) for one in taken] == [3, 3]
    await jobs.sweep()
    [minute] = await jobs.queues.minutes("q")
    assert minute.claimed == 6
    assert minute.wait_mean_s == pytest.approx(60 * 3.5, abs=10)
    assert minute.wait_max_s == pytest.approx(60 * 6, abs=10)


async def test_a_count_that_was_committed_late_is_added_within_a_minute(postgres, queue_id, sql):
    assert await postgres.value(SQL.fold_counts, rows_max=10) == 0
    await sql(
        "INSERT INTO headrace.job_count (at, queue, done)"
        f" VALUES (now() - interval '21 s', {queue_id}, 1)"
    )
    assert await postgres.value(SQL.fold_counts, rows_max=10) == 0
    await sql("UPDATE headrace.job_count_fold SET whole_at = whole_at - interval '1 min'")
    assert await postgres.value(SQL.fold_counts, rows_max=10) == 1
    assert await store.fleet.recent_outcomes(postgres, minutes=10) == {queue_id: (1, 0)}


async def test_old_events_results_and_keys_are_forgotten_however_many(jobs, sql):
    await sql(
        "INSERT INTO headrace.workflow_event (name, key, sent_at, payload)"
        " SELECT 'paid', n::text, now() - interval '60 d', '{}' FROM generate_series(1, 5001) n"
    )
    await sql(
        "INSERT INTO headrace.group_result (group_id, job_id, state, ended_at)"
        " SELECT 1, n, 'done', now() - interval '60 d' FROM generate_series(1, 1001) n"
    )
    await sql(
        "INSERT INTO headrace.job_unique (queue, key, job_id, kept_until, is_done)"
        " SELECT 1, n::text, n, now(), true FROM generate_series(1, 5001) n"
    )
    assert [(await jobs.sweep()).more for _ in range(2)] == [True, False]
    for table in ("workflow_event", "group_result", "job_unique"):
        assert await sql(f"SELECT FROM headrace.{table}") == []
