"""A job enqueued with the caller's connection commits with the caller's rows, or never was."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy
from callers import ASYNC_CALLERS, BACK, BLOCKING_CALLERS, SAVE, use_django
from django.core.cache import cache
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, transaction
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from tests.kit.waiting import wait_true

from headrace.engines.caller_transaction import ConnectionUnknown, TransactionUnfit
from headrace.engines.postgres_errors import PostgresBusy
from headrace.jobs import JobNotEnded, JobNotWaiting, NewGroup, NewJob
from headrace.jobs.errors import InvalidJob, QueueUnknown
from headrace.jobs.handle import Bridge

LEFT = [
    "mine",
    *(
        f"headrace.{name}"
        for name in (
            "job_ready",
            "lane_job",
            "lane_event",
            "lane_queue",
            "lane",
            "job_unique",
            "job_group",
        )
    ),
]
WAITING = "SELECT id, payload, lane, unique_key FROM headrace.job_ready ORDER BY id"
HARD = "quote ' double \" back\\slash {brace},NULL %s %(x)s :name $1 \u2603 \U0001f600"


@pytest.fixture(scope="module")
async def database_url(running_engines):
    """A database for all tests here, with a table of the callers' own."""
    async with running_engines.database() as url:
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE mine (id int PRIMARY KEY)")
        await connection.close()
        yield url


@pytest.fixture(autouse=True)
async def _as_new(sql):
    """Delete the rows of the test before."""
    for name in LEFT:
        await sql(f"DELETE FROM {name}")


@pytest.fixture
def bridge(jobs, registry, postgres):
    """What `app.sync` is, for this test's service."""

    async def close():
        await jobs.close()
        await postgres.close()

    bridge = Bridge(None, close)
    registry.bind(lambda: jobs, sync=lambda: bridge)
    yield bridge
    bridge.close()


@pytest.fixture
def mail(registry, bridge):
    """A task."""

    @registry.task("mail")
    async def mail(to: str, text: str = "", group: dict | None = None):
        """Never run here."""

    return mail


@pytest.fixture(params=ASYNC_CALLERS)
async def caller(request, database_url):
    """An async caller in its transaction."""
    async with ASYNC_CALLERS[request.param](database_url) as caller:
        yield caller


async def test_a_commit_stores_whole_jobs_and_a_rollback_none(caller, mail, jobs, sql):
    await caller.run("INSERT INTO mine VALUES (1)")
    await mail.enqueue(to="ann", tx=caller.tx)
    await caller.run(SAVE)
    job_id = await mail.enqueue(to="ann", text=HARD, unique=HARD, tx=caller.tx)
    assert await mail.enqueue(to="bob", unique=HARD, tx=caller.tx) == job_id
    assert await sql(WAITING) == []
    await caller.run(BACK)
    soon_at = datetime.now(UTC) + timedelta(hours=1)
    kept = {}
    for count in (1, 3):
        for due in ({}, {"at": soon_at}, {"after_s": 3_600.5}):
            new = [
                NewJob(queue="mail", payload={"to": f"{HARD}{n}"}, priority=3, **due)
                for n in range(count)
            ]
            kept |= dict(zip(await jobs.enqueue_many(new, tx=caller.tx), new, strict=True))
    with pytest.raises(QueueUnknown):
        await jobs.enqueue(NewJob(queue="none"), tx=caller.tx)
    with pytest.raises(InvalidJob):
        await mail.enqueue(to="ann", priority=10, tx=caller.tx)
    await caller.run(SAVE)
    with pytest.raises(Exception, match=r"(?i)division by zero"):
        await caller.run("SELECT 1/0")
    with pytest.raises(TransactionUnfit, match="roll your transaction back"):
        await mail.enqueue(to="ann", tx=caller.tx)
    await caller.run(BACK)
    keyed = await mail.enqueue(to="bob", text=HARD, unique=HARD, tx=caller.tx)
    await caller.commit()
    rows = {row["id"]: row for row in await sql(WAITING)}
    assert len(rows) == 14
    assert (rows[keyed]["unique_key"], len(await sql("SELECT 1 FROM mine"))) == (HARD, 1)
    assert (await jobs.job(keyed)).payload == {"to": "bob", "text": HARD}
    for job_id, given in kept.items():
        job = await jobs.job(job_id)
        assert (job.payload, job.priority, job.unique) == (given.payload, 3, None)
        late_s = (job.run_at - soon_at).total_seconds()
        low, high = (0, 0) if given.at else (0, 600) if given.after_s else (-3_700, -3_000)
        assert low <= late_s <= high


