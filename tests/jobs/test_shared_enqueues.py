"""Single jobs that are enqueued at the same time share a statement, and nothing else."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from tests.kit.waiting import wait_true

from headrace.engines.postgres_errors import ConstraintViolated
from headrace.jobs import NewJob
from headrace.jobs.errors import InvalidJob, PayloadTooLarge, QueueUnknown

STORED = "SELECT id, convert_from(payload, 'UTF8')::int AS n, headers FROM headrace.job_ready"


def job(number, **options):
    return NewJob(queue="q", payload=number, **options)


async def stored(sql):
    return {row["n"]: row["id"] for row in await sql(STORED)}


@pytest.fixture
async def _q(jobs):
    await jobs.queues.create("q")


@pytest.mark.usefixtures("_q")
async def test_bad_jobs_among_two_hundred_fail_alone(jobs, sql):
    await sql("ALTER TABLE headrace.job_ready ADD CONSTRAINT full_up CHECK (payload <> '13')")
    bad = {
        7: (NewJob(queue="none"), QueueUnknown),
        13: (job(13), ConstraintViolated),
        50: (job("x" * 70_000), PayloadTooLarge),
        99: (job(99, priority=10), InvalidJob),
    }
    given = [bad[n][0] if n in bad else job(n, lane="a" if n % 5 else None) for n in range(200)]
    # Let the queue and the connection be known, so that all of them meet.
    await jobs.enqueue(job(-1))
    answers = await asyncio.gather(*map(jobs.enqueue, given), return_exceptions=True)
    for number, (_, kind) in bad.items():
        assert isinstance(answers[number], kind)
    rows = await sql(f"{STORED} UNION ALL {STORED.replace('job_ready', 'lane_job')}")
    found = {row["n"]: row["id"] for row in rows if row["n"] >= 0}
    assert found == {n: answers[n] for n in range(200) if n not in bad}
    assert len({row["headers"] for row in rows}) == len(rows)
    waiting = await sql("SELECT sum(k) AS k FROM headrace.lane_event")
    assert waiting[0]["k"] == sum(1 for n in found if n % 5)


@pytest.mark.usefixtures("_q")
async def test_a_caller_that_leaves_takes_nobody_with_it(jobs, sql, database_url):
    await jobs.enqueue(job(-1))
    other = await asyncpg.connect(database_url)
    async with other.transaction():
        await other.execute("LOCK TABLE headrace.job_ready IN SHARE MODE")
        first = [asyncio.create_task(jobs.enqueue(job(0)))]
        blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await wait_true(lambda: _is_one(other, blocked), what="the first statement waits")
        then = [asyncio.create_task(jobs.enqueue(job(n))) for n in range(1, 6)]
        await asyncio.sleep(0)
        # One whose statement is under way, and one that waits for its end.
        for leaving in (first[0], then[3]):
            leaving.cancel()
        await asyncio.wait([first[0], then[3]])
    ids = await asyncio.gather(*first, *then, return_exceptions=True)
    await other.close()
    found = await stored(sql)
    assert [n for n in range(6) if isinstance(ids[n], asyncio.CancelledError)] == [0, 4]
    assert found.keys() - {-1, 0} == {1, 2, 3, 5}
    assert all(found[n] == ids[n] for n in (1, 2, 3, 5))


async def _is_one(connection, query):
    return await connection.fetchval(query) == 1


@pytest.mark.usefixtures("_q")
async def test_a_key_held_by_an_open_transaction_delays_nobody_else(jobs, database_url):
    other = await asyncpg.connect(database_url)
    async with other.transaction():
        holder = await jobs.enqueue(job(1, unique="k"), tx=other)
        waits = asyncio.create_task(jobs.enqueue(job(2, unique="k")))
        blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await wait_true(lambda: _is_one(other, blocked), what="the key is awaited")
        assert len(set(await asyncio.gather(*[jobs.enqueue(job(n)) for n in range(20)]))) == 20
        assert not waits.done()
    assert await waits == holder
    await other.close()
