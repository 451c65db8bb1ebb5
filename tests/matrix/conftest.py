"""Fixtures of the matrix: servers of a test's own and sites on them."""

from __future__ import annotations

import secrets

import pytest
from rooms import Rooms
from tests.kit.engines import engines_folder
from tests.kit.own_postgres import (
    PGBOUNCER,
    OwnPgbouncer,
    OwnPostgres,
    missing_server,
    run_statements,
)
from tests.kit.site import photo_host
from tests.kit.stock_valkey import StockValkey, program_of


@pytest.fixture
async def make_postgres(servers_folder):
    """`await make_postgres("15", jit="off")`: a server, or a skip if it is not installed."""
    servers: list[OwnPostgres] = []

    async def make(version: str, **settings: str) -> OwnPostgres:
        reason = missing_server(version)
        if reason:
            pytest.skip(reason)
        server = OwnPostgres(servers_folder / f"postgres{len(servers)}", version, **settings)
        servers.append(server)
        await server.make()
        await server.start()
        return server

    yield make
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
async def pooled_server():
    """One server for the poolers of a module."""
    reason = "PgBouncer is not installed" if PGBOUNCER is None else missing_server("16")
    if reason:
        pytest.skip(reason)
    with engines_folder() as folder:
        server = OwnPostgres(folder / "postgres", "16")
        await server.make()
        await server.start()
        yield server
        server.end()


@pytest.fixture
async def make_pooler(pooled_server, servers_folder):
    """`await make_pooler(pool_mode="session")`: URLs of a new database, pooled and direct."""
    poolers: list[OwnPgbouncer] = []

    async def make(**settings: str) -> tuple[str, str]:
        folder = servers_folder / f"pooler{len(poolers)}"
        poolers.append(OwnPgbouncer(folder, pooled_server, **settings))
        await poolers[-1].start()
        name = f"db_{secrets.token_hex(4)}"
        await run_statements(pooled_server.url, f"CREATE DATABASE {name}")
        urls = (poolers[-1].url, pooled_server.url)
        return tuple(url.replace("/postgres", f"/{name}") for url in urls)

    yield make
    for pooler in poolers:
        pooler.end()


@pytest.fixture
def make_valkey(servers_folder):
    """`make_valkey("redis7")`: a server, or a skip if it is not installed."""
    servers: list[StockValkey] = []

    def make(name: str, **settings: str) -> StockValkey:
        if program_of(name) is None:
            pytest.skip(f"{name} is not installed")
        servers.append(StockValkey(servers_folder / f"valkey{len(servers)}", name, **settings))
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        server.end()


@pytest.fixture
def make_rooms(tmp_path):
    """`make_rooms(HEADRACE_POSTGRES_URL=...)`: a site that runs on these engines."""
    made: list[Rooms] = []
    with photo_host() as (url, _):

        def make(**env: str) -> Rooms:
            rooms = Rooms(tmp_path / f"site{len(made)}", **env)
            rooms.origin = url
            made.append(rooms)
            rooms.up()
            return rooms

        yield make
        for rooms in made:
            rooms.end()