async def test_a_rollback_leaves_no_job(caller, mail, sql):
    await caller.run("INSERT INTO mine VALUES (1)")
    await mail.enqueue(to="ann", tx=caller.tx)
    await caller.rollback()
    assert await sql("SELECT id FROM mine UNION ALL SELECT id FROM headrace.job_ready") == []


async def test_groups_lanes_and_changes_are_in_the_transaction(caller, jobs, mail, sql):
    waiting = await mail.enqueue(to="ann", unique="k", after_s=60)
    ended, gone = await mail.enqueue_many([{"to": "bob"}] * 2)
    await jobs.cancel(ended)
    group = NewGroup(
        members=[NewJob(queue="mail", payload={"to": "ann"})] * 3,
        on_done=NewJob(queue="mail", payload={"to": "all"}),
    )
    limits = {"starts_max": 1, "window_s": 60, "concurrency": None, "tx": caller.tx}
    await caller.run(SAVE)
    await jobs.enqueue_groups([group], tx=caller.tx)
    await jobs.lanes.set("mail", "bob", **limits)
    await jobs.cancel(waiting, tx=caller.tx)
    await caller.run(BACK)
    ids = await jobs.enqueue_groups([group, group], tx=caller.tx)
    await jobs.lanes.set("mail", "ann", **limits)
    await waiting.cancel(tx=caller.tx)
    moved = await mail.enqueue(to="ann", unique="k", tx=caller.tx)
    await jobs.retry(ended, tx=caller.tx)
    await jobs.delete(gone, tx=caller.tx)
    for verb in (jobs.cancel, jobs.delete):
        with pytest.raises(JobNotWaiting):
            await verb(gone, tx=caller.tx)
    with pytest.raises(JobNotEnded):
        await jobs.retry(moved, tx=caller.tx)
    assert {row["id"] for row in await sql(WAITING)} == {waiting, gone}
    await caller.commit()
    assert [row["id"] for row in await sql("SELECT id FROM headrace.job_group ORDER BY id")] == ids
    assert [row["name"] for row in await sql("SELECT name FROM headrace.lane")] == ["ann"]
    found = {row["id"] for row in await sql(WAITING)}
    assert found >= {moved, ended}
    assert len(found) == 8
    assert (await waiting.job()).state == "cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asyncpg", "psycopg raw", "sqlalchemy psycopg"])
async def test_ten_thousand_jobs_with_every_option(*, name, database_url, jobs, mail, sql):
    soon = datetime.now(UTC) + timedelta(hours=1)
    new = [
        NewJob(
            queue="mail",
            payload={"to": f"user {number}"},
            at=soon if number % 3 == 0 else None,
            after_s=(60 if number % 2 else 0.5) if number % 3 == 1 else None,
            priority=number % 10,
            lane=f'lane "{number % 7}"' if number % 2 else None,
            unique=f"key {number}" if number % 5 == 0 else None,
        )
        for number in range(10_000)
    ]
    async with ASYNC_CALLERS[name](database_url) as caller:
        ids = await jobs.enqueue_many(new, tx=caller.tx)
        assert len(set(ids)) == 10_000
        await caller.commit()
    assert await count_waiting(sql) == 10_000
    job = await jobs.job(ids[9])
    assert (job.run_at, job.lane, job.priority) == (soon, 'lane "2"', 9)


