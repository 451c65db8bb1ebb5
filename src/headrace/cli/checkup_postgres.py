"""What `headrace doctor` checks of PostgreSQL: settings that harm, where each is set, and its fix.

A setting may come from the server's file, the database or the role; `pg_settings` names which, so that the fix is
the statement for that place. Sessions are checked on a connection of their own, statements on one of the pool.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

from headrace.cli.findings import Finding
from headrace.cli.house import App
from headrace.engines import Engines
from headrace.engines.migrate import shares_backends
from headrace.engines.postgres import PostgresConfig, PostgresPooled
from headrace.engines.sql import load_queries

SQL: Final = load_queries("headrace.cli")
POSTGRES_OLDEST: Final = 150000
"""The oldest version that the test matrix runs."""
POOLS: Final = ("api", "scheduler", "flusher")
"""Roles with a pool of `postgres.connections_max`."""
CONNECTIONS_USED_MAX: Final = 0.8
AGENT_CONNECTIONS: Final = 5
"""The pool of an agent, and its connection that listens."""
FLOATS_PER_CORE: Final = 2
"""Slots of an agent where `jobs.floats` is 0."""
IDLE_TX_S_MIN: Final = 10.0
"""A transaction of a busy process pauses between two statements; below this it is cut."""
TRANSACTION_S_MIN: Final = 600.0
"""A catalogue is applied in one transaction, which may take that long."""


async def check_postgres(app: App, engines: Engines) -> list[Finding]:
    """Version, durability, clock, pooler, limits of time, isolation, collation, connections."""
    found = await _check_pooler(app, engines)
    if found and found[0].state == "fail":
        return found
    before_s = time.time()
    row: Any = await engines.postgres.one(SQL.server_settings)
    offset_s = float(row["clock_s"]) - (before_s + time.time()) / 2
    async with engines.postgres.session() as session:
        rows = await session.all(SQL.harmful_settings)
    settings = {setting["name"]: setting for setting in rows}
    return [
        *check_version(row),
        *found,
        *check_durability(row),
        *check_timeouts(settings, app.config.section(PostgresConfig), row),
        *check_behavior(settings, row),
        *check_collation(row),
        *check_connections(app, row),
        _clock(offset_s),
    ]


async def _check_pooler(app: App, engines: Engines) -> list[Finding]:
    """Whether LISTEN and session locks work, and where statements and sessions lead."""
    config = app.config.section(PostgresConfig)
    try:
        is_shared = await shares_backends(engines.postgres)
    except PostgresPooled as error:
        return [Finding("pooler", "fail", error.text, "set postgres.direct_url")]
    if is_shared:
        name = "postgres.direct_url" if config.direct_url else "postgres.url"
        text = f"{name} leads to a pooler in transaction mode: LISTEN and session locks do not work"
        mend = "set postgres.direct_url (HEADRACE_POSTGRES_DIRECT_URL) to the server itself"
        return [Finding("pooler", "fail", text, mend)]
    if config.direct_url is None:
        return []
    async with engines.postgres.session() as session:
        direct = await session.value(SQL.server_identity)
    pooled = await engines.postgres.value(SQL.server_identity)
    if direct != pooled:
        text = f"postgres.url leads to {pooled}, postgres.direct_url to {direct}"
        return [Finding("pooler", "fail", text, "name the same database in both")]
    return [Finding("pooler", "ok", "statements through it, sessions to the server itself")]


def check_version(row: Any) -> list[Finding]:
    """Whether the server is one of those that are tested."""
    if row["version_number"] < POSTGRES_OLDEST:
        text = f"version {row['version']} is not supported"
        mend = f"use PostgreSQL {POSTGRES_OLDEST // 10000} or newer"
        return [Finding("postgres", "fail", text, mend)]
    return [Finding("postgres", "ok", f"version {row['version']} answers")]


def check_durability(row: Any) -> list[Finding]:
    """Settings that lose acknowledged work."""
    found = []
    for name in ("fsync", "full_page_writes", "synchronous_commit"):
        if row[name] == "off":
            text = f"{name} is off: an acknowledged job may be lost in a power cut"
            found.append(Finding("postgres", "fail", text, f"set {name} = on"))
    if row["standbys"] == "" and row["replicas"] > 0:
        text = "replication is asynchronous: a failover loses what was not yet sent"
        found.append(Finding("postgres", "warn", text, "set synchronous_standby_names"))
    return found


def check_timeouts(settings: dict[str, Any], config: PostgresConfig, row: Any) -> list[Finding]:
    """Limits of server, database or role that end statements, transactions or sessions of ours."""
    least_s = {
        "lock_timeout": (config.statement_timeout_s, "calls fail while a lock is held briefly"),
        "idle_in_transaction_session_timeout": (
            IDLE_TX_S_MIN,
            "a busy process loses its transaction",
        ),
        "transaction_timeout": (TRANSACTION_S_MIN, "a large catalogue is never applied"),
        "idle_session_timeout": (float("inf"), "agents lose the connection that listens"),
    }
    found = []
    for name, (needed_s, harm) in least_s.items():
        setting = settings.get(name)
        if setting is None or not 0 < float(setting["setting"]) / 1000 < needed_s:
            continue
        text = f"{name} is {float(setting['setting']) / 1000:g} s: {harm}"
        least = "0" if needed_s == float("inf") else f"{needed_s:.0f}s"
        found.append(Finding("timeouts", "warn", text, _fix(setting, row, least)))
    setting = settings["statement_timeout"]
    arrived = row["statement_timeout_source"] == "client"
    value_s = float(row["statement_timeout_ms"]) / 1000
    if not arrived and not 0 < value_s <= config.statement_timeout_s:
        limit = f"{value_s:g} s" if value_s else "unlimited"
        text = f"a pooler drops postgres.statement_timeout: statements run {limit}"
        mend = f"ALTER ROLE {row['role']} SET statement_timeout = '{config.statement_timeout_s:g}s'"
        found.append(Finding("timeouts", "warn", text, mend))
    return found


def check_behavior(settings: dict[str, Any], row: Any) -> list[Finding]:
    """Defaults of transactions that change what statements do."""
    wanted = {
        "default_transaction_isolation": ("read committed", "concurrent claims fail and repeat"),
        "default_transaction_read_only": ("off", "every write fails"),
    }
    found = []
    for name, (value, harm) in wanted.items():
        setting = settings[name]
        if setting["setting"] != value:
            text = f"{name} is {setting['setting']}: {harm}"
            found.append(Finding("transactions", "fail", text, _fix(setting, row, value)))
    return found


def check_collation(row: Any) -> list[Finding]:
    """Whether text is stored as Unicode, and sorted as its indexes were built."""
    found = []
    if row["encoding"] != "UTF8":
        text = f"database {row['database']} is in {row['encoding']}: names outside it fail or sort wrongly"
        mend = "make one with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0, then dump and restore"
        found.append(Finding("collation", "fail", text, mend))
    if row["collation_made"] != row["collation_now"]:
        name = row["database"]
        text = (
            f"database {name} was made with collation version {row['collation_made']}, the system has"
            f" {row['collation_now']}: indexes on text may miss rows"
        )
        mend = f"REINDEX DATABASE {name}; ALTER DATABASE {name} REFRESH COLLATION VERSION"
        found.append(Finding("collation", "fail", text, mend))
    return found


def check_connections(app: App, row: Any) -> list[Finding]:
    """Whether the server has room for the pools of one machine, and is not nearly full now."""
    config, jobs = app.config.section(PostgresConfig), app.config.sections["jobs"]
    slots = jobs.floats or FLOATS_PER_CORE * len(os.sched_getaffinity(0))
    needed = len(POOLS) * config.connections_max + AGENT_CONNECTIONS
    needed += slots * config.slot_connections_max
    room, used = int(row["connections_max"]), int(row["connections"])
    mend = f"set max_connections = {max(100, 2 * needed)}, or lower postgres.connections_max"
    if room < needed:
        text = f"{room} connections for this role, one machine with all roles may open {needed}"
        return [Finding("connections", "warn", text, mend)]
    if used > room * CONNECTIONS_USED_MAX:
        text = f"{used} of {room} connections are in use"
        return [Finding("connections", "warn", text, mend)]
    return [Finding("connections", "ok", f"{used} of {room} in use")]


def _clock(offset_s: float) -> Finding:
    if abs(offset_s) > 1:
        text = f"its clock differs from this machine's by {offset_s:.1f} s"
        return Finding("clock", "warn", text, "run a time service on both")
    return Finding("clock", "ok", f"within {abs(offset_s) * 1000:.0f} ms of PostgreSQL's")


def _fix(setting: Any, row: Any, value: str) -> str:
    """The statement that mends a setting where it is set."""
    name = setting["name"]
    places = {
        "database": f"ALTER DATABASE {row['database']} RESET {name}",
        "user": f"ALTER ROLE {row['role']} RESET {name}",
        "database user": f"ALTER ROLE {row['role']} IN DATABASE {row['database']} RESET {name}",
    }
    everywhere = f"ALTER SYSTEM SET {name} = '{value}'; SELECT pg_reload_conf()"
    return places.get(setting["source"], everywhere)
