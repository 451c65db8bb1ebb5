"""The proxy against a real PostgreSQL, over TCP and unix sockets, and against a plain server."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest
from tests.kit.chaos import BLACK_HOLE, PASS, RESET, ChaosProxy, delay
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query

CONFIG = PostgresConfig(connect_timeout_s=0.2, statement_timeout_s=5)
ADD = compile_query("add", "-- A row of its own.\nINSERT INTO effect VALUES (:word) RETURNING word")
ASK = compile_query("ask", "-- Any question.\nSELECT :word::text")
PID = compile_query("pid", "-- Which connection this is.\nSELECT pg_backend_pid()")
WORDS = compile_query("words", "-- What took effect.\nSELECT word FROM effect ORDER BY 1")


@pytest.fixture
def proxy(database_url):
    with ChaosProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
async def behind(proxy):
    """A pool whose connections go through the proxy."""
    pool = Postgres(proxy.url, CONFIG)
    yield pool
    await pool.close()


@pytest.fixture
async def effects(postgres):
    """A table to count in; `await effects()` reads it around the proxy."""
    await postgres.run(compile_query("make", "-- Effects.\nCREATE TABLE effect (word text)"))

    async def read():
        return [row["word"] for row in await postgres.all(WORDS)]

    return read


@pytest.mark.parametrize("attribute", ["url", "socket_url"])
async def test_what_passes_is_unchanged(proxy, attribute):
    pool = Postgres(getattr(proxy, attribute), CONFIG)
    long = "x" * 300_000
    assert await pool.value(ASK, word=long) == long
    assert proxy.connections() == 1
    assert proxy.connections(asked=b"SELECT $1::text") == 1
    assert proxy.connections(asked=b"not requested") == 0
    await pool.close()
    await wait_true(lambda: proxy.connections() == 0)


async def test_lost_replies_are_of_statements_that_took_effect(proxy, behind, effects):
    await behind.value(ADD, word="before")
    loss = proxy.lose_reply(b"INSERT INTO effect", b"chosen", times=2)
    assert await behind.value(ASK, word="chosen") == "chosen"
    await behind.value(ADD, word="another")
    for word in ("chosen 1", "chosen 2"):
        with pytest.raises(PostgresDown):
            await behind.value(ADD, word=word)
    assert await behind.value(ADD, word="chosen 3") == "chosen 3"
    assert loss.fired == 2
    assert await effects() == ["another", "before", "chosen 1", "chosen 2", "chosen 3"]


async def test_a_lost_request_had_no_effect(proxy, behind, effects):
    loss = proxy.lose_request(b"chosen")
    await behind.value(ADD, word="before")
    with pytest.raises(PostgresDown):
        await behind.value(ADD, word="chosen")
    assert loss.fired == 1
    assert await effects() == ["before"]


@pytest.mark.parametrize(("lose", "stored"), [("lose_reply", ["within"]), ("lose_request", [])])
async def test_a_commit_can_be_lost_on_either_way(proxy, behind, effects, lose, stored):
    loss = getattr(proxy, lose)(b"COMMIT")
    with pytest.raises(PostgresDown):
        async with behind.transaction() as tx:
            await tx.value(ADD, word="within")
    assert loss.fired == 1
    assert await effects() == stored


async def test_a_held_reply_is_of_a_statement_that_took_effect_and_arrives_when_released(
    proxy, behind, effects
):
    held = proxy.hold_reply(b"held for long")
    long = "held for long" + "x" * 300_000
    asking = asyncio.create_task(behind.value(ADD, word=long))
    await wait_true(lambda: held.fired or asking.done())
    assert not asking.done(), asking.exception()
    assert await effects() == [long]
    assert await behind.value(ADD, word="others pass") == "others pass"
    assert not asking.done()
    proxy.release(held)
    assert await asking == long
    assert await behind.value(ADD, word="held for long, again") == "held for long, again"


async def test_a_reset_ends_what_is_open_and_what_comes(proxy, behind):
    pid = await behind.value(PID)
    proxy.set(RESET)
    assert proxy.connections() == 0
    with pytest.raises(PostgresDown):
        await behind.connect_unpooled()
    assert proxy.refused
    proxy.set(PASS)
    assert await behind.value(PID) != pid


async def test_a_black_hole_answers_never_and_keeps_what_it_swallowed(proxy, behind):
    await behind.value(PID)
    proxy.set(BLACK_HOLE)
    asking = asyncio.create_task(behind.value(ASK, word="into the hole"))
    done, _ = await asyncio.wait([asking], timeout=0.1)
    assert not done
    proxy.set(PASS)
    done, _ = await asyncio.wait([asking], timeout=0.1)
    assert not done, "a connection that lost bytes must not continue"
    assert await behind.value(ASK, word="on a new one") == "on a new one"
    asking.cancel()
    proxy.set(RESET)
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_mode_can_apply_to_the_next_or_to_matching_connections(proxy, behind):
    proxy.set_next(RESET)
    with pytest.raises(PostgresDown):
        await behind.value(PID)
    listener = await behind.connect_unpooled()
    await listener.add_listener("a_channel", lambda *_: None)
    pid = await behind.value(PID)
    proxy.set(RESET, asked=b"LISTEN")
    await wait_true(listener.is_closed)
    assert await behind.value(PID) == pid


async def test_a_delay_is_kept_and_ends_with_its_mode(proxy, behind):
    await behind.value(PID)
    proxy.set(delay(0.1))
    began_s = time.monotonic()
    await behind.value(PID)
    assert time.monotonic() - began_s >= 0.1
    proxy.set(delay(3600))
    asking = asyncio.create_task(behind.value(PID))
    done, _ = await asyncio.wait([asking], timeout=0.05)
    assert not done
    proxy.set(PASS)
    assert await asyncio.wait_for(asking, 60)


async def test_a_server_that_is_away_is_a_reset(tmp_path):
    async def ask(url):
        host, port = url.removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            return await reader.read(1)
        finally:
            writer.close()

    with ChaosProxy(f"unix://{tmp_path}/nobody.sock") as proxy:
        with pytest.raises(ConnectionResetError):
            await ask(proxy.url)
        proxy.set(RESET)
        with pytest.raises(ConnectionResetError):
            await ask(proxy.url)


async def test_any_other_protocol_loses_what_one_read_brings():
    received = []

    async def echo(reader, writer):
        with suppress(ConnectionError):
            while data := await reader.read(100):
                received.append(data)
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with ChaosProxy(f"http://127.0.0.1:{port}/path") as proxy:
        assert proxy.url.endswith("/path")
        host, proxy_port = proxy.url.removeprefix("http://").removesuffix("/path").split(":")
        reader, writer = await asyncio.open_connection(host, int(proxy_port))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        loss = proxy.lose_reply(b"POST /jobs")
        writer.write(b"POST /jobs")
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        assert (loss.fired, received) == (1, [b"hello", b"POST /jobs"])
        writer.close()
    server.close()
