"""The doctor on PostgreSQL: each harmful setting on a real database that has it, and whether the fix mends it."""

from __future__ import annotations

from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.kit.own_postgres import run_statements

from headrace import Headrace
from headrace.cli import checkup_postgres
from headrace.cli.checkup_postgres import check_postgres
from headrace.engines.postgres import PostgresConfig

NO_SYNCS = ("fsync is off", "full_page_writes is off")
"""The engines of a test run sync nothing."""


@pytest.fixture
def look(running_engines, database_url, tmp_path):
    """What the doctor finds on this test's database, by subject, but for what is well."""

    async def ask(url: str = database_url, **flags: str):
        urls = {"postgres.url": url, "valkey.url": running_engines.endpoints.valkey_url}
        own = {"data.folder": str(tmp_path / "data"), **urls, **flags}
        async with Headrace(flags=own) as app:
            found = await check_postgres(app, app.engines)
        faults = [one for one in found if one.state != "ok" and not one.text.startswith(NO_SYNCS)]
        return {one.subject: one for one in faults}

    return ask


@pytest.fixture
def name(database_url):
    """Of this test's database."""
    return urlsplit(database_url).path.strip("/")


async def test_the_embedded_server_is_well(look):
    assert await look() == {}


@pytest.mark.parametrize("place", ["DATABASE {name}", "ROLE headrace IN DATABASE {name}"])
@pytest.mark.parametrize(
    "case",
    [
        ("lock_timeout", "100ms", "timeouts", "warn"),
        ("idle_in_transaction_session_timeout", "1s", "timeouts", "warn"),
        ("idle_session_timeout", "5min", "timeouts", "warn"),
        ("transaction_timeout", "1min", "timeouts", "warn"),
        ("default_transaction_isolation", "serializable", "transactions", "fail"),
        ("default_transaction_read_only", "on", "transactions", "fail"),
    ],
)
async def test_a_harmful_setting_is_found_where_it_is_set(look, database_url, name, place, case):
    setting, value, subject, state = case
    where = place.format(name=name)
    try:
        await run_statements(database_url, f"ALTER {where} SET {setting} = '{value}'")
    except asyncpg.UndefinedObjectError:
        pytest.skip(f"this server has no {setting}")
    found = await look()
    assert set(found) == {subject}
    finding = found[subject]
    assert finding.state == state
    assert finding.text.startswith(f"{setting} is ")
    assert finding.mend == f"ALTER {where} RESET {setting}"
    fix = finding.mend
    if setting == "default_transaction_read_only":
        fix = f"BEGIN READ WRITE; {fix}; COMMIT"
    await execute(database_url, fix)
    assert await look() == {}


async def test_a_setting_of_the_server_is_mended_there(look, running_engines):
    url = running_engines.endpoints.postgres_url
    await execute(url, "ALTER SYSTEM SET idle_session_timeout = '1h'", "SELECT pg_reload_conf()")
    try:
        [finding] = (await look()).values()
        assert (
            finding.mend == "ALTER SYSTEM SET idle_session_timeout = '0'; SELECT pg_reload_conf()"
        )
        await execute(url, *finding.mend.split("; "))
        assert await look() == {}
    finally:
        await execute(url, "ALTER SYSTEM RESET idle_session_timeout", "SELECT pg_reload_conf()")


async def test_indexes_of_another_collation_version_are_a_fault(look, database_url, name):
    of_this = f"WHERE datname = '{name}'"
    await run_statements(database_url, f"UPDATE pg_database SET datcollversion = '0.1' {of_this}")
    [finding] = (await look()).values()
    assert (finding.subject, finding.state) == ("collation", "fail")
    assert "collation version 0.1" in finding.text
    assert finding.mend.startswith(f"REINDEX DATABASE {name}; ALTER DATABASE {name} REFRESH")


async def test_a_database_that_is_not_unicode_is_a_fault(look, running_engines):
    options = "ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0"
    await running_engines.statement(f"CREATE DATABASE test_ascii {options}")
    try:
        found = await look(running_engines.database_url("test_ascii"))
    finally:
        await running_engines.statement("DROP DATABASE test_ascii WITH (FORCE)")
    assert found["collation"].state == "fail"
    assert "SQL_ASCII" in found["collation"].text
    assert "ENCODING 'UTF8'" in found["collation"].mend


async def test_too_few_connections_for_the_pools_are_a_warning(look, database_url, name):
    await run_statements(database_url, f"ALTER DATABASE {name} CONNECTION LIMIT 20")
    flags = {"jobs.floats": "4"}
    [finding] = (await look(**flags)).values()
    assert (finding.subject, finding.state) == ("connections", "warn")
    assert finding.text == "20 connections for this role, one machine with all roles may open 47"
    assert finding.mend.startswith("set max_connections = 100")
    flags = {"jobs.floats": "1", "postgres.connections_max": "2"}
    assert await look(**flags) == {}


async def test_a_server_that_is_nearly_full_is_a_warning(look, database_url, name, monkeypatch):
    monkeypatch.setattr(checkup_postgres, "CONNECTIONS_USED_MAX", 0.0)
    [finding] = (await look()).values()
    assert finding.subject == "connections"
    assert finding.text.endswith("connections are in use")


async def test_a_server_that_is_too_old_is_a_fault(look, monkeypatch):
    monkeypatch.setattr(checkup_postgres, "POSTGRES_OLDEST", 990000)
    [finding] = (await look()).values()
    assert (finding.subject, finding.state) == ("postgres", "fail")
    assert finding.mend == "use PostgreSQL 99 or newer"


@pytest.mark.parametrize("setting", ["synchronous_commit"])
async def test_a_commit_that_may_be_lost_is_a_fault(look, database_url, name, setting):
    await run_statements(database_url, f"ALTER DATABASE {name} SET {setting} = off")
    [finding] = (await look()).values()
    assert (finding.subject, finding.state) == ("postgres", "fail")
    assert finding.text.startswith(f"{setting} is off")


async def execute(url: str, *statements: str) -> None:
    """Run statements as plain text."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close(timeout=5)


def test_the_defaults_are_those_that_the_agent_uses():
    from headrace.cli.roles import AGENT_CONNECTIONS

    assert int(AGENT_CONNECTIONS) + 1 == checkup_postgres.AGENT_CONNECTIONS
    assert PostgresConfig().connections_max == 10
