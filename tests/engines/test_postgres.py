"""PostgreSQL through a pool.

Transactions, errors, time limits, lost servers and connection limits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from tests.kit.chaos import BLACK_HOLE, PASS, RESET, ChaosProxy
from tests.kit.processes import descendants
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.engines import postgres_pool
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.migrate import UrlsDiffer, require_sessions
from headrace.engines.postgres import (
    ConstraintViolated,
    Postgres,
    PostgresBusy,
    PostgresConfig,
    PostgresDown,
    PostgresRefused,
)
from headrace.engines.sql import compile_query

MAKE = compile_query("make", "-- Make a table.\nCREATE TABLE note (id int PRIMARY KEY, body text)")
ADD = compile_query("add", "-- Add one.\nINSERT INTO note (id, body) VALUES (:id, :body)")
COUNT = compile_query("count", "-- Count.\nSELECT count(*) FROM note")
ONE = compile_query("one", "-- One.\nSELECT 1")
SLEEP = compile_query("sleep", "-- Take long.\nSELECT pg_sleep(30)")
CUT = compile_query(
    "cut",
    "-- Cut the others.\nSELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()",
)


async def test_a_caller_who_gives_up_does_not_wait_for_a_frozen_server(postgres, database_url):
    with ChaosProxy(database_url) as proxy:
        through = Postgres(proxy.url, PostgresConfig(connect_timeout_s=60))
        assert await through.value(ONE) == 1
        proxy.set(BLACK_HOLE)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await through.value(ONE)
        assert time.monotonic() - began_s < 30, "a cancel request to the server takes 60 s"
        proxy.set(RESET)
        proxy.set(PASS)
        assert await through.value(ONE) == 1
        await through.close()


async def _in_transaction(postgres, froze, begun):
    async with postgres.transaction() as tx:
        begun.append(1)
        await froze.wait()
        await tx.value(ONE)


async def _in_two_statements(postgres, froze, begun):
    """The second one is for what a caller does with the error of the first."""
    async with postgres.transaction() as tx:
        begun.append(1)
        await froze.wait()
        try:
            await tx.value(ONE)
        finally:
            await tx.value(ONE)


async def _committing(postgres, froze, begun):
    async with postgres.transaction() as tx:
        await tx.value(ONE)
        begun.append(1)
        await froze.wait()


async def _in_session(postgres, froze, begun):
    async with postgres.session() as session:
        begun.append(1)
        await froze.wait()
        await session.value(ONE)


async def test_a_frozen_server_costs_a_call_one_wait(database_url):
    """Not one for the statement, one for the rollback and one for the request to stop it."""
    # An answer is awaited for 4 s; twice of that would be too long.
    config = PostgresConfig(statement_timeout_s=2, connect_timeout_s=1, connections_max=4)
    calls = [_in_transaction, _in_two_statements, _committing, _in_session]
    with ChaosProxy(database_url) as proxy:
        through = Postgres(proxy.url, config)
        froze, begun = asyncio.Event(), []
        running = [asyncio.create_task(call(through, froze, begun)) for call in calls]
        await wait_true(lambda: len(begun) == len(calls), what="all are connected")
        proxy.set(BLACK_HOLE)
        froze.set()
        async with asyncio.timeout(7):
            told = await asyncio.gather(*running, return_exceptions=True)
        assert [type(one) for one in told] == [PostgresDown] * len(calls)
        proxy.set(RESET)
        proxy.set(PASS)
        assert await through.value(ONE) == 1
        await through.close()


async def test_a_transaction_is_all_or_nothing(postgres):
    await postgres.run(MAKE)

    async def fail_half_way():
        async with postgres.transaction() as tx:
            await tx.run(ADD, id=1, body="a")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        await fail_half_way()
    assert await postgres.value(COUNT) == 0
    async with postgres.transaction() as tx:
        for number in range(3):
            await tx.run(ADD, id=number, body="b")
    assert await postgres.value(COUNT) == 3


async def test_a_broken_rule_is_a_conflict_that_names_the_constraint(postgres):
    await postgres.run(MAKE)
    await postgres.run(ADD, id=1, body="a")
    with pytest.raises(ConstraintViolated) as told:
        await postgres.run(ADD, id=1, body="secret text")
    assert told.value.constraint == "note_pkey"
    assert "secret text" not in str(told.value)


async def test_a_statement_that_takes_too_long_is_stopped(database_url):
    postgres = Postgres(database_url, PostgresConfig(statement_timeout_s=0.1))
    with pytest.raises(PostgresBusy, match="without effect"):
        await postgres.run(SLEEP)
    await postgres.close()


async def test_the_pool_heals_after_its_connections_were_cut(postgres, database_url):
    other = Postgres(database_url, PostgresConfig())
    await postgres.run(MAKE)
    sleeping = asyncio.create_task(postgres.run(SLEEP))
    active = compile_query(
        "active",
        "-- Busy ones.\nSELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(30)%'"
        " AND datname = current_database() AND pid <> pg_backend_pid()",
    )
    while not await other.value(active):
        await asyncio.sleep(0)
    await other.run(CUT)
    with pytest.raises(PostgresDown, match="headrace doctor"):
        await sleeping
    assert await postgres.value(COUNT) == 0
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
    with pytest.raises(PostgresDown, match="headrace doctor") as told:
        await postgres.open()
    assert told.value.retryable
    assert told.value.retry_after_s
    assert f"PostgreSQL at {server} does not respond" in told.value.text
    assert "hunter2" not in told.value.text
    assert server not in told.value.public_text


async def test_a_missing_database_raises_a_fault_of_the_url(running_engines):
    postgres = Postgres(running_engines.database_url("no_such_site"), PostgresConfig())
    with pytest.raises(PostgresRefused, match=r"postgres\.url"):
        await postgres.open()
    await postgres.close()


async def test_a_session_leaves_nothing_of_itself_to_the_next_caller(database_url):
    postgres = Postgres(database_url, PostgresConfig(connections_max=1))
    lock = compile_query("lock", "-- Take a session lock.\nSELECT pg_advisory_lock(7)")
    locks = compile_query(
        "locks", "-- Count them.\nSELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    )
    async with postgres.session() as session:
        await session.run(lock)
        assert await session.value(locks) == 1
    assert await postgres.value(locks) == 0
    await postgres.close()


async def test_connections_are_kept_between_statements_until_they_are_unused(
    database_url, monkeypatch
):
    monkeypatch.setattr(postgres_pool, "KEPT_S", 0.05)
    postgres = Postgres(database_url, PostgresConfig(connections_max=2))
    backend = compile_query("backend", "-- Which one.\nSELECT pg_backend_pid()")
    first, second = await asyncio.gather(postgres.value(backend), postgres.value(backend))
    assert first != second
    assert await postgres.value(backend) == await postgres.value(backend)
    [pool] = postgres._pools.values()
    await wait_true(lambda: not pool.kept)
    assert await postgres.value(backend) in {first, second}
    async with asyncio.TaskGroup() as callers:
        asked = [callers.create_task(postgres.value(backend)) for _ in range(20)]
    assert {one.result() for one in asked} <= {first, second}, (
        "a waiting caller gets the next connection"
    )
    await postgres.close()


async def test_waiting_for_a_busy_connection_is_no_dead_server(database_url):
    postgres = Postgres(database_url, PostgresConfig(connections_max=1))
    nap = compile_query("nap", "-- Take a moment.\nSELECT pg_sleep(0.1) IS NULL")
    async with postgres.session() as session:
        postgres._config = PostgresConfig(connections_max=1, connect_timeout_s=0.001)
        waiting = asyncio.create_task(postgres.value(ONE))
        await session.run(nap)
    assert await waiting == 1
    await postgres.close()


async def test_a_cancelled_transaction_leaves_its_connection_fit(database_url):
    postgres = Postgres(database_url, PostgresConfig(connections_max=1))
    await postgres.run(MAKE)
    began = asyncio.Event()

    async def hang():
        async with postgres.transaction() as tx:
            await tx.run(ADD, id=1, body="a")
            began.set()
            await tx.run(SLEEP)

    hanging = asyncio.create_task(hang())
    await began.wait()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await postgres.value(COUNT) == 0
    await postgres.close()


async def test_a_frozen_server_is_not_waited_for_without_end(tmp_path):
    engines = EmbeddedEngines(tmp_path / "engines", durable=False)
    told = await engines.start()
    config = PostgresConfig(statement_timeout_s=0.5, connect_timeout_s=0.5)
    postgres = Postgres(told.postgres_url, config)
    await postgres.run(MAKE)
    frozen = [engines.postgres_pid, *descendants(engines.postgres_pid)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(PostgresDown, match="headrace doctor"):
                await postgres.value(COUNT)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert await postgres.value(COUNT) == 0
    await postgres.close()
    await engines.stop()


async def test_urls_to_different_databases_are_refused(running_engines, database_url):
    async with running_engines.database() as other:
        postgres = Postgres(database_url, PostgresConfig(direct_url=other))
        with pytest.raises(UrlsDiffer, match="different databases"):
            await require_sessions(postgres)
        await postgres.close()
    postgres = Postgres(database_url, PostgresConfig(direct_url=database_url))
    await require_sessions(postgres)
    await postgres.close()


PID = compile_query(
    "pid", "-- Who am I, after a while.\nSELECT pg_backend_pid() FROM pg_sleep(0.05)"
)


@pytest.mark.parametrize(("is_slot", "connections"), [(True, 3), (False, 10)])
async def test_many_handlers_at_once_share_them(
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
    postgres = app.engines.postgres
    pids = await asyncio.gather(*[postgres.value(PID) for _ in range(30)])
    assert len(set(pids)) == connections
    await app.close()
