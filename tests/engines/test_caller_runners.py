"""Callers' connections: our queries in their drivers' styles, and their errors in our words."""

from __future__ import annotations

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
from headrace.engines.postgres import ConstraintViolated, PostgresBusy, PostgresDown
from headrace.engines.sql import array_literal, compile_query, percent_text

MOMENT = datetime(2026, 11, 21, 12, 0, 0, 500, timezone(timedelta(hours=3, seconds=7)))
ECHO = compile_query(
    "echo",
    "-- Return the parameters, between texts that only look like parameters.\n"
    "SELECT :texts::text[] AS texts, :bytes::bytea[] AS bytes, :numbers::bigint[] AS numbers,\n"
    "       :floats::double precision[] AS floats, :moments::timestamptz[] AS moments,\n"
    "       :flags::boolean[] AS flags, :none::integer[] AS none, :word::text AS word, 7 % 4 AS"
    " rest,\n"
    "       '100 % ''of'' %s :it' AS quoted, :word::text || '!' AS again -- 50 % of :this",
)
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
ADD = compile_query("add", "-- Add one.\nINSERT INTO note (id) VALUES (:id::int)")
LATE = compile_query("late", "-- Take long.\nSELECT pg_sleep(30)")
JOBS = compile_query("jobs", "-- What only a migrated database has.\nSELECT headrace.enqueue_v1()")
QUEUES = compile_query("queues", "-- Look at the queues.\nSELECT count(*) FROM headrace.queue")
MANY = compile_query(
    "many", "-- Three rows.\nSELECT n, n * 2 AS twice FROM generate_series(1, 3) n"
)


class Word(StrEnum):
    """A text of another class."""

    ONE = "one"


def test_an_array_is_one_literal():
    assert array_literal([]) == "{}"
    assert array_literal([1, None, True, 0.5, Word.ONE]) == '{1,NULL,t,0.5,"one"}'
    assert array_literal(['a"b\\c', b"\0\xff"]) == r'{"a\"b\\c","\\x00ff"}'
    assert array_literal([MOMENT]) == "{2026-11-21T08:59:53.000500+00:00}"


def test_a_query_in_the_style_of_percents():
    query = compile_query("q", "-- Take.\nSELECT :b, :a, :b, 5 % 2, 'a %', '%s' -- 1 % :c")
    assert percent_text(query) == "SELECT %(b)s, %(a)s, %(b)s, 5 %% 2, 'a %%', '%%s' -- 1 %% :c"
    assert query.named_arguments({"a": [1, None], "b": "x"}) == {"a": "{1,NULL}", "b": "x"}


@pytest.fixture(scope="module")
async def database_url(running_engines):
    """A migrated database with a table of the caller that holds 1; tests never commit to it."""
    async with running_engines.database() as url:
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE note (id int PRIMARY KEY)")
        await connection.execute("INSERT INTO note VALUES (1)")
        await connection.close()
        yield url


@pytest.fixture(
    params=["asyncpg", "psycopg async", "psycopg", "psycopg2", "sqlalchemy", "sa async"]
)
async def lent(request, database_url):
    """A caller's connection in a transaction."""
    kind = request.param
    if kind == "asyncpg":
        connection = await asyncpg.connect(database_url)
        tx = connection.transaction()
        await tx.start()
        yield connection
        await connection.close()
    elif kind == "psycopg async":
        connection = await psycopg.AsyncConnection.connect(database_url)
        yield connection
        await connection.close()
    elif kind == "sqlalchemy":
        engine = sqlalchemy.create_engine(
            "postgresql+psycopg2://", creator=lambda: psycopg2.connect(database_url)
        )
        with engine.connect() as connection:
            yield connection
        engine.dispose()
    elif kind == "sa async":
        engine = create_async_engine(
            "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(database_url)
        )
        async with engine.connect() as connection:
            yield connection
        await engine.dispose()
    else:
        connection = (psycopg if kind == "psycopg" else psycopg2).connect(database_url)
        yield connection
        connection.close()


@pytest.fixture
def runner(lent):
    """The connection as a runner."""
    return runner_for(lent)


async def test_values_arrive_and_return_as_they_are(runner):
    row = await runner.one(ECHO, **GIVEN)
    assert list(row["texts"]) == TEXTS
    assert [None if b is None else bytes(b) for b in row["bytes"]] == GIVEN["bytes"]
    assert list(row["numbers"]) == GIVEN["numbers"]
    assert list(row["floats"]) == GIVEN["floats"]
    assert list(row["moments"])[:2] == GIVEN["moments"][:2]
    assert list(row["flags"]) == GIVEN["flags"]
    assert (row["none"], row["word"], row["rest"]) == (None, GIVEN["word"], 3)
    assert (row["quoted"], row["again"]) == ("100 % 'of' %s :it", GIVEN["word"] + "!")
    assert row[7] == GIVEN["word"]


async def test_the_four_ways_to_run(runner):
    assert [(row["n"], row[1]) for row in await runner.all(MANY)] == [(1, 2), (2, 4), (3, 6)]
    assert await runner.value(MANY) == 1
    assert await runner.run(ADD, id=2) == 1
    nothing = compile_query("nothing", "-- No rows.\nSELECT id FROM note WHERE id = 7")
    assert (await runner.one(nothing), await runner.value(nothing)) == (None, None)
    assert runner_for(runner) is runner


async def test_a_broken_rule_names_its_constraint_and_then_the_transaction_has_failed(runner):
    with pytest.raises(ConstraintViolated, match="note_pkey") as told:
        await runner.run(ADD, id=1)
    assert told.value.constraint == "note_pkey"
    with pytest.raises(TransactionUnfit, match="already failed"):
        await runner.run(ADD, id=2)


async def test_a_database_without_our_schema_raises_with_the_remedy(runner):
    with pytest.raises(SchemaBehind, match="headrace migrate"):
        await runner.value(JOBS)


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ("SET LOCAL statement_timeout = 20", PostgresBusy, "and try again"),
        ("SET LOCAL ROLE pg_monitor", SchemaDenied, "grant it"),
        ("SET TRANSACTION READ ONLY", TransactionUnfit, "read-only"),
    ],
)
async def test_refusals_of_the_server_are_translated(runner, state, error, text):
    await runner.run(compile_query("state", f"-- Change what the caller may.\n{state}"))
    with pytest.raises(error, match=text):
        await runner.value(
            {PostgresBusy: LATE, SchemaDenied: QUEUES, TransactionUnfit: ADD}[error],
            **({"id": 2} if error is TransactionUnfit else {}),
        )


async def test_a_lost_connection_is_translated(runner, postgres):
    pid = await runner.value(compile_query("pid", "-- Who am I.\nSELECT pg_backend_pid()"))
    kill = compile_query("kill", "-- Cut it.\nSELECT pg_terminate_backend(:pid::int, 5000)")
    assert await postgres.value(kill, pid=pid)
    with pytest.raises(PostgresDown, match="are lost"):
        await runner.value(MANY)
    with pytest.raises((PostgresDown, TransactionUnfit)):
        await runner.value(MANY)


async def test_what_we_have_no_word_for_passes_as_it_is(runner):
    with pytest.raises(Exception, match=r"(?i)division by zero") as told:
        await runner.value(compile_query("zero", "-- Divide.\nSELECT 1 / 0"))
    assert not type(told.value).__module__.startswith("headrace")
