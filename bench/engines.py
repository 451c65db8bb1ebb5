"""The engines of one run: embedded, durable, in a scratch folder; a fresh database a cell; their
CPU and log.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from bench.children import cpu_of
from headrace.app import PACKAGES
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.endpoints import Endpoints
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.valkey import Valkey, ValkeyConfig

TEMPLATE = "bench_template"
FEED_MODULE = os.environ.get("FEED_MODULE")
"""The path of a built ZREVMERGE, the module with which the feed is compared; None: without it."""
_DURATION = re.compile(r"duration: ([\d.]+) ms +(?:execute|statement)[^\n]*?(\w*claim\w*)")


class BenchEngines:
    """PostgreSQL and Valkey, with the template database that holds our tables."""

    def __init__(self, folder: Path, embedded: EmbeddedEngines, endpoints: Endpoints) -> None:
        self.folder = folder
        self._embedded = embedded
        self.endpoints = endpoints
        self._reached_at: str | None = None

    @property
    def socket_folder(self) -> str:
        """Where libpq finds the server."""
        return parse_qs(urlsplit(self.endpoints.postgres_url).query)["host"][0]

    def database_url(self, name: str) -> str:
        """The URL of a database on this server."""
        parts = urlsplit(self.endpoints.postgres_url)
        query = parts.query
        if self._reached_at is not None:
            query = urlencode({**dict(parse_qsl(query)), "host": self._reached_at})
        return urlunsplit(parts._replace(path=f"/{name}", query=query))

    @contextmanager
    def reached_at(self, socket_folder: str) -> Iterator[None]:
        """Databases of the block are reached over a socket in another folder."""
        self._reached_at = socket_folder
        try:
            yield
        finally:
            self._reached_at = None

    @property
    def valkey_pid(self) -> int:
        """Valkey's process."""
        pid = self._embedded.valkey_pid
        assert pid is not None, "Valkey does not run"
        return pid

    @property
    def postgres_pid(self) -> int:
        """The first process of PostgreSQL."""
        pid = self._embedded.postgres_pid
        assert pid is not None, "PostgreSQL does not run"
        return pid

    def cpu_s(self) -> float:
        """CPU seconds of both servers so far."""
        pids = (self._embedded.postgres_pid, self._embedded.valkey_pid)
        return sum(cpu_of(pid) for pid in pids if pid is not None)

    async def run(self, text: str, database: str = "headrace") -> None:
        """One statement outside any transaction."""
        connection = await asyncpg.connect(self.database_url(database))
        try:
            await connection.execute(text, timeout=300)
        finally:
            await connection.close()

    async def versions(self) -> dict[str, str]:
        """Of both servers."""
        connection = await asyncpg.connect(self.endpoints.postgres_url)
        try:
            postgres = str(await connection.fetchval("SHOW server_version"))
        finally:
            await connection.close()
        valkey = Valkey(self.endpoints.valkey_url, ValkeyConfig())
        try:
            info = await valkey.command("INFO", "server")
        finally:
            await valkey.close()
        return {"postgresql": postgres, "valkey": str(info["valkey_version"])}

    @asynccontextmanager
    async def database(self, *, template: str = "template1") -> AsyncIterator[str]:
        """A database of its own, gone when the block ends; yields its name."""
        name = f"bench_{secrets.token_hex(4)}"
        await self.run(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
        try:
            yield name
        finally:
            await self.run(f"DROP DATABASE {name} WITH (FORCE)")

    async def settle(self, database: str) -> None:
        """Before each measured drain, for all alike: fresh statistics, nothing left to flush."""
        await self.run("ANALYZE", database)
        await self.run("CHECKPOINT")

    async def clear_valkey(self) -> None:
        """Empty the Valkey of this run."""
        valkey = Valkey(self.endpoints.valkey_url, ValkeyConfig())
        try:
            await valkey.command("FLUSHALL")
        finally:
            await valkey.close()

    async def log_durations(self, database: str, *, share: float) -> None:
        """Let the server log how long statements of `database` take, for a `share` of them."""
        for setting in (
            "log_min_duration_sample = 0",
            f"log_statement_sample_rate = {share}",
            "log_parameter_max_length = 0",
        ):
            await self.run(f"ALTER DATABASE {database} SET {setting}")

    def log_size(self) -> int:
        """How long the server's log is now."""
        return self._log.stat().st_size

    def claims_ms(self, since: int) -> list[float]:
        """Server time of the claims that were logged since, in ms."""
        with self._log.open("rb") as log:
            log.seek(since)
            text = log.read().decode(errors="replace")
        return [float(found[1]) for found in _DURATION.finditer(text)]

    @property
    def _log(self) -> Path:
        return self.folder / "logs" / "postgres.log"


@asynccontextmanager
async def bench_engines(folder: Path) -> AsyncIterator[BenchEngines]:
    """Start both engines in `folder` and make the template."""
    extra = {"loadmodule": FEED_MODULE} if FEED_MODULE else {}
    embedded = EmbeddedEngines(folder, durable=True, valkey_extra=extra)
    endpoints = await embedded.start()
    try:
        engines = BenchEngines(folder, embedded, endpoints)
        await engines.run(f"CREATE DATABASE {TEMPLATE}")
        template = Postgres(engines.database_url(TEMPLATE), PostgresConfig())
        await apply_migrations(template, PACKAGES)
        await template.close()
        yield engines
    finally:
        await embedded.stop()
