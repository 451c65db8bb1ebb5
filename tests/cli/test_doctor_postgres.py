"""Doctor checks of PostgreSQL: each harmful setting is found, and its fix works."""

from __future__ import annotations

from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.kit.own_postgres import OwnPostgres, run_statements

from headrace import Headrace
from headrace.cli import doctor_engines
from headrace.cli.doctor_engines import check_postgres
from headrace.cli.roles import AGENT_CONNECTIONS
from headrace.engines.postgres import PostgresConfig
from headrace.jobs.agent.slot_statements import CONNECTIONS_MAX as SLOT_STATEMENTS

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


async def execute(url: str, *statements: str) -> None:
    """Run SQL statements."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close(timeout=5)


SETTINGS = [
    ("lock_timeout", "100ms", "timeouts", "warn"),
    ("idle_in_transaction_session_timeout", "1s", "timeouts", "warn"),
    ("idle_session_timeout", "5min", "timeouts", "warn"),
    ("transaction_timeout", "1min", "timeouts", "warn"),
    ("default_transaction_isolation", "serializable", "transactions", "fail"),
    ("default_transaction_read_only", "on", "transactions", "fail"),
]


@pytest.mark.parametrize("place", ["DATABASE {}", "ROLE headrace IN DATABASE {}"])
async def test_a_harmful_setting_is_found_where_it_is_set_and_fixed(look, database_url, place):
    assert await look() == {}
    where = place.format(urlsplit(database_url).path.strip("/"))
    for setting, value, subject, state in SETTINGS:
        try:
            await run_statements(database_url, f"ALTER {where} SET {setting} = '{value}'")
        except asyncpg.UndefinedObjectError:
            continue  # A setting of newer servers.
        [finding] = (await look()).values()
        assert (finding.subject, finding.state) == (subject, state)
        assert finding.text.startswith(f"{setting} is ")
        assert finding.fix == f"ALTER {where} RESET {setting}"
        is_read_only = setting == "default_transaction_read_only"
        fix = f"BEGIN READ WRITE; {finding.fix}; COMMIT" if is_read_only else finding.fix
        await execute(database_url, fix)
        assert await look() == {}, setting


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


FEW = "20 connections available to this role; one machine with all roles may need 55"
HARMS = {
    "collation": (
        "UPDATE pg_database SET datcollversion = '0.1' WHERE datname = '{}'",
        (
            "collation",
            "fail",
            "collation version 0.1",
            "REINDEX DATABASE {0}; ALTER DATABASE {0} REFRESH",
        ),
    ),
    "connections": (
        "ALTER DATABASE {} CONNECTION LIMIT 20",
        ("connections", "warn", FEW, "set max_connections = 110"),
    ),
    "commit": (
        "ALTER DATABASE {} SET synchronous_commit = off",
        ("postgres", "fail", "synchronous_commit is off", ""),
    ),
}


@pytest.mark.parametrize("harm", HARMS)
async def test_a_harm_to_the_database_is_found(look, database_url, harm):
    name = urlsplit(database_url).path.strip("/")
    statement, (subject, state, text, fix) = HARMS[harm]
    await run_statements(database_url, statement.format(name))
    [finding] = (await look(**{"jobs.floats": "4"})).values()
    assert (finding.subject, finding.state) == (subject, state)
    assert text in finding.text
    assert finding.fix.startswith(fix.format(name))
    if harm == "connections":
        few = {"postgres.connections_max": "2", "postgres.slot_connections_max": "1"}
        assert await look(**{"jobs.floats": "1", **few}) == {}


async def test_the_roles_of_all_hosts_need_connections(look, database_url):
    name = urlsplit(database_url).path.strip("/")
    roles = [
        f"('{host}', '{role}', 'f', '', now())"
        for host in ("a", "b", "c")
        for role in ("agent", "api", "scheduler", "flusher", "media")
    ]
    await run_statements(
        database_url,
        f"ALTER DATABASE {name} CONNECTION LIMIT 60",
        f"INSERT INTO headrace.role_secret VALUES {', '.join(roles)}",
    )
    finding = (await look(**{"jobs.floats": "4"}))["connections"]
    assert (
        "60 connections available to this role; the roles of 3 hosts may need 165" in finding.text
    )
    assert finding.fix.startswith("set max_connections = 330")


@pytest.mark.slow
async def test_commits_without_their_standby_fail(look, servers_folder):
    server = OwnPostgres(servers_folder / "p", "18", synchronous_standby_names="b, c")
    await server.make()
    await server.start()
    finding = (await look(server.url))["postgres"]
    server.end()
    assert finding.state == "fail"
    assert finding.text == (
        "commits wait for a synchronous standby: synchronous_standby_names is 'b, c', and none is"
        " connected"
    )
    assert "patronictl list" in finding.fix


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


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        ("CONNECTIONS_USED_MAX", 0.0, "connections are in use"),
        ("POSTGRES_MAJOR_MIN", 99, "use PostgreSQL 99 or newer"),
    ],
)
async def test_used_up_connections_and_old_servers_are_found(look, monkeypatch, limit, value, text):
    monkeypatch.setattr(doctor_engines, limit, value)
    [finding] = (await look()).values()
    assert text in f"{finding.text} {finding.fix}"


def test_connection_defaults_match_the_agent():
    pools = int(AGENT_CONNECTIONS) + SLOT_STATEMENTS
    assert pools + 1 == doctor_engines.AGENT_CONNECTIONS
    assert PostgresConfig().connections_max == 10
