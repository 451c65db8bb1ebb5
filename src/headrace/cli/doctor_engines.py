"""Checks of `headrace doctor` on PostgreSQL, Valkey and object stores.

A PostgreSQL setting may come from the server's file, the database or the role; `pg_settings` names
the source, so a fix is the statement for that source. Settings of sessions are read on a direct
connection, settings of statements through the pool.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.cli.app_context import App
from headrace.engines import Engines
from headrace.engines.blobs import BlobChanged, Blobs
from headrace.engines.commit_wait import find_commit_wait
from headrace.engines.embedded.programs import POSTGRES_MAJOR_MIN
from headrace.engines.migrate import shares_backends
from headrace.engines.postgres import PostgresConfig
from headrace.engines.postgres_errors import PostgresPooled, SchemaBehind
from headrace.engines.sql import load_queries
from headrace.engines.valkey import Node, SentinelGroup
from headrace.kernel.errors import HeadraceError
from headrace.web.role_secrets import (
    RoleSecret,
    accepted_in,
    differing,
    fingerprints_of,
    read_secrets,
)

CHECK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry of the report; `state` is ok, warn or fail."""

    subject: str
    state: str
    text: str
    fix: str = ""


async def store_fault(store: Blobs) -> str:
    """What the store does wrong with a probe object; empty if nothing. Raises: BlobsDown."""
    key, data = f"headrace-probe-{secrets.token_hex(8)}", b"headrace"
    await store.put(key, data)
    try:
        if await store.get(key) != data:
            return "returns other bytes than were stored"
        if not await _refuses(store, key, None) or not await _refuses(store, key, '"another"'):
            return "ignores If-None-Match or If-Match"
        found = await store.read(key)
        if found is None or await _refuses(store, key, found[1]):
            return "refuses If-Match also with the right ETag"
    finally:
        await store.delete(key)
    return ""


async def _refuses(store: Blobs, key: str, etag: str | None) -> bool:
    """Whether the store refuses to replace an existing object that should have `etag`."""
    try:
        await store.put_if(key, b"replaced", etag=etag)
    except BlobChanged:
        return True
    return False


CONNECT_S: Final = 2.0
KEYS_FIX: Final = (
    "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and give these keys the rights get, put,"
    " delete and list on the bucket"
)
STORE_FIXES: Final = {
    "NoSuchBucket": "create the bucket, or correct blobs.url (HEADRACE_BLOBS_URL)",
    "RequestTimeTooSkewed": "run a time service on both machines",
    "AuthorizationHeaderMalformed": "correct AWS_REGION",
    "PermanentRedirect": "correct AWS_REGION",
    "401": KEYS_FIX,
    "403": KEYS_FIX,
}
"""By the S3 error code or HTTP status in the reason of a failure."""


async def store_finding(store: Blobs, reason: str) -> Finding:
    """Why a store failed or did not answer in time, with its address and the fix."""
    if store.endpoint is None:
        text = f"the folder {store.folder} did not answer in time"
        return Finding("blobs", "fail", text, "check its disk, or the server that it is mounted of")
    address, setting = store.endpoint.url, store.endpoint.setting
    for word, fix in STORE_FIXES.items():
        if word in reason.split():
            return Finding("blobs", "fail", f"the store at {address} answered {reason}", fix)
    if reason[:1].isdigit():
        return Finding("blobs", "fail", f"the store at {address} answered {reason}", "see its log")
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(store.endpoint.host, store.endpoint.port)
    except OSError as error:  # TimeoutError is one
        cause = f"no answer within {CONNECT_S:.0f} s" if isinstance(error, TimeoutError) else error
        text = f"the store at {address} accepts no connection ({cause})"
        return Finding("blobs", "fail", text, f"start it, or correct {setting}")
    writer.close()
    cause = f" ({reason})" if reason else " in time"
    text = f"the store at {address} accepts connections and does not answer requests{cause}"
    fix = (
        "if this lasts, see its log and that of a proxy before it, and check http:// or https:// in"
        f" {setting}"
    )
    return Finding("blobs", "fail", text, fix)


