"""Doctor checks of PostgreSQL: each harmful setting is found, and its fix works."""

from __future__ import annotations

from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.kit.own_postgres import run_statements

from headrace import Headrace
from headrace.cli import doctor_engines
from headrace.cli.doctor_engines import check_postgres
from headrace.engines.postgres import PostgresConfig

NO_SYNCS = ("fsync is off", "full_page_writes is off")
"""Test engines run without fsync."""


@pytest.fixture
def look(running_engines, database_url, tmp_path):
    """Problems that the doctor finds on this test's database, by subject."""

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
    """URL of this test's database."""
    return urlsplit(database_url).path.strip("/")


async def test_the_embedded_server_is_ok(look):
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
    assert finding.fix == f"ALTER {where} RESET {setting}"
    fix = finding.fix
    if setting == "default_transaction_read_only":
        fix = f"BEGIN READ WRITE; {fix}; COMMIT"
    await execute(database_url, fix)
    assert await look() == {}


async def test_the_fix_of_a_server_setting_works(look, running_engines):
    url = running_engines.endpoints.postgres_url
    await execute(url, "ALTER SYSTEM SET idle_session_timeout = '1h'", "SELECT pg_reload_conf()")
    try:
        [finding] = (await look()).values()
        assert finding.fix == "ALTER SYSTEM SET idle_session_timeout = '0'; SELECT pg_reload_conf()"
        await execute(url, *finding.fix.split("; "))
        assert await look() == {}
    finally:
        await execute(url, "ALTER SYSTEM RESET idle_session_timeout", "SELECT pg_reload_conf()")


async def test_a_changed_collation_version_fails(look, database_url, name):
    of_this = f"WHERE datname = '{name}'"
    await run_statements(database_url, f"UPDATE pg_database SET datcollversion = '0.1' {of_this}")
    [finding] = (await look()).values()
    assert (finding.subject, finding.state) == ("collation", "fail")
    assert "collation version 0.1" in finding.text
    assert finding.fix.startswith(f"REINDEX DATABASE {name}; ALTER DATABASE {name} REFRESH")


async def test_a_database_without_unicode_fails(look, running_engines):
    options = "ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0"
    await running_engines.statement(f"CREATE DATABASE test_ascii {options}")
    try:
        found = await look(running_engines.database_url("test_ascii"))
    finally:
        await running_engines.statement("DROP DATABASE test_ascii WITH (FORCE)")
    assert found["collation"].state == "fail"
    assert "SQL_ASCII" in found["collation"].text
    assert "ENCODING 'UTF8'" in found["collation"].fix


async def test_too_few_connections_are_a_warning(look, database_url, name):
    await run_statements(database_url, f"ALTER DATABASE {name} CONNECTION LIMIT 20")
    flags = {"jobs.floats": "4"}
    [finding] = (await look(**flags)).values()
    assert (finding.subject, finding.state) == ("connections", "warn")
    assert (
        finding.text
        == "20 connections available to this role; one machine with all roles may need 47"
    )
    assert finding.fix.startswith("set max_connections = 100")
    flags = {"jobs.floats": "1", "postgres.connections_max": "2"}
    assert await look(**flags) == {}


async def test_nearly_used_up_connections_are_a_warning(look, database_url, name, monkeypatch):
    monkeypatch.setattr(doctor_engines, "CONNECTIONS_USED_MAX", 0.0)
    [finding] = (await look()).values()
    assert finding.subject == "connections"
    assert finding.text.endswith("connections are in use")


async def test_an_old_server_fails(look, monkeypatch):
    monkeypatch.setattr(doctor_engines, "POSTGRES_OLDEST", 990000)
    [finding] = (await look()).values()
    assert (finding.subject, finding.state) == ("postgres", "fail")
    assert finding.fix == "use PostgreSQL 99 or newer"


@pytest.mark.parametrize("setting", ["synchronous_commit"])
async def test_settings_that_lose_commits_fail(look, database_url, name, setting):
    await run_statements(database_url, f"ALTER DATABASE {name} SET {setting} = off")
    [finding] = (await look()).values()
    assert (finding.subject, finding.state) == ("postgres", "fail")
    assert finding.text.startswith(f"{setting} is off")


async def execute(url: str, *statements: str) -> None:
    """Run SQL statements."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close(timeout=5)


def test_connection_defaults_match_the_agent():
    from headrace.cli.roles import AGENT_CONNECTIONS

    assert int(AGENT_CONNECTIONS) + 1 == doctor_engines.AGENT_CONNECTIONS
    assert PostgresConfig().connections_max == 10
