"""One process under overload: idle connections close, and no address or token uses all."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager

import pytest

from headrace.web.limits import CHARGE, Quotas, end_charge, headers_of_charge, network_of
from headrace.web.model import RateLimited, TooManyRequestsOpen, WebConfig
from headrace.web.tokens import Caller

NEXT = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW = NEXT.replace(b"healthz", b"v1/slow")
OTHER = ("127.0.0.2", 0)


class Line:
    """One connection to a server."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def ask(self, request=NEXT):
        """The status of an answer; 0: the connection was closed instead."""
        self.writer.write(request)
        return await self.status()

    async def status(self):
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        await self.reader.readexactly(length)
        return int(head.split()[1])


@asynccontextmanager
async def lines(at, count, *, local=None):
    """So many open connections from an address."""
    opened = [
        Line(*await asyncio.open_connection(at.host, at.port, local_addr=local))
        for _ in range(count)
    ]
    try:
        yield opened
    finally:
        for line in opened:
            line.writer.close()


async def test_idle_connections_give_way_to_new_ones(make_app, serving):
    """1,024 idle connections lock no client out; the longest idle one closes first."""
    async with (
        serving(make_app(connections_max=20, connections_per_address=20)) as at,
        lines(at, 20) as held,
    ):
        for line in held[1:]:
            assert await line.ask() == 200
        for line in held[2:]:
            assert await line.ask() == 200
        async with lines(at, 2) as new:
            assert [await line.ask() for line in new] == [200, 200]
            assert [await line.ask() for line in held[2:]] == [200] * 18
        assert [await line.ask() for line in held[:2]] == [0, 0]


async def test_idle_connections_of_one_address_give_way_to_its_own(make_app, serving):
    async with (
        serving(make_app(connections_max=20, connections_per_address=3)) as at,
        lines(at, 1, local=OTHER) as [outsider],
        lines(at, 3) as held,
    ):
        assert await outsider.ask() == 200
        for line in held:
            assert await line.ask() == 200
        async with lines(at, 1) as [new]:
            assert await new.ask() == 200
        assert [await line.ask() for line in held] == [0, 200, 200]
        assert await outsider.ask() == 200


async def test_heads_that_never_end_give_way_after_idle_ones(make_app, serving):
    app = make_app(connections_max=3, connections_per_address=3)
    async with (
        serving(app) as at,
        lines(at, 2) as slow,
        lines(at, 1) as [idle],
    ):
        for line in slow:
            line.writer.write(NEXT[:30])
        assert await idle.ask() == 200
        async with lines(at, 1) as [first]:
            assert await first.ask() == 200
            assert await idle.ask() == 0
            first.writer.write(SLOW)
            await app.shop.reached.wait()
            async with lines(at, 1) as [second]:
                assert await second.ask() == 200
                assert await slow[0].ask(NEXT[30:]) == 0


async def test_connections_in_use_stay_and_one_address_cannot_take_all(make_app, serving, talk):
    app = make_app(connections_max=3, connections_per_address=2)
    async with (
        serving(app) as at,
        lines(at, 2) as held,
        lines(at, 1, local=OTHER) as [other],
    ):
        for line in held:
            line.writer.write(SLOW)
            await app.shop.reached.wait()
            app.shop.reached.clear()
        refused = await talk(at, b"")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"web.overloaded" in refused
        assert b"retry-after: 1" in refused
        other.writer.write(SLOW)
        await app.shop.reached.wait()
        async with lines(at, 1, local=OTHER) as [new]:
            assert await new.status() == 503
        app.shop.go_on.set()
        assert [await line.status() for line in (*held, other)] == [200, 200, 200]
        async with lines(at, 1, local=OTHER) as [new]:
            assert await new.ask() == 200


def test_an_address_of_ipv6_is_a_network():
    assert network_of("127.0.0.1") == "127.0.0.1"
    assert network_of("2001:db8:1:2:3::4") == network_of("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::4") != network_of("2001:db8:1:2::9")


def reported(scope):
    return {name.decode(): value.decode() for name, value in headers_of_charge(scope)}


def test_a_token_has_a_bucket_of_one_second():
    now = [100.0]
    quotas = Quotas(WebConfig(requests_per_token=10, requests_per_key=2), lambda: now[0])
    server, page = Caller(1, "server", frozenset()), Caller(2, "page", frozenset(), True)
    for left in range(9, -1, -1):
        scope = {}
        quotas.charge(server, scope)
        assert reported(scope)["ratelimit"].startswith(f'"second";r={left};t=')
        assert reported(scope)["ratelimit-policy"] == '"second";q=10;w=1'
        end_charge(scope)
    scope = {}
    with pytest.raises(RateLimited, match="10 requests per second") as refused:
        quotas.charge(server, scope)
    assert refused.value.retry_after_s == pytest.approx(0.1)
    assert reported(scope)["ratelimit"] == '"second";r=0;t=1'
    quotas.charge(page, {})
    quotas.charge(page, {})
    with pytest.raises(RateLimited):
        quotas.charge(page, {})
    now[0] += 0.1
    quotas.charge(server, {})
    with pytest.raises(RateLimited):
        quotas.charge(server, {})
    now[0] += 60
    for _ in range(10):
        quotas.charge(server, {})
    with pytest.raises(RateLimited):
        quotas.charge(server, {})


def test_a_request_is_charged_once_and_open_until_it_ends():
    quotas = Quotas(WebConfig(requests_open_per_token=2))
    caller, first, second, third = Caller(1, "server", frozenset()), {}, {}, {}
    for scope in (first, first, second):
        quotas.charge(caller, scope)
    with pytest.raises(TooManyRequestsOpen, match="2 open requests"):
        quotas.charge(caller, third)
    end_charge(third)
    with pytest.raises(TooManyRequestsOpen):
        quotas.charge(caller, {})
    end_charge(first)
    quotas.charge(caller, fourth := {})
    assert CHARGE in fourth


async def test_over_the_rate_of_a_token_requests_are_429(make_app, serve, token, new_token):
    other = await new_token("jobs:read")
    async with serve(make_app(requests_per_token=1)) as client:
        answers = await asyncio.gather(
            *(client.get("/v1/things/7", headers=token) for _ in range(10))
        )
        assert {answer.status_code for answer in answers} == {200, 429}
        for answer in answers:
            assert answer.headers["ratelimit-policy"] == '"second";q=1;w=1'
            assert re.fullmatch(r'"second";r=0;t=\d', answer.headers["ratelimit"])
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["code"] == "web.rate_limited"
        assert refused.json()["retryable"] is True
        assert refused.headers["retry-after"] == "1"
        bearer = {"authorization": f"Bearer {other}"}
        assert (await client.get("/v1/things/7", headers=bearer)).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
        assert "ratelimit" not in (await client.get("/healthz")).headers


async def test_a_token_has_so_many_requests_open(make_app, serve, token):
    app = make_app(requests_open_per_token=1)
    async with serve(app) as client:
        asked = asyncio.create_task(client.get("/v1/shelf?q=slow", headers=token))
        await app.shop.reached.wait()
        refused = await client.get("/v1/things/7", headers=token)
        assert (refused.status_code, refused.json()["code"]) == (429, "web.too_many_requests_open")
        assert refused.headers["retry-after"] == "1"
        app.shop.go_on.set()
        assert (await asked).status_code == 200
        assert (await client.get("/v1/things/7", headers=token)).status_code == 200