async def count_waiting(sql):
    rows = await sql(
        "SELECT count(*) AS n FROM headrace.job_ready UNION ALL"
        " SELECT count(*) FROM headrace.lane_job"
    )
    return sum(row["n"] for row in rows)


@pytest.mark.parametrize("name", BLOCKING_CALLERS)
async def test_sync_code_commits_and_rolls_back_alike(
    *, name, database_url, mail, bridge, jobs, sql
):
    def work():
        with BLOCKING_CALLERS[name](database_url) as caller:
            caller.run("INSERT INTO mine VALUES (1)")
            mail.sync.enqueue(to="never", tx=caller.tx)
            caller.rollback()
            with pytest.raises(Exception, match=r"(?i)division by zero"):
                caller.run("SELECT 1/0")
            with pytest.raises(TransactionUnfit, match="roll your transaction back"):
                mail.sync.enqueue(to="ann", tx=caller.tx)
            caller.rollback()
            caller.run("INSERT INTO mine VALUES (2)")
            job_id = mail.sync.enqueue(to="ann", text=HARD, unique=HARD, tx=caller.tx)
            caller.run(SAVE)
            mail.sync.enqueue(to="bob", tx=caller.tx)
            caller.run(BACK)
            with pytest.raises(QueueUnknown):
                bridge(jobs.enqueue)(NewJob(queue="none"), tx=caller.tx)
            caller.commit()
            return job_id

    job_id = await asyncio.to_thread(work)
    assert [row["id"] for row in await sql(WAITING)] == [job_id]
    assert (await jobs.job(job_id)).payload == {"to": "ann", "text": HARD}
    assert [row["id"] for row in await sql("SELECT id FROM mine")] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["psycopg", "psycopg2"])
async def test_sync_code_enqueues_thousands_and_groups(
    *, name, database_url, mail, bridge, jobs, sql
):
    new = [
        NewJob(queue="mail", payload={"to": "a\\0"}, lane="l" if n % 2 else None)
        for n in range(10_000)
    ]
    group = NewGroup(members=new[:6_000], on_done=NewJob(queue="mail", payload={"to": "all"}))

    def work():
        with BLOCKING_CALLERS[name](database_url) as caller:
            assert len(bridge(jobs.enqueue_many)(new, tx=caller.tx)) == 10_000
            bridge(jobs.enqueue_groups)([group], tx=caller.tx)
            caller.commit()

    await asyncio.to_thread(work)
    assert await count_waiting(sql) == 16_000


async def test_the_notification_is_sent_at_commit(database_url, mail):
    received = []
    listening = await asyncpg.connect(database_url)
    await listening.add_listener("headrace_jobs", lambda *message: received.append(message[3]))
    writing = await asyncpg.connect(database_url)
    async with writing.transaction():
        await mail.enqueue(to="ann", tx=writing)
        await listening.execute("SELECT 1")
        assert received == []
    await wait_true(lambda: received)
    await listening.close()
    await writing.close()


async def test_autocommit_is_refused(database_url, mail, sql):
    plain = await asyncpg.connect(database_url)
    with pytest.raises(TransactionUnfit, match=r"async with c\.transaction"):
        await mail.enqueue(to="ann", tx=plain)
    await plain.close()
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as c:
        with pytest.raises(TransactionUnfit, match="autocommit"):
            await mail.enqueue(to="ann", tx=c)
        async with c.transaction():
            await mail.enqueue(to="in its block", tx=c)
    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: asyncpg.connect(database_url),
        isolation_level="AUTOCOMMIT",
        poolclass=NullPool,
    )
    async with engine.connect() as c:
        with pytest.raises(TransactionUnfit, match="AUTOCOMMIT"):
            await mail.enqueue(to="ann", tx=c)
    assert len(await sql(WAITING)) == 1