VALKEY_OLDEST: Final = {7: (7, 2, 11), 8: (8, 1, 6), 9: (9, 0, 3)}
REDIS_OLDEST: Final = {7: (7, 0, 0)}
"""Redis 7.0 added functions. Distributions patch security holes without a new version number."""
VALKEY_SETTINGS: Final = {
    "maxmemory-policy": (
        ("noeviction",),
        "fail",
        "a full server drops hits and parts of feeds silently",
    ),
    "appendonly": (("yes",), "fail", "a restart loses hits that were not flushed"),
    "appendfsync": (
        ("everysec", "always"),
        "warn",
        "a power cut loses hits of up to half a minute",
    ),
}
"""Accepted values, severity, and the effect of any other value."""
FEED_SETTINGS: Final = {
    "set-max-intset-entries": (131_072, "sets of authors take up to ten times the memory"),
    "zset-max-listpack-entries": (2_048, "posts of popular authors take twice the memory"),
}
"""Minimum values for the feed's index, and the effect of lower ones."""
SQL: Final = load_queries("headrace.cli")
SENTINELS_MIN: Final = 3
"""Two cannot form a majority without each other."""
POOLS: Final = ("api", "scheduler", "flusher")
"""Roles with a pool of `postgres.connections_max`."""
CONNECTIONS_USED_MAX: Final = 0.8
AGENT_CONNECTIONS: Final = 13
"""The pool of an agent, the pool for its slots' statements, and its LISTEN connection."""
FLOATS_PER_CORE: Final = 2
"""Slots of an agent per core if `jobs.floats` is 0."""
IDLE_TX_S_MIN: Final = 10.0
"""Minimum for busy processes, which pause between statements of a transaction."""
TRANSACTION_S_MIN: Final = 600.0
"""Minimum for large catalogues, which are applied in one transaction."""


async def check_postgres(app: App, engines: Engines) -> list[Finding]:
    """Check version, durability, clock, pooler, timeouts, isolation, collation, connections."""
    found = await _check_pooler(app, engines)
    if found and found[0].state == "fail":
        return found
    # The first statement opens the connection, which may take seconds.
    await engines.postgres.one(SQL.server_settings)
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
        *await _check_commits(engines),
        *check_timeouts(settings, app.config.section(PostgresConfig), row),
        *check_behavior(settings, row),
        *check_collation(row),
        *check_connections(app, row, await _running_roles(engines)),
        *await _check_replica(engines),
        _clock(offset_s),
    ]


async def _check_pooler(app: App, engines: Engines) -> list[Finding]:
    """Check that LISTEN and session locks work and both URLs name one database."""
    config = app.config.section(PostgresConfig)
    try:
        is_shared = await shares_backends(engines.postgres)
    except PostgresPooled as error:
        return [Finding("pooler", "fail", error.text, "set postgres.direct_url")]
    if is_shared:
        name = "postgres.direct_url" if config.direct_url else "postgres.url"
        text = f"{name} leads to a pooler in transaction mode: LISTEN and session locks do not work"
        fix = "set postgres.direct_url (HEADRACE_POSTGRES_DIRECT_URL) to the server itself"
        return [Finding("pooler", "fail", text, fix)]
    if config.direct_url is None:
        return []
    async with engines.postgres.session() as session:
        direct = await session.value(SQL.server_identity)
    pooled = await engines.postgres.value(SQL.server_identity)
    if direct != pooled:
        text = f"postgres.url leads to {pooled}, postgres.direct_url to {direct}"
        return [Finding("pooler", "fail", text, "use the same database in both")]
    return [
        Finding(
            "pooler",
            "ok",
            "statements go to postgres.url, LISTEN and session locks to postgres.direct_url",
        )
    ]


