"""Minute statistics.

What is asked for is answered, over every way in, and old ones are forgotten.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from tests.kit.queue_counts import add_counts

from headrace.jobs import NewJob, QueueUnknown, store
from headrace.jobs.errors import InvalidSpan, LeaseLost
from headrace.jobs.model import TakenOutcome
from headrace.jobs.outcomes import Outcome
from headrace.jobs.store.leases import ClaimCursor

DAY = timedelta(days=1)


@pytest.fixture
async def mail(jobs, registry):
    """The id of a queue."""

    @registry.task("mail")
    async def mail(job: dict | None): ...

    return (await jobs.queues.declare())["mail"].id


async def test_minutes_of_a_span(jobs, postgres, mail, sql):
    await add_counts(postgres, mail, done=3, claimed=3, wait_s=1.5)
    await sql("UPDATE headrace.queue_minute SET minute = minute - interval '90 minutes'")
    await add_counts(postgres, mail, done=4)
    assert [minute.done for minute in await jobs.queues.minutes("mail")] == [4]
    now = datetime.now(UTC)
    found = await jobs.queues.minutes("mail", from_at=now - DAY, to_at=now + timedelta(minutes=1))
    assert [(minute.done, minute.wait_s) for minute in found] == [(3, 1.5), (4, 0.0)]
    assert await jobs.queues.minutes("mail", to_at=now - DAY) == []


async def test_minutes_of_idle_slots_are_left_out(jobs, postgres, mail):
    await add_counts(postgres, mail, slot_s=60.0)
    assert await jobs.queues.minutes("mail") == []
    await add_counts(postgres, mail, lost=1)
    assert [minute.lost for minute in await jobs.queues.minutes("mail")] == [1]


@pytest.mark.parametrize(
    ("from_at", "to_at"),
    [
        (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, 0, 0, 1, tzinfo=UTC)),
        (datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)),
        (datetime(2026, 1, 1), datetime(2026, 1, 1, 1)),  # noqa: DTZ001 - what must be refused
        (None, datetime.min.replace(tzinfo=UTC)),
        (datetime.fromisoformat("0001-01-01T00:00:00+14:00"), None),
    ],
)
async def test_spans_that_mean_nothing(jobs, mail, from_at, to_at):
    with pytest.raises(InvalidSpan):
        await jobs.queues.minutes("mail", from_at=from_at, to_at=to_at)


@pytest.mark.parametrize("queue", ["nobody", "\0", "x" * 1000])
async def test_of_a_queue_that_is_not_known(jobs, mail, queue):
    with pytest.raises(QueueUnknown):
        await jobs.queues.minutes(queue)


async def test_every_word_of_an_ack_is_counted_once(jobs, mail):
    await jobs.enqueue_many([NewJob(queue="mail") for _ in range(6)])
    taken = await jobs.takes.take("mail", 6)
    words = ("done", "fail", "cancel", "retry", "return")
    said = {
        job.id: TakenOutcome(outcome=word) for job, word in zip(taken.jobs, words, strict=False)
    }
    for _ in range(2):
        await jobs.takes.ack(taken.lease_id, said)
    await jobs.takes.ack(taken.lease_id, {}, rest=TakenOutcome(outcome="done"))
    with pytest.raises(LeaseLost):
        await jobs.takes.ack(taken.lease_id, {}, rest=TakenOutcome(outcome="done"))
    assert await _counted(jobs) == {"done": 2, "failed": 2, "retried": 1, "lost": 0, "claimed": 6}


async def test_a_settlement_whose_answer_was_lost_counts_once(jobs, postgres, mail, config):
    await jobs.enqueue_many([NewJob(queue="mail") for _ in range(25)])
    host_id = await store.leases.add_host(postgres, "a", [mail], 30)
    leases = await _claim(postgres, host_id, mail)
    assert [len(lease.ids) for lease in leases] == [10, 10, 5]
    first, second, third = (lease.lease_id for lease in leases)
    said = {second: {job_id: Outcome("done") for job_id in leases[1].ids[:4]}}
    for _ in range(2):
        await store.leases.settle(postgres, jobs=said, whole=[first], losses_max=3)
    await _claim(postgres, host_id, mail, done=[first, second])
    await store.leases.expire_host(postgres, host_id)
    for _ in range(2):
        await jobs.sweep()
    assert await _counted(jobs) == {"done": 20, "failed": 0, "retried": 0, "lost": 5, "claimed": 25}
    assert await store.leases.return_lease(postgres, third, 3) == 0


async def test_what_is_not_committed_is_not_counted(jobs, postgres, mail):
    await jobs.enqueue_many([NewJob(queue="mail")])
    host_id = await store.leases.add_host(postgres, "a", [mail], 30)

    async def claim_settle_and_fail():
        async with postgres.transaction() as tx:
            [lease] = await _claim(tx, host_id, mail)
            await store.leases.settle(tx, whole=[lease.lease_id], losses_max=3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await claim_settle_and_fail()
    assert await _counted(jobs) == {}


async def test_waits_are_counted_by_the_claim_with_lanes_and_without(jobs, registry, sql):
    @registry.task("calls", limiter="calls", lane="optional")
    async def call(job: dict | None): ...

    await jobs.queues.declare()
    for lane in (None, "a"):
        await jobs.enqueue_many([NewJob(queue="calls", lane=lane) for _ in range(3)])
    for table in ("job_ready", "lane_job"):
        await sql(f"UPDATE headrace.{table} SET run_at = run_at - id * interval '1 min'")
    taken = [await jobs.takes.take("calls", 10) for _ in range(2)]
    assert [len(one.jobs) for one in taken] == [3, 3]
    await jobs.sweep()
    [minute] = await jobs.queues.minutes("calls")
    assert minute.claimed == 6
    assert minute.wait_mean_s == pytest.approx(60 * 3.5, abs=10)
    assert minute.wait_max_s == pytest.approx(60 * 6, abs=10)


async def test_a_count_that_was_committed_late_is_added_within_a_minute(postgres, mail, sql):
    late = (
        "INSERT INTO headrace.job_count (at, queue, done)"
        f" VALUES (now() - interval '21 s', {mail}, 1)"
    )
    assert await store.fleet.fold_counts(postgres, rows_max=10) == 0
    await sql(late)
    assert await store.fleet.fold_counts(postgres, rows_max=10) == 0
    await sql("UPDATE headrace.job_count_fold SET whole_at = whole_at - interval '1 min'")
    assert await store.fleet.fold_counts(postgres, rows_max=10) == 1
    assert await store.fleet.recent_outcomes(postgres, minutes=10) == {mail: (1, 0)}


async def test_old_minutes_are_forgotten(postgres, mail, sql):
    await add_counts(postgres, mail, done=3)
    await sql("UPDATE headrace.queue_minute SET minute = minute - interval '9 d'")
    await add_counts(postgres, mail, done=4)
    assert await store.fleet.drop_minutes(postgres, kept_s=8 * 86400, rows_max=100) == 1
    assert await store.fleet.recent_outcomes(postgres, minutes=10) == {mail: (4, 0)}


async def _claim(runner, host_id, queue_id, *, done=()):
    claims = await store.leases.claim_ready(
        runner,
        host_id,
        queue_id,
        leases_max=5,
        batch=10,
        priorities=store.leases.PRIORITIES,
        marks=ClaimCursor().marks,
        done=done,
    )
    return claims.leases


async def _counted(jobs):
    """What was counted of the queue, after a sweep."""
    await jobs.sweep()
    fields = ("done", "failed", "retried", "lost", "claimed")
    minutes = await jobs.queues.minutes("mail")
    return {name: sum(getattr(m, name) for m in minutes) for name in fields} if minutes else {}
