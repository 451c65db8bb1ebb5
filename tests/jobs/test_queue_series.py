"""Series of queues: the backlog by minute and hour, and the metrics of the leading scheduler."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from tests.kit.queue_counts import add_counts

from headrace.jobs import NewJob, store
from headrace.jobs.errors import InvalidFilter, QueueUnknown
from headrace.jobs.fleet.queue_metrics import QUEUES_MAX, QueueMetrics
from headrace.jobs.fleet.scheduler import Scheduler
from headrace.jobs.fleet.state import QueueReading
from headrace.jobs.model import JobsConfig
from headrace.jobs.service.queues import HOURS_SPAN_MAX
from headrace.jobs.sql import SQL
from headrace.kernel.metrics import REGISTRY


def reading(queue, **fields):
    """A reading of an idle queue, with some fields changed."""
    zeros = dict.fromkeys(QueueReading.__struct_fields__, 0)
    return QueueReading(**zeros | {"queue": queue} | fields)


def sample(name, **labels):
    """The value of a series of this process; None: it does not exist."""
    return REGISTRY.get_sample_value(name, labels)


@pytest.fixture
async def queue_ids(jobs, registry):
    """Queues `mail` and `photos`."""

    async def work(job: dict | None): ...

    for name in ("mail", "photos"):
        registry.task(name)(work)
    return {name: row.id for name, row in (await jobs.queues.declare()).items()}


async def test_the_backlog_is_recorded_with_the_counts_of_its_minute(
    jobs, postgres, queue_ids, sql
):
    await jobs.enqueue_many([NewJob(queue="mail") for _ in range(3)])
    await jobs.enqueue(NewJob(queue="mail", after_s=3600))
    await add_counts(postgres, queue_ids["mail"], done=5)
    found = {row.queue: row for row in await store.fleet.record_backlog(postgres, count_max=100)}
    assert (found["mail"].ready, found["mail"].scheduled, found["photos"].ready) == (3, 1, 0)
    minutes = await jobs.queues.minutes("mail")
    last = minutes[-1]
    assert sum(minute.done for minute in minutes) == 5, "one minute, or two if it just ended"
    assert (last.ready, last.scheduled, last.running, last.oldest_s >= 0) == (3, 1, 0, True)
    assert await jobs.queues.minutes("photos") == [], "no row for a queue without jobs"
    await sql("DELETE FROM headrace.job_ready")
    await store.fleet.record_backlog(postgres, count_max=100)
    assert (await jobs.queues.minutes("mail"))[-1].ready == 0, "the last count of the minute"


async def test_minutes_are_summed_to_hours_and_kept_longer(jobs, postgres, queue_ids, sql):
    now = datetime.now(UTC)
    hour = now.replace(minute=0, second=0, microsecond=0)
    for ago, done, ready in ((timedelta(days=2), 1, 7), (timedelta(days=2, minutes=1), 2, 9)):
        at = hour - ago + timedelta(minutes=30)
        await sql(
            "INSERT INTO headrace.queue_minute (queue, minute, done, failed, retried, lost, calls,"
            " run_s, wait_s, wait_max_s, slot_s, ready, scheduled, running, failed_kept, oldest_s)"
            f" VALUES ({queue_ids['mail']}, '{at.isoformat()}', {done}, 0, 0, 0, 0, 1.5, 0, 0, 0,"
            f" {ready}, 0, 0, 0, {ready})"
        )
    for _ in range(2):
        await postgres.run(SQL.sum_hours)
        [one] = await jobs.queues.hours("mail")
        assert (one.hour, one.done, one.run_s) == (hour - timedelta(days=2), 3, 3.0)
        assert (one.ready, one.oldest_s) == (9, 9.0), "the highest"
    await add_counts(postgres, queue_ids["mail"], done=4)
    await postgres.run(SQL.sum_hours)
    assert [one.done for one in await jobs.queues.hours("mail")] == [3, 4]
    await add_counts(postgres, queue_ids["mail"], done=1)
    assert (
        await postgres.value(
            SQL.drop_old, table="queue_minute", column="minute", kept_s=86_400, rows_max=100
        )
        == 2
    )
    await postgres.run(SQL.sum_hours)
    assert [one.done for one in await jobs.queues.hours("mail")] == [3, 5]
    assert (
        await postgres.value(
            SQL.drop_old, table="queue_hour", column="hour", kept_s=86_400, rows_max=100
        )
        == 1
    )
    assert [one.done for one in await jobs.queues.hours("mail")] == [5]
    assert await jobs.queues.hours("mail", from_at=now - timedelta(days=90), to_at=now)
    assert await jobs.queues.hours("mail", from_at=datetime.now(UTC) - timedelta(days=90))
    with pytest.raises(InvalidFilter, match="at most 90 days"):
        await jobs.queues.hours("mail", from_at=datetime.now(UTC) - timedelta(days=91))
    with pytest.raises(InvalidFilter, match="at most 90 days"):
        await jobs.queues.hours("mail", from_at=now - timedelta(days=91), to_at=now)
    with pytest.raises(QueueUnknown):
        await jobs.queues.hours("nobody")


def test_one_call_reads_as_many_hours_as_are_kept():
    assert timedelta(seconds=JobsConfig().hours_kept_s) == HOURS_SPAN_MAX


async def test_only_the_leader_exports_the_series_of_queues(jobs, postgres, queue_ids):
    await jobs.enqueue(NewJob(queue="mail"))
    first = Scheduler(postgres, jobs, name="first")
    second = Scheduler(postgres, jobs, name="second")
    await first.planner.run_once()
    await second.planner.run_once()
    await first.record_backlog()
    assert sample("jobs_queue_jobs", queue="mail", state="ready") == 1
    await add_counts(postgres, queue_ids["mail"], done=2)
    before = sample("jobs_queue_settled_total", queue="mail", outcome="done") or 0
    await first.record_backlog()
    assert sample("jobs_queue_settled_total", queue="mail", outcome="done") - before == 2
    await first.planner.stop_leading()
    await first.record_backlog()
    assert sample("jobs_queue_jobs", queue="mail", state="ready") is None


def test_series_of_many_queues_are_bounded():
    metrics = QueueMetrics()
    names = [f"bounded{number:04}" for number in range(QUEUES_MAX + 2)]
    metrics.show([reading(name, ready=2, oldest_s=number) for number, name in enumerate(names)])
    assert sample("jobs_queue_jobs", queue=names[0], state="ready") == 2
    assert sample("jobs_queue_jobs", queue="other", state="ready") == 4
    assert sample("jobs_queue_jobs", queue=names[-1], state="ready") is None
    assert sample("jobs_queue_oldest_seconds", queue="other") == QUEUES_MAX + 1
    metrics.show([])
    assert sample("jobs_queue_jobs", queue=names[0], state="ready") is None
    metrics.clear()


async def test_the_busiest_queues_have_steps_of_their_own(jobs, queue_ids, postgres, sql):
    now_at = datetime.now(UTC).replace(second=0, microsecond=0)
    for minutes, queue, done in ((4, "mail", 4), (3, "mail", 3), (2, "photos", 1)):
        await add_counts(postgres, queue_ids[queue], done=done)
        await sql(
            f"UPDATE headrace.queue_minute SET minute = minute - interval '{minutes} min'"
            " WHERE minute > now() - interval '61 s'"
        )
    span = {"from_at": now_at - timedelta(minutes=10), "to_at": now_at + timedelta(minutes=1)}
    found = await jobs.fleet.history(**span, queues_max=1)
    assert [(one.queue, one.done) for one in found] == [("mail", 4), ("mail", 3), ("", 1)]
    [whole] = [
        one.done for one in await jobs.fleet.history(**span, step_s=1200) if one.queue == "mail"
    ][-1:]
    assert whole in (3, 4, 7)
    await sql("UPDATE headrace.queue_minute SET ready = 9 WHERE done = 1")
    named = {one.queue for one in await jobs.fleet.history(**span, queues_max=1)}
    assert named == {"mail", "photos"}, "the queue with most waiting jobs is named too"
    day = timedelta(days=1)
    for step_s, length in ((10, timedelta(minutes=5)), (60, day), (60, -day)):
        with pytest.raises(InvalidFilter, match="steps"):
            await jobs.fleet.history(from_at=now_at - length, to_at=now_at, step_s=step_s)