async def _check_commits(engines: Engines) -> list[Finding]:
    """Check that commits do not wait for a synchronous standby that is not connected."""
    waits = await find_commit_wait(engines.postgres)
    return [] if waits is None else [Finding("postgres", "fail", waits.text, waits.fix)]


async def _check_replica(engines: Engines) -> list[Finding]:
    """Check that `postgres.replica_url` is a standby that is not late."""
    if engines.postgres.replica is None:
        return []
    state = await engines.postgres.replica.state()
    text = f"series, top lists and lists are read from the {state.text}"
    fix = "" if state.is_used else "correct postgres.replica_url, or check the standby"
    return [Finding("replica", "ok" if state.is_used else "warn", text, fix)]


def check_version(row: Any) -> list[Finding]:
    """Check that the server version is supported."""
    if row["version_number"] < POSTGRES_MAJOR_MIN * 10_000:
        text = f"version {row['version']} is not supported"
        fix = f"use PostgreSQL {POSTGRES_MAJOR_MIN} or newer"
        return [Finding("postgres", "fail", text, fix)]
    return [Finding("postgres", "ok", f"version {row['version']} responds")]


def check_durability(row: Any) -> list[Finding]:
    """Check for settings that lose acknowledged work."""
    found = []
    for name in ("fsync", "full_page_writes", "synchronous_commit"):
        if row[name] == "off":
            text = f"{name} is off: a power cut may lose acknowledged jobs"
            found.append(Finding("postgres", "fail", text, f"set {name} = on"))
    if row["standbys"] == "" and row["replicas"] > 0:
        text = "replication is asynchronous: a failover may lose recent work"
        found.append(Finding("postgres", "warn", text, "set synchronous_standby_names"))
    return found


