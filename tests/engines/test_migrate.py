"""Migrations and named SQL: order, phases, locks, checksums, and compilation of parameters."""

from __future__ import annotations

import asyncio
import sys

import pytest

from headrace.app import PACKAGES
from headrace.engines.migrate import (
    MigrationEdited,
    SchemaAhead,
    SchemaBehind,
    apply_migrations,
    check_schema,
    plan_migrations,
)
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query, parse_queries

COMPILED = compile_query(
    "compiled",
    "-- Functions without the setting.\nSELECT p.oid::regprocedure FROM pg_proc p"
    " WHERE p.pronamespace = 'headrace'::regnamespace"
    " AND NOT coalesce('jit=off' = ANY (p.proconfig), false)",
)
EXISTS = compile_query("exists", "-- Is it there?\nSELECT to_regclass(:name) IS NOT NULL")


@pytest.fixture
async def empty(running_engines):
    async with running_engines.database(template="template0") as url:
        postgres = Postgres(url, PostgresConfig())
        yield postgres
        await postgres.close()


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A package with migrations of its own; call it to write one."""
    folder = tmp_path / "roomfortests" / "sql" / "migrations"
    folder.mkdir(parents=True)
    (tmp_path / "roomfortests" / "__init__.py").write_text('"""A room."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name, text: (folder / name).write_text(text)
    sys.modules.pop("roomfortests", None)


async def test_many_migrators_at_once_apply_each_file_once(empty):
    done = await asyncio.gather(*(apply_migrations(empty, PACKAGES) for _ in range(4)))
    assert sum(len(migrations) for migrations in done) == len({m.label for d in done for m in d})
    assert await plan_migrations(empty, PACKAGES) == []
    await check_schema(empty, PACKAGES, version="0.1.0")


async def test_an_empty_database_is_refused_with_the_command(empty):
    with pytest.raises(SchemaBehind, match="run `headrace migrate`"):
        await check_schema(empty, PACKAGES, version="0.1.0")
    for text in ("SELECT 1 FROM headrace.queue", "SELECT headrace.ack_v1('{}')"):
        with pytest.raises(SchemaBehind, match="run `headrace migrate`"):
            await empty.value(compile_query("absent", f"-- Look.\n{text}"))
    with pytest.raises(Exception, match='relation "orders" does not exist'):
        await empty.value(compile_query("orders", "-- Look.\nSELECT 1 FROM orders"))


async def test_a_migration_that_fails_leaves_nothing_of_itself(empty, room):
    room("0001_pre_good.sql", "CREATE TABLE headrace.good (id int);")
    room("0002_pre_bad.sql", "CREATE TABLE headrace.half (id int); SELECT 1 / 0;")
    with pytest.raises(Exception, match="division by zero"):
        await apply_migrations(empty, ("roomfortests",))
    assert await empty.value(EXISTS, name="headrace.good")
    assert not await empty.value(EXISTS, name="headrace.half")
    assert [m.number for m in await plan_migrations(empty, ("roomfortests",))] == [2]


async def test_post_migrations_wait_for_their_phase(empty, room):
    room("0001_pre_add.sql", "CREATE TABLE headrace.new_way (id int);")
    room("0002_post_drop.sql", "-- oldest-code: 0.3.0\nDROP TABLE headrace.new_way;")
    await apply_migrations(empty, ("roomfortests",), phases=("pre",))
    await check_schema(empty, ("roomfortests",), version="0.2.0")
    await apply_migrations(empty, ("roomfortests",), phases=("post",))
    await check_schema(empty, ("roomfortests",), version="0.3.0")
    with pytest.raises(SchemaAhead, match=r"0\.3\.0 or newer, this is 0\.2\.0"):
        await check_schema(empty, ("roomfortests",), version="0.2.0")


async def test_an_edited_migration_is_refused(empty, room):
    room("0001_pre_add.sql", "CREATE TABLE headrace.one (id int);")
    await apply_migrations(empty, ("roomfortests",))
    room("0001_pre_add.sql", "CREATE TABLE headrace.one (id bigint);")
    with pytest.raises(MigrationEdited, match="put the change into a new migration"):
        await plan_migrations(empty, ("roomfortests",))


async def test_a_migration_does_not_queue_the_site_behind_a_lock(empty, room):
    room("0001_pre_add.sql", "CREATE TABLE headrace.busy (id int);")
    await apply_migrations(empty, ("roomfortests",))
    room(
        "0002_pre_alter.sql",
        "SET LOCAL lock_timeout = '50ms';\nALTER TABLE headrace.busy ADD b int;",
    )
    async with empty.transaction() as tx:
        await tx.run(compile_query("lock", "-- Hold it.\nLOCK TABLE headrace.busy"))
        with pytest.raises(Exception, match="without effect"):
            await apply_migrations(empty, ("roomfortests",))
    assert len(await apply_migrations(empty, ("roomfortests",))) == 1


async def test_functions_run_without_jit_on_every_connection(postgres, room):
    """Also those that a later migration replaces, which loses what was set on them."""
    room(
        "0001_pre_one.sql", "CREATE FUNCTION headrace.one() RETURNS int LANGUAGE sql AS 'SELECT 1'"
    )
    await apply_migrations(postgres, ("roomfortests",))
    text = "CREATE OR REPLACE FUNCTION headrace.one() RETURNS int LANGUAGE sql AS 'SELECT 2'"
    room("0002_pre_two.sql", text)
    await apply_migrations(postgres, ("roomfortests",))
    assert await postgres.all(COMPILED) == []


def test_parameters_are_numbered_in_order_of_first_use():
    query = compile_query("q", "-- Take some.\nSELECT :b, :a, :b WHERE x = ANY(:ids::bigint[])")
    assert query.text == "SELECT $1, $2, $1 WHERE x = ANY($3::bigint[])"
    assert query.parameters == ("b", "a", "ids")
    assert query.arguments({"a": 1, "b": 2, "ids": []}) == [2, 1, []]


def test_text_that_resembles_a_parameter_is_kept():
    for sql in (
        "SELECT 'a :b ''quoted'' :c'",
        "SELECT x::text",
        "SELECT 1 -- not :this",
        "SELECT arr[2:3]",
        "f(a := 1)",
    ):
        query = compile_query("q", f"-- Purpose.\n{sql}")
        assert (query.text, query.parameters) == (sql, ())


def test_mistakes_in_queries_are_assertion_errors():
    with pytest.raises(AssertionError, match="no line of purpose"):
        compile_query("q", "SELECT 1")
    query = compile_query("q", "-- Purpose.\nSELECT :a")
    with pytest.raises(AssertionError, match=r"takes \['a'\], got \['b'\]"):
        query.arguments({"b": 1})


def test_a_file_gives_its_blocks():
    first = "-- name: one\n-- First.\nSELECT 1;\n\n"
    text = first + "-- name: two\n-- Second,\n-- in two lines.\nSELECT 2\n"
    one, two = parse_queries(text)
    assert (one.name, one.text, two.purpose) == ("one", "SELECT 1", "Second, in two lines.")
