"""Minute statistics: what is asked for is answered, over every way in, and old ones are forgotten."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock.jobs import QueueUnknown, store
from penstock.jobs.errors import InvalidSpan
from penstock.jobs.fleet.facts import QueueCounts

DAY = timedelta(days=1)


@pytest.fixture
async def mail(jobs, registry):
    """The id of a queue."""

    @registry.task("mail")
    async def mail(job: dict | None): ...

    return (await jobs.declare_queues())["mail"].id


async def test_minutes_of_a_span(jobs, postgres, mail, sql):
    await store.fleet.add_counts(
        postgres, 0, [QueueCounts(queue_id=mail, done=3, claimed=3, wait_s=1.5)]
    )
    await sql("UPDATE penstock.queue_minute SET minute = minute - interval '90 minutes'")
    await store.fleet.add_counts(postgres, 0, [QueueCounts(queue_id=mail, done=4)])
    assert [minute.done for minute in await jobs.minutes("mail")] == [4]
    now = datetime.now(UTC)
    found = await jobs.minutes("mail", from_at=now - DAY, to_at=now + timedelta(minutes=1))
    assert [(minute.done, minute.wait_s) for minute in found] == [(3, 1.5), (4, 0.0)]
    assert await jobs.minutes("mail", to_at=now - DAY) == []


async def test_minutes_of_idle_slots_are_left_out(jobs, postgres, mail):
    await store.fleet.add_counts(postgres, 0, [QueueCounts(queue_id=mail, slot_s=60.0)])
    assert await jobs.minutes("mail") == []
    await store.fleet.add_counts(postgres, 0, [QueueCounts(queue_id=mail, lost=1)])
    assert [minute.lost for minute in await jobs.minutes("mail")] == [1]


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
        await jobs.minutes("mail", from_at=from_at, to_at=to_at)


@pytest.mark.parametrize("queue", ["nobody", "\0", "x" * 1000])
async def test_of_a_queue_that_is_not_known(jobs, mail, queue):
    with pytest.raises(QueueUnknown):
        await jobs.minutes(queue)


async def test_old_minutes_are_forgotten(postgres, mail, sql):
    await store.fleet.add_counts(postgres, 0, [QueueCounts(queue_id=mail, done=3)])
    await sql("UPDATE penstock.queue_minute SET minute = minute - interval '9 d'")
    await store.fleet.add_counts(postgres, 0, [QueueCounts(queue_id=mail, done=4)])
    assert await store.minutes.drop_minutes(postgres, kept_s=8 * 86400, rows_max=100) == 1
    assert await store.minutes.recent_outcomes(postgres, minutes=10) == {mail: (4, 0)}