def check_timeouts(settings: dict[str, Any], config: PostgresConfig, row: Any) -> list[Finding]:
    """Check for timeouts that would end statements, transactions or sessions."""
    least_s = {
        "lock_timeout": (config.statement_timeout_s, "calls fail on short lock waits"),
        "idle_in_transaction_session_timeout": (
            IDLE_TX_S_MIN,
            "busy processes lose transactions",
        ),
        "transaction_timeout": (TRANSACTION_S_MIN, "large catalogues cannot be applied"),
        "idle_session_timeout": (float("inf"), "agents lose their LISTEN connection"),
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
        text = f"a pooler drops postgres.statement_timeout: the limit is {limit}"
        fix = f"ALTER ROLE {row['role']} SET statement_timeout = '{config.statement_timeout_s:g}s'"
        found.append(Finding("timeouts", "warn", text, fix))
    return found


def check_behavior(settings: dict[str, Any], row: Any) -> list[Finding]:
    """Check transaction defaults that change the effect of statements."""
    accepted = {
        "default_transaction_isolation": ("read committed", "concurrent claims fail and retry"),
        "default_transaction_read_only": ("off", "every write fails"),
    }
    found = []
    for name, (value, harm) in accepted.items():
        setting = settings[name]
        if setting["setting"] != value:
            text = f"{name} is {setting['setting']}: {harm}"
            found.append(Finding("transactions", "fail", text, _fix(setting, row, value)))
    return found


def check_collation(row: Any) -> list[Finding]:
    """Check encoding and collation version."""
    found = []
    if row["encoding"] != "UTF8":
        text = (
            f"database {row['database']} is in {row['encoding']}: names outside it fail or sort"
            " wrongly"
        )
        fix = (
            "make one with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0, then dump and"
            " restore"
        )
        found.append(Finding("collation", "fail", text, fix))
    if row["collation_made"] != row["collation_now"]:
        name = row["database"]
        text = (
            f"database {name} was made with collation version {row['collation_made']}, the system"
            " has"
            f" {row['collation_now']}: indexes on text may miss rows"
        )
        fix = f"REINDEX DATABASE {name}; ALTER DATABASE {name} REFRESH COLLATION VERSION"
        found.append(Finding("collation", "fail", text, fix))
    return found


async def _running_roles(engines: Engines) -> list[RoleSecret]:
    """The running roles of all hosts; none before the first migration."""
    try:
        return await read_secrets(engines.postgres)
    except SchemaBehind:
        return []


def check_connections(app: App, row: Any, running: Sequence[RoleSecret]) -> list[Finding]:
    """Check that max_connections suffices for one machine, or all of those that run, and is not
    nearly used up. Slots are counted as on this machine.
    """
    config, jobs = app.config.section(PostgresConfig), app.config.sections["jobs"]
    slots = jobs.floats or FLOATS_PER_CORE * len(os.sched_getaffinity(0))
    role_max = dict.fromkeys(POOLS, config.connections_max)
    role_max["agent"] = AGENT_CONNECTIONS + slots * config.slot_connections_max
    one = sum(role_max.values())
    needed = max(one, sum(role_max.get(each.role, 0) for each in running))
    room, used = int(row["connections_max"]), int(row["connections"])
    fix = f"set max_connections = {max(100, 2 * needed)}, or lower postgres.connections_max"
    if room < needed:
        hosts = len({each.host for each in running})
        who = "one machine with all roles" if needed == one else f"the roles of {hosts} hosts"
        text = f"{room} connections available to this role; {who} may need {needed}"
        return [Finding("connections", "warn", text, fix)]
    if used > room * CONNECTIONS_USED_MAX:
        text = f"{used} of {room} connections are in use"
        return [Finding("connections", "warn", text, fix)]
    return [Finding("connections", "ok", f"{used} of {room} in use")]


def _clock(offset_s: float) -> Finding:
    if abs(offset_s) > 1:
        text = f"PostgreSQL's clock differs from this machine's by {offset_s:.1f} s"
        return Finding("clock", "warn", text, "run a time service on both machines")
    return Finding("clock", "ok", f"within {abs(offset_s) * 1000:.0f} ms of PostgreSQL's")


def _fix(setting: Any, row: Any, value: str) -> str:
    """The statement that changes a setting at its source."""
    name = setting["name"]
    places = {
        "database": f"ALTER DATABASE {row['database']} RESET {name}",
        "user": f"ALTER ROLE {row['role']} RESET {name}",
        "database user": f"ALTER ROLE {row['role']} IN DATABASE {row['database']} RESET {name}",
    }
    everywhere = f"ALTER SYSTEM SET {name} = '{value}'; SELECT pg_reload_conf()"
    return places.get(setting["source"], everywhere)


async def check_valkey(engines: Engines) -> list[Finding]:
    """Check version, eviction policy and persistence of every primary."""
    if not await engines.valkey.is_cluster():
        [node] = await engines.valkey.primaries()
        found = await check_valkey_node(node, "valkey")
        if engines.valkey.sentinels is not None:
            found += await check_sentinels(engines.valkey.sentinels, node)
        return found
    nodes = await engines.valkey.primaries()
    found = [Finding("valkey", "ok", f"a cluster of {len(nodes)} primaries")]
    for node in nodes:
        subject = f"valkey {node.server}"
        try:
            found += await check_valkey_node(node, subject)
            found += await check_cluster_state(node, subject)
        except HeadraceError as error:
            found.append(Finding(subject, "fail", error.text, "start it, or fail over"))
    return found


async def check_valkey_node(node: Node, subject: str) -> list[Finding]:
    """Check version, eviction policy and persistence of one server."""
    info = await node.command("INFO", "server")
    product = "valkey" if "valkey_version" in info else "redis"
    version = str(info[f"{product}_version"])
    parts = tuple(int(part) for part in version.split(".")[:3])
    known = VALKEY_OLDEST if product == "valkey" else REDIS_OLDEST
    oldest = known.get(parts[0], known[max(known)])
    found = [Finding(subject, "ok", f"{product.title()} {version} responds")]
    if parts < oldest:
        text = (
            f"{product.title()} {version} is too old: it has known vulnerabilities or lacks"
            " functions"
        )
        needed = ".".join(str(part) for part in oldest)
        found = [Finding(subject, "fail", text, f"use {needed} or newer")]
    for name, (accepted, state, harm) in VALKEY_SETTINGS.items():
        present = await _valkey_setting(node, name)
        if present not in accepted:
            fix = f"CONFIG SET {name} {accepted[0]}, and the same in the server's file"
            found.append(Finding(subject, state, f"{name} is {present}: {harm}", fix))
    for name, (least, cost) in FEED_SETTINGS.items():
        present = await _valkey_setting(node, name)
        if int(present) < least:
            text = f"{name} is {present}: the feed's {cost}"
            fix = f"set {name} {least}, then `headrace feed rebuild`"
            found.append(Finding(subject, "warn", text, fix))
    return found


async def check_sentinels(sentinels: SentinelGroup, primary: Node) -> list[Finding]:
    """Check that a failover can happen, and that a replaced primary refuses writes."""
    state = await sentinels.state()
    count, replicas = int(state["num-other-sentinels"]) + 1, int(state["num-slaves"])
    address = f"{state['ip']}:{state['port']}"
    text = f"{count} Sentinels report {sentinels.name} at {address}, with {replicas} replicas"
    found = [Finding("valkey sentinel", "ok", text)]
    if count < SENTINELS_MIN or not replicas:
        fix = f"run {SENTINELS_MIN} Sentinels on different hosts, and a replica"
        found = [Finding("valkey sentinel", "warn", f"{text}: no failover if a host fails", fix)]
    if await _valkey_setting(primary, "min-replicas-to-write") == "0":
        text = "min-replicas-to-write is 0: a primary that is cut off accepts writes that it loses"
        fix = "CONFIG SET min-replicas-to-write 1, and the same in each server's file"
        found.append(Finding("valkey sentinel", "warn", text, fix))
    return found


async def check_cluster_state(node: Node, subject: str) -> list[Finding]:
    """Check that a primary serves its keys, also while another primary is down."""
    info = _text(await node.command("CLUSTER", "INFO"))
    if "cluster_state:ok" not in info:
        fix = "check `CLUSTER NODES` there for a hash slot without primary or a lost connection"
        return [Finding(subject, "fail", "cluster_state is fail: it serves no key", fix)]
    if await _valkey_setting(node, "cluster-require-full-coverage") == "yes":
        text = "cluster-require-full-coverage is yes: one failed primary stops the whole cluster"
        return [Finding(subject, "warn", text, "set cluster-require-full-coverage no")]
    return []


async def _valkey_setting(node: Node, name: str) -> str:
    reply = await node.command("CONFIG", "GET", name)
    return str(reply.get(name)) if isinstance(reply, dict) else _text(reply[1])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def check_secrets(app: App, engines: Engines) -> list[Finding]:
    """Check that the roles of all hosts and this command have the same root secret."""
    found = await read_secrets(engines.postgres)
    if os.environ.get("HEADRACE_SECRET") or (app.data_folder / "secret").exists():
        accepted = app.config.sections["media"].accepted_secrets
        fingerprint, others = fingerprints_of(app.secret, accepted)
        found.append(
            RoleSecret(
                host=socket.gethostname(),
                role="this command",
                fingerprint=fingerprint,
                accepted=accepted_in(others),
            )
        )
    fix = (
        "set the same HEADRACE_SECRET on every host and restart its roles: others refuse its URLs"
        " and cursors"
    )
    odd = [Finding("secret", "fail", text, fix) for text in differing(found).values()]
    hosts = {one.host for one in found}
    if odd or len(hosts) < 2:
        return odd
    return [Finding("secret", "ok", f"HEADRACE_SECRET is the same on {len(hosts)} hosts")]
