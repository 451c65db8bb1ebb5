"""PostgreSQL through a pool: transactions, errors, time limits, lost servers."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.chaos import BLACK_HOLE, ONE_WAY, PASS, RESET, ChaosProxy
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.engines import postgres_pool
from headrace.engines.migrate import UrlsDiffer, require_sessions
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import (
    ConstraintViolated,
    PostgresBusy,
    PostgresDown,
    PostgresFull,
    PostgresRefused,
)
from headrace.engines.sql import compile_query

DATABASE = "datname = current_database() AND pid <> pg_backend_pid()"


def query(name, text):
    return compile_query(name, f"-- A statement of a test.\n{text}")


MAKE = query("make", "CREATE TABLE note (id int PRIMARY KEY, body text)")
ADD = query("add", "INSERT INTO note (id, body) VALUES (:id, :body)")
COUNT = query("count", "SELECT count(*) FROM note")
ONE = query("one", "SELECT 1")
SLEEP = query("sleep", "SELECT pg_sleep(30)")
NAP = query("nap", "SELECT pg_backend_pid() FROM pg_sleep(0.05)")
LONG_NAP = query("long_nap", "SELECT 8 FROM pg_sleep(8)")
LOST = query("lost", "SELECT 7 AS lost")
BACKEND = query("backend", "SELECT pg_backend_pid()")
SLEEPING = query(
    "sleeping", f"SELECT count(*) FROM pg_stat_activity WHERE query ~ 'sleep.30' AND {DATABASE}"
)
CUT = query("cut", f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {DATABASE}")
LOCK = query("lock", "SELECT pg_advisory_lock(7)")
LOCKS = query("locks", "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")


@pytest.fixture
async def one(database_url):
    """A pool of one connection."""
    postgres = Postgres(database_url, PostgresConfig(connections_max=1))
    yield postgres
    await postgres.close()


async def _transaction(postgres, froze, begun):
    async with postgres.transaction() as tx:
        begun.append(1)
        await froze.wait()
        await tx.value(ONE)


async def _two_statements(postgres, froze, begun):
    """The second one runs while the error of the first is handled."""
    async with postgres.transaction() as tx:
        begun.append(1)
        await froze.wait()
        try:
            await tx.value(ONE)
        finally:
            await tx.value(ONE)


async def _commit(postgres, froze, begun):
    async with postgres.transaction() as tx:
        await tx.value(ONE)
        begun.append(1)
        await froze.wait()


async def _session(postgres, froze, begun):
    async with postgres.session() as session:
        begun.append(1)
        await froze.wait()
        await session.value(ONE)


async def test_a_call_to_a_frozen_server_waits_once(database_url):
    """Not once each for the statement, the rollback and the cancel request."""
    # The wait is 4 s; twice that would exceed the limit below.
    config = PostgresConfig(statement_timeout_s=2, connect_timeout_s=1, connections_max=4)
    calls = [_transaction, _two_statements, _commit, _session]
    with ChaosProxy(database_url) as proxy:
        through = Postgres(proxy.url, config)
        froze, begun = asyncio.Event(), []
        running = [asyncio.create_task(call(through, froze, begun)) for call in calls]
        await wait_true(lambda: len(begun) == len(calls), what="all are connected")
        proxy.set(BLACK_HOLE)
        froze.set()
        async with asyncio.timeout(7):
            ends = await asyncio.gather(*running, return_exceptions=True)
        assert [type(end) for end in ends] == [PostgresDown] * len(calls)
        proxy.set(RESET)
        proxy.set(PASS)
        assert await through.value(ONE) == 1
        await through.close()


async def test_a_lost_response_of_a_long_statement_is_noticed(database_url):
    """A proxy keeps the connection open; a statement that runs for long is left alone."""
    config = PostgresConfig(statement_timeout_s=0.5)
    with ChaosProxy(database_url) as proxy:
        through = Postgres(proxy.url, config)

        async def sleep() -> int:
            async with through.transaction() as tx:
                await tx.allow_long_statements(600)
                return await tx.value(LONG_NAP)

        async def lose() -> None:
            async with through.transaction() as tx:
                await tx.allow_long_statements(600)
                assert await tx.value(LOST) == 7
                proxy.set(ONE_WAY, asked=b"7 AS lost")
                await tx.value(LOST)

        sleeping = asyncio.create_task(sleep())
        with pytest.raises(PostgresDown):
            await asyncio.wait_for(lose(), 30)
        assert await sleeping == 8
        await through.close()


async def test_a_cancelled_caller_does_not_wait_for_a_frozen_server(database_url):
    with ChaosProxy(database_url) as proxy:
        through = Postgres(proxy.url, PostgresConfig(connect_timeout_s=60))
        assert await through.value(ONE) == 1
        proxy.set(BLACK_HOLE)
        async with asyncio.timeout(30):  # A cancel request to the server takes 60 s.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await through.value(ONE)
        proxy.set(RESET)
        proxy.set(PASS)
        assert await through.value(ONE) == 1
        await through.close()


async def test_a_transaction_is_all_or_nothing(one):
    await one.run(MAKE)
    began = asyncio.Event()

    async def add(end):
        async with one.transaction() as tx:
            await tx.run(ADD, id=1, body="a")
            began.set()
            await end(tx)

    async def fail(_tx):
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        await add(fail)
    assert await one.value(COUNT) == 0
    began.clear()
    hanging = asyncio.create_task(add(lambda tx: tx.run(SLEEP)))
    await began.wait()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await one.value(COUNT) == 0, "the connection is fit for the next caller"
    await add(lambda tx: tx.run(ADD, id=2, body="b"))
    assert await one.value(COUNT) == 2


async def test_a_violated_constraint_is_named_without_values(postgres):
    await postgres.run(MAKE)
    await postgres.run(ADD, id=1, body="a")
    with pytest.raises(ConstraintViolated) as raised:
        await postgres.run(ADD, id=1, body="secret text")
    assert raised.value.constraint == "note_pkey"
    assert "secret text" not in str(raised.value)


async def test_a_statement_over_its_time_limit_is_stopped(database_url):
    postgres = Postgres(database_url, PostgresConfig(statement_timeout_s=0.1))
    with pytest.raises(PostgresBusy, match="without effect"):
        await postgres.run(SLEEP)
    await postgres.close()


@pytest.mark.parametrize("state", ["53100", "53200", "58030"])
async def test_a_full_disk_and_memory_are_an_outage_that_ends(postgres, state):
    """Roles wait through an outage; they would end at an unknown error."""
    text = f"-- No space.\nDO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$"
    with pytest.raises(PostgresFull, match="free some"):
        await postgres.run(compile_query("full", text))
    await postgres.run(compile_query("free", "-- A next statement.\nSELECT 1"))


async def test_the_pool_recovers_after_its_connections_were_cut(postgres, database_url):
    other = Postgres(database_url, PostgresConfig())
    sleeping = asyncio.create_task(postgres.run(SLEEP))
    await wait_true(lambda: other.value(SLEEPING), what="the statement runs")
    await other.run(CUT)
    with pytest.raises(PostgresDown, match="headrace doctor"):
        await sleeping
    assert await postgres.value(ONE) == 1
    await other.close()


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("postgresql://nobody:hunter2@127.0.0.1:1/none", "127.0.0.1:1"),
        ("postgresql://headrace@/none?host=/nowhere", "/nowhere/.s.PGSQL.5432"),
    ],
)
async def test_an_absent_server_raises_with_the_remedy(url, server):
    postgres = Postgres(url, PostgresConfig(connect_timeout_s=1))
    with pytest.raises(PostgresDown, match="headrace doctor") as raised:
        await postgres.open()
    assert raised.value.retryable
    assert raised.value.retry_after_s
    assert f"PostgreSQL at {server} does not respond" in raised.value.text
    assert "hunter2" not in raised.value.text
    assert server not in raised.value.public_text


async def test_wrong_urls_are_refused(running_engines, database_url):
    postgres = Postgres(running_engines.database_url("no_such_site"), PostgresConfig())
    with pytest.raises(PostgresRefused, match=r"postgres\.url"):
        await postgres.open()
    await postgres.close()
    async with running_engines.database() as other:
        postgres = Postgres(database_url, PostgresConfig(direct_url=other))
        with pytest.raises(UrlsDiffer, match="different databases"):
            await require_sessions(postgres)
        await postgres.close()
    postgres = Postgres(database_url, PostgresConfig(direct_url=database_url))
    await require_sessions(postgres)
    await postgres.close()


async def test_a_session_releases_its_locks(one):
    async with one.session() as session:
        await session.run(LOCK)
        assert await session.value(LOCKS) == 1
        one._config = PostgresConfig(connections_max=1, connect_timeout_s=0.001)
        waiting = asyncio.create_task(one.value(LOCKS))
        await session.run(NAP)
    assert await waiting == 0, "waiting for a busy connection is no connection failure"


async def test_connections_are_kept_until_they_are_unused(database_url, monkeypatch):
    monkeypatch.setattr(postgres_pool, "KEPT_S", 0.05)
    postgres = Postgres(database_url, PostgresConfig(connections_max=2))
    both = {*await asyncio.gather(postgres.value(BACKEND), postgres.value(BACKEND))}
    assert len(both) == 2
    assert await postgres.value(BACKEND) == await postgres.value(BACKEND)
    [pool] = postgres._pools.values()
    await wait_true(lambda: not pool.kept)
    last = await postgres.value(BACKEND)
    assert last in both
    used = await asyncio.gather(*[postgres.value(BACKEND) for _ in range(20)])
    assert {*used} <= both, "a waiting caller gets the next connection"
    await postgres.close()


@pytest.mark.parametrize(("is_slot", "connections"), [(True, 3), (False, 10)])
async def test_concurrent_handlers_share_connections(
    is_slot, connections, running_engines, database_url, tmp_path
):
    app = Headrace(
        flags={
            "data.folder": str(tmp_path),
            "postgres.url": database_url,
            "valkey.url": running_engines.endpoints.valkey_url,
        }
    )
    if is_slot:
        app.use_as_slot()
    pids = await asyncio.gather(*[app.engines.postgres.value(NAP) for _ in range(30)])
    assert len(set(pids)) == connections
    await app.close()
