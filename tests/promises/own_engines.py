"""A fleet on a PostgreSQL of its own, to be killed or frozen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from recorded_fleet import RecordedFleet

from headrace.app import PACKAGES
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig


@asynccontextmanager
async def fleet_on_own_engines(
    folder: Path,
    *,
    durable: bool,
    timeout_s: float = 5.0,
    kind: type[RecordedFleet] = RecordedFleet,
) -> AsyncIterator[tuple[Any, EmbeddedEngines]]:
    """No process yet, and the engines; all of it ends with the block. `timeout_s`.

    Of this process's statements.
    """
    engines = EmbeddedEngines(folder / "data", durable=durable)
    endpoints = await engines.start()
    try:
        config = PostgresConfig(connect_timeout_s=timeout_s, statement_timeout_s=timeout_s)
        postgres = Postgres(endpoints.postgres_url, config)
        await apply_migrations(postgres, PACKAGES)
        fleet = kind(
            folder / "fleet",
            postgres,
            postgres_url=endpoints.postgres_url,
            valkey_url=endpoints.valkey_url,
        )
        try:
            yield fleet, engines
        finally:
            fleet.end()
            await postgres.close()
    finally:
        await engines.stop()
