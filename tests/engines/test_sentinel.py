"""Sentinel: both clients follow the primary that Sentinels report, and errors name the cause."""

from __future__ import annotations

import asyncio
import secrets
from types import SimpleNamespace

import pytest
from tests.kit.own_sentinels import NAME, sentinel_servers
from tests.kit.waiting import wait_true

from headrace.cli.doctor_engines import check_valkey
from headrace.engines.endpoints import masked_url, parse_valkey_url, split_sentinels
from headrace.engines.multiplex import Multiplexer
from headrace.engines.valkey import Valkey, ValkeyConfig, ValkeyDown


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers and two Sentinels on loopback, all with a password."""
    folder = tmp_path_factory.mktemp("sentinel")
    with sentinel_servers(folder, count=2, password="a-word") as servers:
        yield servers


@pytest.fixture
async def connect():
    """Both clients of a URL: multiplexed and pooled."""
    opened = []

    def make(url):
        config = ValkeyConfig(prefix=f"test-{secrets.token_hex(4)}")
        opened.extend([Multiplexer(url, config), Valkey(url, config)])
        return opened[-2:]

    yield make
    for client in opened:
        await client.close()


def test_a_url_names_sentinels_and_their_primary():
    url = "valkeys://me:pw@a,b:5/2?sentinel=main&ssl_cert_reqs=none&sentinel_password=p%40w"
    rest, found = split_sentinels(parse_valkey_url(url))
    assert rest == "valkeys://me:pw@a,b:5/2?ssl_cert_reqs=none"
    login = "valkeys://:p%40w@"
    ends = "?ssl_cert_reqs=none"
    assert (found.name, found.urls) == ("main", (f"{login}a:26379{ends}", f"{login}b:5{ends}"))
    assert found.server == "main (Sentinels a:26379,b:5)"
    assert "p%40w" not in masked_url(url)
    assert split_sentinels("valkey://a,b?db=1") == ("valkey://a,b?db=1", None)


@pytest.mark.parametrize(
    "url",
    [
        "valkey://a?sentinel=",
        "valkey://a?sentinel=two%20words",
        "valkey://a?sentinel_password=x",
        "valkey://a,,b?sentinel=main",
        "valkey://?sentinel=main",
        "unix:///run/s?sentinel=main",
        "http://a?sentinel=main",
    ],
)
def test_a_url_without_sentinels_or_their_primary_is_refused(url):
    with pytest.raises(ValueError, match="a URL"):
        parse_valkey_url(url)


@pytest.mark.slow
async def test_both_clients_follow_a_switchover(servers, connect):
    clients = connect(servers.url)
    old = servers.primary()
    for client in clients:
        await client.command("SET", "{s}:before", "1")
    assert not await clients[1].is_cluster()
    # Replication is asynchronous.
    await wait_true(
        lambda: [one.command("GET", "{s}:before") for one in servers.servers] == [b"1"] * 2
    )
    servers.switch_over()
    new, _ = await asyncio.to_thread(servers.wait_primary, other_than=old)
    for number, client in enumerate(clients):

        async def is_written(client=client, key=f"{{s}}:after{number}"):
            try:
                return await client.command("SET", key, "1") in (b"OK", True)
            except ValkeyDown:
                return False

        await wait_true(is_written, what="a write is accepted")
        assert new.command("GET", f"{{s}}:after{number}") == b"1"
        assert await client.command("GET", "{s}:before") == b"1"


@pytest.mark.slow
async def test_the_doctor_reports_what_a_failover_lacks(servers, connect):
    _, valkey = connect(servers.url)
    await wait_true(servers.is_whole, what="both servers are replicated")
    look = lambda: check_valkey(SimpleNamespace(valkey=valkey))  # noqa: E731
    [_, found] = await look()
    assert (found.subject, found.state) == ("valkey sentinel", "warn")
    assert found.text.startswith(f"2 Sentinels report {NAME} at {servers.primary().address}, ")
    primary = servers.primary()
    assert primary.command("CONFIG", "SET", "min-replicas-to-write", "0") == b"OK"
    [_, _, found] = await look()
    assert primary.command("CONFIG", "SET", "min-replicas-to-write", "1") == b"OK"
    assert found.text.startswith("min-replicas-to-write is 0: ")


@pytest.mark.slow
async def test_errors_name_the_sentinels_and_the_primary(servers, connect):
    url = servers.url
    seeds = url.partition("@")[2].partition("/")[0]
    plain = url.replace(seeds, servers.primary().address)
    for wrong, reason in {
        url.replace(f"sentinel={NAME}", "sentinel=another"): "no primary was found for another",
        url.replace("sentinel_password=", "sentinel_password=x"): "AuthenticationError",
        plain: "a server of the URL is no Sentinel",
    }.items():
        for client in connect(wrong):
            with pytest.raises(ValkeyDown, match=reason) as failed:
                await client.command("PING")
            assert servers.servers[0].password not in failed.value.text


@pytest.mark.slow
async def test_a_sentinel_that_is_down_is_passed_over(servers, connect):
    url = servers.url.replace("@", "@127.0.0.1:1,")
    for client in connect(url):
        assert await client.command("PING") in (b"PONG", True)