async def test_blocking_autocommit_is_refused(database_url, mail, sql):
    def work():
        with psycopg.connect(database_url, autocommit=True) as c:
            with pytest.raises(TransactionUnfit, match="autocommit"):
                mail.sync.enqueue(to="ann", tx=c)
            with c.transaction():
                mail.sync.enqueue(to="in its block", tx=c)
        engine = sqlalchemy.create_engine(
            "postgresql+psycopg2://",
            creator=lambda: psycopg2.connect(database_url),
            isolation_level="AUTOCOMMIT",
        )
        with engine.connect() as c, pytest.raises(TransactionUnfit, match="AUTOCOMMIT"):
            mail.sync.enqueue(to="ann", tx=c)
        engine.dispose()
        lite = sqlalchemy.create_engine("sqlite://")
        with lite.connect() as c, pytest.raises(ConnectionUnknown, match="over sqlite"):
            mail.sync.enqueue(to="ann", tx=c)

    await asyncio.to_thread(work)
    assert len(await sql(WAITING)) == 1


async def test_a_blocking_connection_works_in_async_code(database_url, mail, sql):
    with psycopg.connect(database_url) as connection:
        await mail.enqueue(to="ann", tx=connection)
        connection.rollback()
        await mail.enqueue(to="bob", tx=connection)
    assert len(await sql(WAITING)) == 1


async def test_a_transaction_that_is_over_is_refused(database_url, mail, postgres):
    connection = await asyncpg.connect(database_url)
    async with connection.transaction():
        await mail.enqueue(to="ann", tx=connection)
    with pytest.raises(TransactionUnfit):
        await mail.enqueue(to="bob", tx=connection)
    await connection.close()


async def test_other_values_than_connections_are_refused(mail, sql):
    for tx in (1, object(), b"", asyncio, False):
        with pytest.raises(ConnectionUnknown, match="tx is a"):
            await mail.enqueue(to="ann", tx=tx)
    assert await sql(WAITING) == []


async def test_django_in_autocommit_or_on_another_database_is_refused(database_url, mail, sql):
    def work():
        use_django(database_url)
        for tx in (connection, "default"):
            with pytest.raises(TransactionUnfit, match=r"transaction\.atomic"):
                mail.sync.enqueue(to="ann", tx=tx)
        with transaction.atomic():
            mail.sync.enqueue(to="ann", tx=connections["default"])
        for tx in (connections["other"], "other"):
            with pytest.raises(ConnectionUnknown, match="leads to 'sqlite'"):
                mail.sync.enqueue(to="ann", tx=tx)
        with pytest.raises(ConnectionUnknown, match="default, other"):
            mail.sync.enqueue(to="ann", tx="none")
        with pytest.raises(ConnectionUnknown, match="ENGINE"):
            mail.sync.enqueue(to="ann", tx=cache)
        connection.close()

    await asyncio.to_thread(work)
    assert len(await sql(WAITING)) == 1
    with pytest.raises(SynchronousOnlyOperation):
        await mail.enqueue(to="in a thread that runs a loop", tx=connection)


async def test_our_own_transaction_and_not_the_pool(mail, postgres, sql):
    async with postgres.transaction() as tx:
        await mail.enqueue(to="ann", tx=tx)
        assert await sql(WAITING) == []
    assert len(await sql(WAITING)) == 1
    with pytest.raises(ConnectionUnknown, match="inside its transaction"):
        await mail.enqueue(to="ann", tx=postgres)


async def test_a_wait_that_the_caller_bounded_ends_as_busy(database_url, mail, sql):
    one = await asyncpg.connect(database_url)
    two = await psycopg.AsyncConnection.connect(database_url)
    async with one.transaction():
        await mail.enqueue(to="ann", unique="k", tx=one)
        await two.execute("SET LOCAL lock_timeout = '50ms'")
        with pytest.raises(PostgresBusy, match="roll your transaction back"):
            await mail.enqueue(to="bob", unique="k", tx=two)
    await two.close()
    await one.close()
    assert len(await sql(WAITING)) == 1
