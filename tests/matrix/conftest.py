"""Fixtures of the matrix: servers of a test's own and sites on them."""

from __future__ import annotations

import pytest
from rooms import Rooms, photo_host
from tests.kit.own_postgres import OwnPostgres, missing_server


@pytest.fixture
async def make_postgres(servers_folder):
    """`await make_postgres("15", jit="off")`.

    A server that answers, or a skip where none is installed.
    """
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


@pytest.fixture
def make_rooms(tmp_path):
    """`make_rooms(HEADRACE_POSTGRES_URL=...)`: a site that runs on these engines."""
    made: list[Rooms] = []
    with photo_host() as origin:

        def make(**env: str) -> Rooms:
            rooms = Rooms(tmp_path / f"site{len(made)}", origin, **env)
            made.append(rooms)
            rooms.up()
            return rooms

        yield make
        for rooms in made:
            rooms.end()
