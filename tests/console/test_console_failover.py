"""The console while the primary of PostgreSQL is lost and no standby is promoted yet."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack, nullcontext
from functools import partial

import pytest
from served import app_of, serving, visiting
from tests.kit.own_postgres import OwnPostgres
from tests.kit.own_s3 import client_env
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines.endpoints import Endpoints
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig

pytestmark = pytest.mark.slow


NAMED = (
    "2 of 3 servers answer, as standbys; 1 does not respond in time. A failover may be under way"
)


async def shows(visitor, text):
    """Whether the overview has the text."""
    return text in (await visitor.get("/console")).text


@pytest.mark.parametrize("is_silent", [False, True], ids=["killed", "silent"])
async def test_each_console_of_a_site_with_three_servers_names_a_failover(
    tmp_path, servers_folder, is_silent
):
    """The primary was the first server of each; killed it refuses, silent it answers nothing."""
    # The cleanup of another run may remove a segment of shared memory that is new.
    memory = {"dynamic_shared_memory_type": "mmap"}
    servers = [OwnPostgres(servers_folder / name, "18", **memory) for name in "pqr"]
    primary, *standbys = servers
    await primary.make()
    await primary.start()
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.callback(server.end)
        postgres = Postgres(primary.url, PostgresConfig())
        await apply_migrations(postgres, PACKAGES)
        await postgres.close()
        for number, standby in enumerate(standbys):
            await standby.copy(primary, name=f"standby{number}")
            await standby.start()
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        visitors = []
        for name in ("a", "b"):
            url = f"postgresql://headrace@{hosts}/postgres"
            endpoints = Endpoints(url, f"unix://{tmp_path}/none", "file:///nowhere")
            app = app_of(tmp_path / name, endpoints)
            address = await stack.enter_async_context(serving(app))
            visitors.append(await stack.enter_async_context(visiting(app, address)))
        for visitor in visitors:
            assert not await shows(visitor, "as standbys")
        with primary.frozen() if is_silent else nullcontext():
            if not is_silent:
                primary.kill()
            for visitor in visitors:
                await wait_true(partial(shows, visitor, NAMED), what="each console names it")
            # It stays named while the page is read again and again.
            for visitor in visitors * 3:
                assert await shows(visitor, NAMED)
            standbys[0].run("pg_ctl", "promote", "-D", standbys[0].data)
            for visitor in visitors:

                async def is_over(visitor=visitor):
                    return not await shows(visitor, "PostgreSQL is down")

                await wait_true(is_over, what="each console shows its end")


async def test_health_states_of_a_silent_object_store_what_readyz_states(
    tmp_path, database_url, monkeypatch
):
    """It accepts connections and answers nothing, as a host whose network is cut."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in client_env(silent.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        app = app_of(tmp_path, Endpoints(database_url, f"unix://{tmp_path}/none", "s3://site"))
        async with serving(app) as address, visiting(app, address) as at:
            engines = (await at.get("/readyz")).json()["engines"]
            page = (await at.get("/console")).text
    assert engines["blobs"] == "down"
    assert "object store is down" in page
    assert "answers slowly" not in page


async def test_a_host_that_reaches_half_of_the_servers_is_no_proof_of_a_failover(
    tmp_path, servers_folder
):
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
                assert "failover" not in page
                return "1 of 2 servers answers, as a standby; 1 does not respond in time" in page

            await wait_true(is_named, what="the console names it")
            standby.run("pg_ctl", "promote", "-D", standby.data)

            async def is_over():
                return "as a standby" not in (await at.get("/console")).text

            await wait_true(is_over, what="the console shows its end")
    finally:
        primary.end()
        standby.end()
