"""Every room works on servers as they are installed: one scenario a room, through `headrace up`."""

from __future__ import annotations

import pytest
from rooms import ROOMS
from tests.kit.processes import HeadraceProcess
from tests.kit.stock_valkey import StockValkey, program_of

pytestmark = pytest.mark.slow


@pytest.fixture
def make_valkey(servers_folder):
    """`make_valkey("redis7")`: a server that answers, or a skip where none is installed."""
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


@pytest.mark.parametrize(
    ("postgres", "valkey"),
    [("15", "redis7"), ("16", "valkey9"), ("18", "valkey9"), ("15", "valkey8")],
)
async def test_all_rooms_work(make_postgres, make_valkey, make_rooms, postgres, valkey):
    hot = make_valkey(valkey)
    server = await make_postgres(postgres)
    rooms = make_rooms(HEADRACE_POSTGRES_URL=server.url, HEADRACE_VALKEY_URL=hot.url)
    for room in ROOMS:
        getattr(rooms, room)()


@pytest.mark.parametrize("valkey", ["valkey9", "redis7"])
def test_a_server_without_functions_is_refused_at_the_start(
    make_valkey, database_url, tmp_path, valkey
):
    hot = make_valkey(valkey, **{"rename-command": "FUNCTION OLDER"})
    urls = {"HEADRACE_POSTGRES_URL": database_url, "HEADRACE_VALKEY_URL": hot.url}
    started = HeadraceProcess(["up"], folder=tmp_path, env=urls)
    assert started.wait_exit() == 5
    assert "use Valkey 7.2, Redis 7.0 or newer" in started.out + started.err
