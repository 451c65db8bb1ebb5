"""Connections of callers: our queries in the style of their drivers, and our errors."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from headrace.engines.caller_transaction import SchemaDenied, TransactionUnfit, runner_for
from headrace.engines.migrate import SchemaBehind
from headrace.engines.postgres_errors import (
    ConstraintViolated,
    PostgresBusy,
    PostgresDown,
    PostgresFull,
)
from headrace.engines.sql import array_literal, compile_query, percent_text

MOMENT = datetime(2026, 11, 21, 12, 0, 0, 500, timezone(timedelta(hours=3, seconds=7)))
TEXTS = ["a", None, "NULL", "", 'q"\\{},', "it's", "%s %(x)s %%", "\u2603", " ", "\n"]
GIVEN = {
    "texts": TEXTS,
    "bytes": [b"", b"\0\xff\\x'", None],
    "numbers": [1, -(2**63), None, 2**63 - 1],
    "floats": [1, 0.5, 1e-300, None, 1e300],
    "moments": [MOMENT, None, datetime(1, 1, 1, tzinfo=UTC)],
    "flags": [True, False, None],
    "none": None,
    "word": "it's 100 % \\ \u2603",
}


def query(text):
    return compile_query("q", f"-- A statement of a test.\n{text}")


ECHO = query(
    "SELECT :texts::text[] AS texts, :bytes::bytea[] AS bytes, :numbers::bigint[] AS numbers,\n"
    "       :floats::double precision[] AS floats, :moments::timestamptz[] AS moments,\n"
    "       :flags::boolean[] AS flags, :none::integer[] AS none, :word::text AS word,\n"
    "       7 % 4 AS rest, '100 % ''of'' %s :it' AS quoted,\n"
    "       :word::text || '!' AS again -- 50 % of :this"
)
ADD = query("INSERT INTO note (id) VALUES (:id::int)")
FULL = query("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '53100'; END $$")
SLEEP = query("SELECT pg_sleep(30)")
QUEUES = query("SELECT count(*) FROM headrace.queue")
MANY = query("SELECT n, n * 2 AS twice FROM generate_series(1, 3) n")


class Word(StrEnum):
    """A subclass of text."""

    ONE = "one"


def test_arrays_and_percent_parameters_are_written_as_drivers_expect():
    assert array_literal([]) == "{}"
    assert array_literal([1, None, True, 0.5, Word.ONE]) == '{1,NULL,t,0.5,"one"}'
    assert array_literal(['a"b\\c', b"\0\xff"]) == r'{"a\"b\\c","\\x00ff"}'
    assert array_literal([MOMENT]) == "{2026-11-21T08:59:53.000500+00:00}"
    compiled = query("SELECT :b, :a, :b, 5 % 2, 'a %', '%s' -- 1 % :c")
    expected = "SELECT %(b)s, %(a)s, %(b)s, 5 %% 2, 'a %%', '%%s' -- 1 %% :c"
    assert percent_text(compiled) == expected
    assert compiled.named_arguments({"a": [1, None], "b": "x"}) == {"a": "{1,NULL}", "b": "x"}


@pytest.fixture(scope="module")
async def database_url(running_engines):
    """A migrated database with a table of the caller that holds 1; tests never commit to it."""
    async with running_engines.database() as url:
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE note (id int PRIMARY KEY)")
        await connection.execute("INSERT INTO note VALUES (1)")
        await connection.close()
        yield url


@asynccontextmanager
async def _asyncpg(url):
    connection = await asyncpg.connect(url)
    await connection.transaction().start()
    yield connection
    await connection.close()


@asynccontextmanager
async def _psycopg_async(url):
    connection = await psycopg.AsyncConnection.connect(url)
    yield connection
    await connection.close()


@asynccontextmanager
async def _sqlalchemy_async(url):
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url)
    )
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


@contextmanager
def _sqlalchemy(url):
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg2://", creator=lambda: psycopg2.connect(url)
    )
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def _driver(module):
    @contextmanager
    def connect(url):
        connection = module.connect(url)
        yield connection
        connection.close()

    return connect


ASYNC = {
    "asyncpg": _asyncpg,
    "psycopg async": _psycopg_async,
    "sqlalchemy async": _sqlalchemy_async,
}
SYNC = {
    "psycopg": _driver(psycopg),
    "psycopg2": _driver(psycopg2),
    "sqlalchemy": _sqlalchemy,
}


@pytest.fixture(params=[*ASYNC, *SYNC])
async def runner(request, database_url):
    """A caller's connection in a transaction, as a runner."""
    if request.param in ASYNC:
        async with ASYNC[request.param](database_url) as connection:
            yield runner_for(connection)
    else:
        with SYNC[request.param](database_url) as connection:
            yield runner_for(connection)


async def test_values_and_rows_are_the_same_in_every_driver(runner):
    row = await runner.one(ECHO, **GIVEN)
    for name in ("texts", "numbers", "floats", "flags"):
        assert list(row[name]) == GIVEN[name]
    assert [None if b is None else bytes(b) for b in row["bytes"]] == GIVEN["bytes"]
    assert list(row["moments"])[:2] == GIVEN["moments"][:2]
    assert (row["none"], row["word"], row["rest"]) == (None, GIVEN["word"], 3)
    assert (row["quoted"], row["again"]) == ("100 % 'of' %s :it", GIVEN["word"] + "!")
    assert row[7] == GIVEN["word"]
    assert [(row["n"], row[1]) for row in await runner.all(MANY)] == [(1, 2), (2, 4), (3, 6)]
    assert await runner.value(MANY) == 1
    assert await runner.run(ADD, id=2) == 1
    nothing = query("SELECT id FROM note WHERE id = 7")
    assert (await runner.one(nothing), await runner.value(nothing)) == (None, None)
    assert runner_for(runner) is runner


async def test_a_violated_constraint_is_named_and_the_transaction_has_failed(runner):
    with pytest.raises(ConstraintViolated, match="note_pkey") as raised:
        await runner.run(ADD, id=1)
    assert raised.value.constraint == "note_pkey"
    with pytest.raises(TransactionUnfit, match="already failed"):
        await runner.run(ADD, id=2)


@pytest.mark.parametrize(
    ("state", "call", "error", "text"),
    [
        ("statement_timeout = 20", SLEEP, PostgresBusy, "and try again"),
        ("ROLE pg_monitor", QUEUES, SchemaDenied, "grant it"),
        ("transaction_read_only = on", query("DELETE FROM note"), TransactionUnfit, "read-only"),
        ("lc_time = 'C'", query("SELECT headrace.enqueue_v1()"), SchemaBehind, "headrace migrate"),
        ("lc_time = 'C'", FULL, PostgresFull, "free some"),
        ("lc_time = 'C'", query("SELECT 1 / 0"), Exception, r"(?i)division by zero"),
    ],
    ids=["timeout", "denied", "read only", "behind", "full", "unknown"],
)
async def test_errors_of_the_server_are_translated(runner, state, call, error, text):
    await runner.run(query(f"SET LOCAL {state}"))
    with pytest.raises(error, match=text) as raised:
        await runner.value(call)
    assert type(raised.value).__module__.startswith("headrace") == (error is not Exception)


async def test_a_lost_connection_is_translated(runner, postgres):
    pid = await runner.value(query("SELECT pg_backend_pid()"))
    assert await postgres.value(query("SELECT pg_terminate_backend(:pid::int, 5000)"), pid=pid)
    with pytest.raises(PostgresDown, match="are lost"):
        await runner.value(MANY)
    with pytest.raises((PostgresDown, TransactionUnfit)):
        await runner.value(MANY)
