"""Real engines for a test run: started once, with a migrated template and a database per test.

A copy of the template is faster than a migration, so each test gets its own database. Copies are
made of files rather than through the log. fsync is off: these engines survive no power cut.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.endpoints import Endpoints
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig

TEMPLATE: Final = "headrace_template"


@dataclass(frozen=True, slots=True)
class EnginesForTests:
    """Running engines whose PostgreSQL has the template database."""

    endpoints: Endpoints
    admin: Postgres
    """Kept open: a connect costs as much as a copy of a database."""

    def database_url(self, name: str) -> str:
        """The URL of a database on this server."""
        parts = urlsplit(self.endpoints.postgres_url)
        return urlunsplit(parts._replace(path=f"/{name}"))

    async def statement(self, text: str) -> None:
        """Run one statement on the server's own database."""
        async with self.admin.session() as session:
            await session.connection.execute(text)

    @asynccontextmanager
    async def database(self, *, template: str = TEMPLATE) -> AsyncIterator[str]:
        """A new database, dropped after the block; yields its URL."""
        name = f"test_{secrets.token_hex(6)}"
        await self.statement(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        try:
            yield self.database_url(name)
        finally:
            await self.statement(f"DROP DATABASE {name} WITH (FORCE)")


@asynccontextmanager
async def engines_for_tests(
    folder: Path, packages: tuple[str, ...]
) -> AsyncIterator[EnginesForTests]:
    """Start the embedded engines in `folder` and create the template of `packages`.

    `HEADRACE_POSTGRES_BIN` and `HEADRACE_VALKEY_BIN` name other programs than those of the wheels.
    """
    embedded = EmbeddedEngines(
        folder,
        durable=False,
        postgres_bin=os.environ.get("HEADRACE_POSTGRES_BIN") or None,
        valkey_bin=os.environ.get("HEADRACE_VALKEY_BIN") or None,
    )
    try:
        async with template_on(await embedded.start(), packages) as engines:
            yield engines
    finally:
        await embedded.stop()


@asynccontextmanager
async def template_on(
    endpoints: Endpoints, packages: tuple[str, ...]
) -> AsyncIterator[EnginesForTests]:
    """Create the template of `packages` on running engines."""
    admin = Postgres(endpoints.postgres_url, PostgresConfig())
    try:
        engines = EnginesForTests(endpoints, admin)
        await engines.statement(f"CREATE DATABASE {TEMPLATE}")
        template = Postgres(engines.database_url(TEMPLATE), PostgresConfig())
        await apply_migrations(template, packages)
        await template.close()
        yield engines
    finally:
        await admin.close()
