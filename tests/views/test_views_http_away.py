"""Views over HTTP while an engine is down: what continues, what is refused, and the return."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager

import pytest
from tests.kit.chaos import BLACK_HOLE, PASS, RESET, ChaosProxy
from tests.kit.waiting import wait_true
from views_surfaces import client_of

from headrace.engines import Engines
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.views import Views, ViewsConfig
from headrace.web import auth

ITEMS = ("ad:1", "ad%3A1")
EVERY_SHARD = [{"id": f"ad:{number}", "class": "human"} for number in range(20)]
ANALYTICS = ("items/ad:1/series", "items/ad:1/series?by=hour", "top")
pytestmark = pytest.mark.slow


@pytest.fixture
def serve(running_engines, database_url, valkey, blobs):
    """`async with serve() as (client, postgres_proxy, valkey_proxy)`."""

    @asynccontextmanager
    async def start(connect_timeout_s=0.5):
        valkey_url = running_engines.endpoints.valkey_url.partition("?")[0]
        with ChaosProxy(database_url) as postgres_proxy, ChaosProxy(valkey_url) as valkey_proxy:
            settings = PostgresConfig(connect_timeout_s=connect_timeout_s)
            postgres = Postgres(postgres_proxy.url, settings)
            config = ValkeyConfig(prefix=valkey.prefix, timeout_s=0.5)
            url = valkey_proxy.url.replace("tcp://", "valkey://")
            pools, line = Valkey(url, config), Multiplexer(url, config)
            engines = Engines(postgres, pools, line, blobs)
            views = Views(engines, Jobs(postgres, JobsConfig(), Registry()), ViewsConfig())
            async with client_of(engines, views) as client:
                yield client, postgres_proxy, valkey_proxy
            await line.close()
            await pools.close()
            await postgres.close()

    return start


@pytest.fixture(autouse=True)
def _tokens_are_checked_often(monkeypatch):
    monkeypatch.setattr(auth, "CACHED_S", 0.05)


async def hit(client, item):
    return await client.post(f"/v1/views/items/{item}?class=human")


def require_unavailable(answer):
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["retryable"] is True
    assert "127.0.0.1" not in answer.text


async def test_without_postgres_hits_continue(serve):
    async with serve() as (client, proxy, _):
        assert (await hit(client, "ad:1")).json()["total"] == 1
        proxy.set(RESET)
        for total, item in enumerate(ITEMS * 5, start=2):
            answer = await hit(client, item)
            assert (answer.status_code, answer.json()) == (200, {"id": "ad:1", "total": total})
        unknown = {"id": "new", "total": None, "stale": True}
        assert (await hit(client, "new")).json() == unknown
        found = (await client.get("/v1/views?ids=ad:1,new")).json()
        assert found == [{"id": "ad:1", "total": 11}, unknown]
        require_unavailable(await client.get("/v1/views/items/ad:1/series"))
        proxy.set(PASS)

        async def is_back():
            return (await client.get("/v1/views/items/ad:1/series")).status_code == 200

        async def has_total():
            return (await hit(client, "new")).json()["total"] is not None

        await wait_true(is_back)
        await wait_true(has_total)


async def test_a_silent_postgres_delays_one_call_and_no_later_one(serve):
    """Connections stay open and no query is answered, as if the server were stopped."""
    async with serve(connect_timeout_s=5) as (client, proxy, _):
        assert (await client.post("/v1/views", json=EVERY_SHARD)).status_code == 200
        for path in ANALYTICS:
            assert (await client.get(f"/v1/views/{path}")).status_code == 200
        proxy.set(BLACK_HOLE)
        began_s = time.monotonic()
        for number in range(30):
            answer = (await hit(client, f"new{number}")).json()
            assert answer == {"id": f"new{number}", "total": None, "stale": True}
        for field in ("today", "unique", "classes"):
            found = (await client.get(f"/v1/views?ids=ad:1&fields=total,{field}")).json()
            assert found == [{"id": "ad:1", "total": 1, "stale": True}]
        for path in ANALYTICS:
            for window in range(1, 6):
                given = {"window": f"{window}h"} if path == "top" else None
                answer = await client.get(f"/v1/views/{path}", params=given)
                require_unavailable(answer)
        assert time.monotonic() - began_s < 26, "48 calls that wait take 80 s"
        proxy.set(RESET)


async def test_without_valkey_hits_are_refused_and_reads_are_stale(serve, make_flusher):
    async with serve() as (client, _, proxy):
        assert (await client.post("/v1/views/items/ad:1?class=human&n=7")).status_code == 200
        assert await make_flusher().run_once()
        proxy.set(RESET)
        for item in ITEMS * 3:
            require_unavailable(await hit(client, item))
        require_unavailable(await client.post("/v1/views", json=["ad:1"]))
        require_unavailable(await client.get("/v1/views/items/ad:1/pixel"))
        for item in ITEMS:
            assert (await client.get(f"/v1/views?ids={item},new")).json() == [
                {"id": "ad:1", "total": 7, "stale": True},
                {"id": "new", "total": 0, "stale": True},
            ]
        assert (await client.get("/v1/views/items/ad:1/series")).status_code == 200
        proxy.set(PASS)

        async def is_back():
            return (await hit(client, "ad:1")).status_code == 200

        await wait_true(is_back)
        [found] = (await client.get("/v1/views?ids=ad:1")).json()
        assert found["total"] >= 8
        assert "stale" not in found
