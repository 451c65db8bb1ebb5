"""Faults of servers that are not embedded.

A pooler, a pair of PostgreSQL, PostgreSQL with TLS, a cluster of Valkey.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.kit.certificates import EXPIRED, LOOPBACK, certificate
from tests.kit.chaos import ChaosProxy, Upstream
from tests.kit.own_cluster import OwnCluster, own_cluster
from tests.kit.own_postgres import (
    PGBOUNCER,
    SERVERS,
    OwnPgbouncer,
    OwnPostgres,
    missing_server,
    run_statements,
)
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines.embedded.identity import choose_identity
from headrace.engines.endpoints import Endpoints
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from verification.torture.site import Site

VERSION = "18"
ENCRYPTED = "15"
"""The distribution's: the wheel's servers are built without TLS."""
STREAMING = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"
RELOAD = "SELECT pg_reload_conf()"
SYNCHRONOUS = "ALTER SYSTEM SET synchronous_standby_names = '*'"
SYNC_STATE = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"


@dataclass(slots=True)
class Servers:
    """Endpoints with servers of a fault in place of embedded ones."""

    endpoints: Endpoints
    postgres: Postgres | None = None
    """A pool to another PostgreSQL than the embedded one."""
    is_cluster: bool = False
    is_encrypted: bool = False
    """Whether clients of PostgreSQL use TLS, which its proxy cannot read."""
    control: Any = None


def missing_encrypted() -> str | None:
    """Why PostgreSQL with TLS cannot be started here."""
    return missing_server(ENCRYPTED)


def missing_pgbouncer() -> str | None:
    """Why PgBouncer cannot be started here."""
    return None if PGBOUNCER else "pgbouncer is not installed"


@asynccontextmanager
async def pooled(folder: Path, endpoints: Endpoints) -> AsyncIterator[Servers]:
    """PgBouncer in session mode before the embedded PostgreSQL."""
    folder.mkdir(parents=True)
    with ChaosProxy(endpoints.postgres_url) as tcp:
        found = Upstream.of(tcp.url)
        identity = await choose_identity(folder, SERVERS[VERSION] / "postgres")
        server = SimpleNamespace(port=found.port, owner=identity.owner, launch=identity.launch)
        settings = {"pool_mode": "session", "ignore_startup_parameters": "statement_timeout"}
        sizes = {"default_pool_size": "90", "max_client_conn": "500"}
        pooler = OwnPgbouncer(folder / "pooler", server, **settings, **sizes)
        await pooler.start()
        url = found.url_at("127.0.0.1", pooler.port)
        try:
            yield Servers(replace(endpoints, postgres_url=url), control=pooler)
        finally:
            pooler.end()


async def restart_pooler(site: Site) -> float:
    """Kill PgBouncer and start it again."""
    began_s = time.monotonic()
    site.servers.control.end()
    await site.servers.control.start()
    site.doubt(began_s)
    return began_s


@asynccontextmanager
async def encrypted(folder: Path, endpoints: Endpoints) -> AsyncIterator[Servers]:
    """A PostgreSQL whose clients verify its certificate."""
    folder.mkdir(parents=True)
    root, ca_file = certificate("root"), folder / "root.pem"
    ca_file.write_bytes(root.pem)
    server = OwnPostgres(folder / "p", ENCRYPTED, ssl="on", max_connections="200")
    try:
        await server.make()
        await server.use_certificate(certificate("db", root, names=(LOOPBACK,)))
        await server.start()
        url = f"{server.url}?sslmode=verify-full&sslrootcert={ca_file}"
        async with migrated(url) as postgres:
            own = replace(endpoints, postgres_url=url)
            yield Servers(own, postgres, is_encrypted=True, control=(server, root))
    finally:
        server.end()


async def expire(site: Site) -> None:
    """Replace the certificate by an expired one for a while, and end all connections."""
    server, root = site.servers.control
    began_s = time.monotonic()
    old = certificate("db", root, names=(LOOPBACK,), valid_days=EXPIRED)
    await server.use_certificate(old)
    try:
        await server.end_connections()
        await site.pass_time(site.chance.uniform(0.3, 2.0))
    finally:
        await server.use_certificate(certificate("db", root, names=(LOOPBACK,)))
        site.doubt(began_s)


@asynccontextmanager
async def migrated(url: str) -> AsyncIterator[Postgres]:
    """A pool to the server of `url`, with all tables."""
    postgres = Postgres(url, PostgresConfig(connect_timeout_s=5.0, statement_timeout_s=5.0))
    try:
        await apply_migrations(postgres, PACKAGES)
        yield postgres
    finally:
        await postgres.close()


@asynccontextmanager
async def cluster(folder: Path, endpoints: Endpoints) -> AsyncIterator[Servers]:
    """A Valkey cluster of three primaries in place of the embedded Valkey."""
    folder.mkdir(parents=True)
    with own_cluster(folder) as running:
        yield Servers(replace(endpoints, valkey_url=running.url), is_cluster=True, control=running)


async def reshard(site: Site) -> None:
    """Move the hash slots of some keys that the rooms use."""
    running: OwnCluster = site.servers.control
    for _ in range(site.chance.randint(1, 4)):
        keys = [key for one in running.primaries for key in one.ask("SCAN", 0, "COUNT", 500)[1]]
        key = site.chance.choice(sorted(keys)).decode()
        owner = running.owner_of(key)
        to = site.chance.choice([one for one in running.primaries if one is not owner])
        moving = asyncio.ensure_future(asyncio.to_thread(running.move, key, to=to))
        await site.supervised(moving)


class Pair:
    """A primary with one standby; each failover makes a new standby."""

    def __init__(self, folder: Path, *, is_synchronous: bool) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._is_synchronous = is_synchronous
        self._made = 0
        self.primary = self._new()
        self.standby = self._new()
        self.has_standby = False

    def _new(self) -> OwnPostgres:
        self._made += 1
        folder = self._folder / f"p{self._made}"
        return OwnPostgres(folder, VERSION, max_connections="200")

    async def start(self) -> None:
        """Start both."""
        await self.primary.make()
        await self.primary.start()
        await self.follow()

    async def follow(self) -> None:
        """Start the standby; if it is synchronous, commits wait for it from then on."""
        await self.standby.copy(self.primary, name="standby")
        await self.standby.start()
        await wait_true(lambda: run_statements(self.primary.url, STREAMING), what="it streams")
        if self._is_synchronous:
            await run_statements(self.primary.url, SYNCHRONOUS)
            await run_statements(self.primary.url, RELOAD)
            await wait_true(lambda: run_statements(self.primary.url, SYNC_STATE), what="it is sync")
        self.has_standby = True

    async def cut_off(self) -> None:
        """Let the standby receive no further commit."""
        await run_statements(self.standby.url, "ALTER SYSTEM SET primary_conninfo = ''")
        await run_statements(self.standby.url, RELOAD)

        async def is_cut_off() -> bool:
            return not await run_statements(self.primary.url, STREAMING)

        await wait_true(is_cut_off, what="the standby receives nothing")

    async def promote(self) -> None:
        """Kill the primary and promote the standby."""
        self.primary.kill()
        await run_statements(self.standby.url, "SELECT pg_promote()")
        self.primary, self.standby = self.standby, self._new()
        self.has_standby = False

    def end(self) -> None:
        """End both."""
        self.primary.end()
        self.standby.end()


@asynccontextmanager
async def pair(folder: Path, endpoints: Endpoints) -> AsyncIterator[Servers]:
    """A primary and its synchronous standby, behind an address that leads to the primary."""
    async with _pair(Pair(folder, is_synchronous=True), endpoints) as servers:
        yield servers


@asynccontextmanager
async def lagging_pair(folder: Path, endpoints: Endpoints) -> AsyncIterator[Servers]:
    """A primary and its asynchronous standby, behind an address that leads to the primary."""
    async with _pair(Pair(folder, is_synchronous=False), endpoints) as servers:
        yield servers


@asynccontextmanager
async def _pair(servers: Pair, endpoints: Endpoints) -> AsyncIterator[Servers]:
    try:
        await servers.start()
        with ChaosProxy(servers.primary.url) as address:
            async with migrated(address.url) as postgres:
                own = replace(endpoints, postgres_url=address.url)
                yield Servers(own, postgres, control=(servers, address))
    finally:
        servers.end()


async def fail_over(site: Site) -> float:
    """Kill the primary and promote the standby; make one first if it has none."""
    servers, _ = site.servers.control
    if not servers.has_standby:
        await site.supervised(servers.follow())
    return await _promote(site)


async def fail_over_behind(site: Site) -> float:
    """Promote a standby that lacks the commits of the last seconds."""
    servers, _ = site.servers.control
    if not servers.has_standby:
        await site.supervised(servers.follow())
    await site.supervised(servers.cut_off())
    await site.pass_time(site.chance.uniform(0.5, 4.0))
    return await _promote(site)


async def _promote(site: Site) -> float:
    servers, address = site.servers.control
    began_s = time.monotonic()
    await servers.promote()
    address.lead_to(servers.primary.url)
    site.doubt(began_s)
    return began_s
