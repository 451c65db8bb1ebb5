"""The console while the primary of PostgreSQL is lost and no standby is promoted yet."""

from __future__ import annotations

import pytest
from served import app_of, serving, visiting
from tests.kit.own_postgres import OwnPostgres
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines.endpoints import Endpoints
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig

pytestmark = pytest.mark.slow


async def test_a_failover_is_named(tmp_path, servers_folder):
    primary = OwnPostgres(servers_folder / "p", "18")
    standby = OwnPostgres(servers_folder / "s", "18")
    await primary.make()
    await primary.start()
    try:
        postgres = Postgres(primary.url, PostgresConfig())
        await apply_migrations(postgres, PACKAGES)
        await postgres.close()
        await standby.copy(primary, name="standby")
        await standby.start()
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = f"postgresql://headrace@{hosts}/postgres"
        app = app_of(tmp_path, Endpoints(url, f"unix://{tmp_path}/none", "file:///nowhere"))
        async with serving(app) as address, visiting(app, address) as at:
            assert "failover" not in (await at.get("/console")).text
            primary.kill()

            async def is_named():
                page = (await at.get("/console")).text
                return "1 server answers as a standby and none is the primary" in page

            await wait_true(is_named, what="the console names it")
            standby.run("pg_ctl", "promote", "-D", standby.data)

            async def is_over():
                return "none is the primary" not in (await at.get("/console")).text

            await wait_true(is_over, what="the console shows its end")
    finally:
        primary.end()
        standby.end()
