"""Doctor checks of Valkey and Redis: each harmful setting is found, and its fix works."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from tests.kit.stock_valkey import SERVERS, StockValkey, program_of

from headrace import Headrace
from headrace.cli import doctor_engines
from headrace.cli.doctor import failed
from headrace.cli.doctor_engines import check_valkey
from headrace.engines.multiplex import Multiplexer
from headrace.engines.valkey import Valkey, ValkeyConfig, ValkeyDown

GOOD = {
    "appendonly": "yes",
    "set-max-intset-entries": "131072",
    "zset-max-listpack-entries": "2048",
}


@pytest.fixture(params=SERVERS)
async def make(request, servers_folder):
    """`make(appendonly="no")`: a server with these settings, and its doctor's findings."""
    if program_of(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    opened = []

    async def start(**settings):
        server = StockValkey(servers_folder / f"valkey{len(opened)}", request.param, **settings)
        server.start()
        valkey = Valkey(server.url, ValkeyConfig())
        opened.append((server, valkey))

        async def look():
            return await check_valkey(SimpleNamespace(valkey=valkey))

        return server, look

    yield start
    for server, valkey in opened:
        await valkey.close()
        server.end()


async def test_a_missing_password_is_named(make):
    server, look = await make()
    admin = Valkey(server.url, ValkeyConfig())
    [node] = await admin.primaries()
    await node.command("CONFIG", "SET", "requirepass", "secret")
    await admin.close()
    wrong = server.url.replace("://", "://:wrong@")
    shared = [Multiplexer(url, ValkeyConfig()) for url in (server.url, wrong)]
    for call in (look, *(partial(one.command, "GET", "a") for one in shared)):
        with pytest.raises(ValkeyDown) as caught:
            await call()
        finding = failed(Headrace(flags={"valkey.url": wrong}).config, "valkey", caught.value)
        assert "refuses the password" in finding.text
        assert "set user and password in valkey.url" in finding.text
        assert "headrace doctor" not in finding.text + finding.fix
    for one in shared:
        await one.close()


async def test_a_stock_configuration_fails(make):
    _, look = await make()
    first, *found = await look()
    assert first.state == "ok"
    texts = [one.text.partition(":")[0] for one in found]
    assert "appendonly is no" in texts
    assert "maxmemory-policy is noeviction" not in texts


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("maxmemory-policy", "allkeys-lru", "fail"),
        ("appendonly", "no", "fail"),
        ("appendfsync", "no", "warn"),
    ],
)
async def test_a_harmful_setting_is_found_and_fixed(make, name, value, state):
    server, look = await make(**{**GOOD, name: value})
    _, finding = await look()
    assert finding.state == state
    assert finding.text.startswith(f"{name} is {value}: ")
    command, *words = finding.fix.partition(",")[0].split()
    assert server.command(command, *words) == b"OK"
    assert [one.state for one in await look()] == ["ok"]


async def test_an_old_server_fails(make, monkeypatch):
    for known in ("VALKEY_OLDEST", "REDIS_OLDEST"):
        monkeypatch.setattr(doctor_engines, known, {99: (99, 1, 2)})
    _, look = await make(**GOOD)
    [finding] = await look()
    assert finding.state == "fail"
    assert finding.fix == "use 99.1.2 or newer"
