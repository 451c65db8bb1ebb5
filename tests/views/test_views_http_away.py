"""Views over HTTP while an engine is away.

What goes on, what is refused, and that all of it comes back by itself.
"""

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

HOT, PLAIN = "ad:1", "ad%3A1"


@pytest.fixture
def _short_memory(monkeypatch):
    """Tokens are asked about again almost at once."""
    monkeypatch.setattr(auth, "CACHED_S", 0.05)


@asynccontextmanager
async def served(running_engines, database_url, prefix, blobs, *, connect_timeout_s=0.5):
    """A client, and the proxies in front of PostgreSQL and Valkey."""
    valkey_url = running_engines.endpoints.valkey_url.partition("?")[0]
    with ChaosProxy(database_url) as postgres_proxy, ChaosProxy(valkey_url) as valkey_proxy:
        postgres = Postgres(postgres_proxy.url, PostgresConfig(connect_timeout_s=connect_timeout_s))
        config = ValkeyConfig(prefix=prefix, timeout_s=0.5)
        url = valkey_proxy.url.replace("tcp://", "valkey://")
        valkey, line = Valkey(url, config), Multiplexer(url, config)
        engines = Engines(postgres, valkey, line, blobs)
        jobs = Jobs(postgres, JobsConfig(), Registry())
        async with client_of(engines, Views(engines, jobs, ViewsConfig())) as client:
            yield client, postgres_proxy, valkey_proxy
        await line.close()
        await valkey.close()
        await postgres.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_short_memory")
async def test_without_postgres_hits_go_on(running_engines, database_url, valkey, blobs):
    async with served(running_engines, database_url, valkey.prefix, blobs) as (client, away, _):
        assert (await client.post(f"/v1/views/items/{HOT}?class=human")).json()["total"] == 1
        away.set(RESET)
        for total, item in enumerate((HOT, PLAIN) * 10, start=2):
            answer = await client.post(f"/v1/views/items/{item}?class=human")
            assert (answer.status_code, answer.json()) == (200, {"id": "ad:1", "total": total})
        new = (await client.post("/v1/views/items/new?class=human")).json()
        assert new == {"id": "new", "total": None, "stale": True}
        told = (await client.get("/v1/views?ids=ad:1,new")).json()
        assert told == [{"id": "ad:1", "total": 21}, {"id": "new", "total": None, "stale": True}]
        answer = await client.get("/v1/views/items/ad:1/series")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        away.set(PASS)

        async def is_back():
            return (await client.get("/v1/views/items/ad:1/series")).status_code == 200

        await wait_true(is_back)

        async def has_total():
            return (await client.post("/v1/views/items/new?class=human")).json()[
                "total"
            ] is not None

        await wait_true(has_total)


@pytest.mark.slow
@pytest.mark.usefixtures("_short_memory")
async def test_a_postgres_that_says_nothing_holds_up_one_hit(
    running_engines, database_url, valkey, blobs
):
    """As one that is stopped: connections stand, and no question is ever answered."""
    at = served(running_engines, database_url, valkey.prefix, blobs, connect_timeout_s=5)
    async with at as (client, silent, _):
        every_shard = [{"id": f"ad:{number}", "class": "human"} for number in range(20)]
        assert (await client.post("/v1/views", json=every_shard)).status_code == 200
        silent.set(BLACK_HOLE)
        began_s = time.monotonic()
        for number in range(30):
            told = (await client.post(f"/v1/views/items/new{number}?class=human")).json()
            assert told == {"id": f"new{number}", "total": None, "stale": True}
        for field in ("today", "unique", "classes"):
            told = (await client.get(f"/v1/views?ids=ad:1&fields=total,{field}")).json()
            assert told == [{"id": "ad:1", "total": 1, "stale": True}]
        assert time.monotonic() - began_s < 16, "33 that wait a second each take twice as long"
        silent.set(RESET)


@pytest.mark.slow
@pytest.mark.usefixtures("_short_memory")
@pytest.mark.parametrize("path", ["items/ad:1/series", "items/ad:1/series?by=hour", "top"])
async def test_series_and_top_lists_do_not_wait_one_by_one_for_a_silent_postgres(
    running_engines, database_url, valkey, blobs, path
):
    """A hit found it silent; then whoever asks is told at once."""
    at = served(running_engines, database_url, valkey.prefix, blobs, connect_timeout_s=5)
    async with at as (client, silent, _):
        every_shard = [{"id": f"ad:{number}", "class": "human"} for number in range(20)]
        assert (await client.post("/v1/views", json=every_shard)).status_code == 200
        assert (await client.get(f"/v1/views/{path}")).status_code == 200
        silent.set(BLACK_HOLE)
        assert (await client.post("/v1/views/items/new?class=human")).json()["total"] is None
        answer = await client.get(f"/v1/views/{path}", params={"window": "9h"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        began_s = time.monotonic()
        for window in range(1, 6):
            answer = await client.get(f"/v1/views/{path}", params={"window": f"{window}h"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert time.monotonic() - began_s < 10, "five that wait take three seconds each"
        silent.set(RESET)


@pytest.mark.slow
async def test_without_valkey_hits_are_refused_and_reads_are_stale(
    running_engines, database_url, valkey, blobs, make_flusher
):
    async with served(running_engines, database_url, valkey.prefix, blobs) as (client, _, away):
        assert (await client.post(f"/v1/views/items/{HOT}?class=human&n=7")).status_code == 200
        assert await make_flusher().run_once()
        away.set(RESET)
        for item in (HOT, PLAIN) * 5:
            answer = await client.post(f"/v1/views/items/{item}?class=human")
            assert answer.status_code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["retryable"] is True
            assert "127.0.0.1" not in answer.text
        assert (await client.post("/v1/views", json=["ad:1"])).status_code == 503
        assert (await client.get("/v1/views/items/ad:1/pixel")).status_code == 503
        for ids in ("ad:1,new", "ad%3A1,new"):
            told = (await client.get(f"/v1/views?ids={ids}")).json()
            assert told == [
                {"id": "ad:1", "total": 7, "stale": True},
                {"id": "new", "total": 0, "stale": True},
            ]
        assert (await client.get("/v1/views/items/ad:1/series")).status_code == 200
        away.set(PASS)

        async def is_back():
            return (await client.post("/v1/views/items/ad:1?class=human")).status_code == 200

        await wait_true(is_back)
        told = (await client.get("/v1/views?ids=ad:1")).json()
        assert told[0]["total"] >= 8
        assert "stale" not in told[0]
