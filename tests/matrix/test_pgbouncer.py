"""PgBouncer in transaction mode: refused without the server's own URL, and supported with it.

`test_rooms` runs all rooms through it.
"""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from tests.kit.own_postgres import run_statements
from tests.kit.processes import HeadraceProcess

from headrace import Headrace
from headrace.app import PACKAGES
from headrace.cli.doctor_engines import check_postgres
from headrace.engines.migrate import apply_migrations, check_schema, shares_backends
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresPooled
from headrace.engines.sql import compile_query

pytestmark = pytest.mark.slow
IGNORED = {"ignore_startup_parameters": "statement_timeout"}
CHECK_INTERVAL = "SHOW client_connection_check_interval"
SLEEP = compile_query("sleep", "-- Hold a connection.\nSELECT pg_sleep(0.05), :number::bigint")


@pytest.mark.parametrize("settings", [{}, IGNORED])
async def test_without_the_servers_own_url_nothing_starts(
    make_pooler, running_engines, settings, tmp_path
):
    pooled, direct = await make_pooler(**settings)
    postgres = Postgres(pooled, PostgresConfig())
    with pytest.raises(PostgresPooled, match=r"set postgres\.direct_url"):
        await apply_migrations(postgres, PACKAGES)
    migrated = Postgres(direct, PostgresConfig())
    await apply_migrations(migrated, PACKAGES)
    await migrated.close()
    with pytest.raises(PostgresPooled, match=r"set postgres\.direct_url"):
        await check_schema(postgres, PACKAGES, version="0.1.0")
    await postgres.close()
    urls = {
        "HEADRACE_POSTGRES_URL": pooled,
        "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
    }
    started = HeadraceProcess(["scheduler"], folder=tmp_path, env=urls)
    assert started.wait_exit() == 5
    assert "HEADRACE_POSTGRES_DIRECT_URL" in started.out + started.err


async def test_a_pooler_in_session_mode_needs_no_other_url(make_pooler):
    pooled, _ = await make_pooler(pool_mode="session", **IGNORED)
    postgres = Postgres(pooled, PostgresConfig())
    assert not await shares_backends(postgres)
    await apply_migrations(postgres, PACKAGES)
    await check_schema(postgres, PACKAGES, version="0.1.0")
    await postgres.close()


async def test_statements_at_once_get_their_own_answers(make_pooler):
    pooled, direct = await make_pooler(default_pool_size="2")
    postgres = Postgres(pooled, PostgresConfig(direct_url=direct))

    async def ask(number: int) -> int:
        if number % 3:
            return (await postgres.one(SLEEP, number=number))[1]
        async with postgres.transaction() as tx:
            await tx.one(SLEEP, number=-number)
            return (await tx.one(SLEEP, number=number))[1]

    numbers = list(range(60))
    assert await asyncio.gather(*map(ask, numbers)) == numbers
    await postgres.close()


async def test_other_clients_of_the_pooler_get_none_of_our_settings(make_pooler):
    pooled, direct = await make_pooler(default_pool_size="1")
    postgres = Postgres(pooled, PostgresConfig(direct_url=direct))
    await postgres.one(SLEEP, number=1)
    other = await asyncpg.connect(pooled, statement_cache_size=0)
    own = await postgres.connect_unpooled()
    try:
        assert await other.fetchval(CHECK_INTERVAL) == "0"
        assert await own.fetchval(CHECK_INTERVAL) == "500ms"
    finally:
        await other.close()
        await own.close()
        await postgres.close()


def test_the_servers_own_url_alone_is_refused(tmp_path):
    env = {"HEADRACE_POSTGRES_DIRECT_URL": "postgresql://db/site"}
    started = HeadraceProcess(["scheduler"], folder=tmp_path, env=env)
    assert started.wait_exit() == 2
    assert "postgres.direct_url is set without postgres.url" in started.out + started.err


async def test_the_doctor_names_the_pooler_and_its_fix(
    make_pooler, pooled_server, running_engines, tmp_path
):
    pooled, direct = await make_pooler(**IGNORED)
    await run_statements(direct, "CREATE DATABASE other")

    async def look(url: str = pooled, **flags: str):
        own = {"postgres.url": url, "valkey.url": running_engines.endpoints.valkey_url}
        async with Headrace(flags={"data.folder": str(tmp_path), **own, **flags}) as app:
            found = await check_postgres(app, app.engines)
        return {one.subject: one for one in found}

    assert "pooler" not in await look(direct)
    [alone] = (await look()).values()
    assert (alone.subject, alone.state) == ("pooler", "fail")
    assert "postgres.direct_url" in alone.fix
    wrong = await look(**{"postgres.direct_url": f"{direct.rpartition('/')[0]}/other"})
    assert wrong["pooler"].fix == "use the same database in both"
    found = await look(**{"postgres.direct_url": direct})
    assert found["pooler"].state == "ok"
    assert "statement_timeout" in found["timeouts"].text
    await run_statements(direct, found["timeouts"].fix)
    # Connections that the pooler has open still have the old setting.
    await pooled_server.end_connections()
    assert "timeouts" not in await look(**{"postgres.direct_url": direct})
