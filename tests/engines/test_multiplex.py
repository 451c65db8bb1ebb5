"""One connection for all callers: each gets its own reply or an error, after any fault."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest
import uvloop
from hostile_valkey import bulk, echo, hostile_peer
from tests.kit.waiting import wait_true

from headrace.engines.multiplex import (
    Multiplexer,
    ValkeyBusy,
    ValkeyLost,
    ValkeyNotReady,
    ValkeyRefused,
)
from headrace.engines.multiplex.connection import Bounds
from headrace.engines.multiplex.reconnecting_connection import address_of
from headrace.engines.valkey import ValkeyConfig, ValkeyDown

QUICK = Bounds(timeout_s=0.2)


@pytest.fixture
async def connect():
    """Make a multiplexer that is closed with its test."""
    opened = []

    def make(url, bounds=QUICK):
        opened.append(Multiplexer(url, ValkeyConfig(), bounds))
        return opened[-1]

    yield make
    for one in opened:
        await one.close()


@pytest.fixture
def real(running_engines, connect):
    """A multiplexer on the real server, with its default timeout."""
    return connect(running_engines.endpoints.valkey_url, Bounds())


def outcome(error):
    """An error's class, or what was answered."""
    return type(error) if isinstance(error, BaseException) else error


async def ask(mux, *texts):
    """ECHO of each at once: replies, or the classes of errors."""
    told = await asyncio.gather(*(mux.command("ECHO", t) for t in texts), return_exceptions=True)
    return [outcome(one) for one in told]


async def test_commands_and_functions_are_answered(real):
    await real.open()
    assert await real.command("SET", f"{real.prefix}:{{m}}", 5) == b"OK"
    assert await real.command("MGET", f"{real.prefix}:{{m}}", "nothing") == [b"5", None]
    with pytest.raises(ValkeyRefused) as refused:
        await real.call("headrace_no_such_function", [f"{real.prefix}:{{m}}"], [1, 2.5, b"\xff"])
    assert refused.value.reply == "ERR Function not found"
    assert "Function" not in refused.value.public_text
    assert await real.command("DEL", f"{real.prefix}:{{m}}") == 1


async def test_replies_in_small_pieces_reach_their_callers(connect):
    async with hostile_peer() as peer:
        peer.pieces = lambda data: [data[i : i + 1] for i in range(len(data))]
        mux = connect(peer.url)
        texts = [f"text {n}".encode() * (n % 7) for n in range(120)]
        assert await ask(mux, *texts) == texts
        assert len(peer.writers) == 1


async def test_what_came_up_in_one_tick_goes_out_in_one_write(connect):
    async with hostile_peer() as peer:
        mux = connect(peer.url)
        await mux.open()
        link = next(iter(mux._by_loop.values())).connection
        writes = []
        write, link._transport = link._transport.write, _Recording(link._transport, writes)
        assert await ask(mux, *[b"x"] * 50) == [b"x"] * 50
        assert len(writes) == 1
        assert write is not None


class _Recording:
    """A transport that notes what is written through it."""

    def __init__(self, inner, writes):
        self._inner, self._writes = inner, writes

    def write(self, data):
        self._writes.append(data)
        self._inner.write(data)

    def abort(self):
        self._inner.abort()


async def test_a_caller_that_goes_away_leaves_its_place_behind(connect):
    go_on = asyncio.Event()

    async def late(_peer, words):
        await go_on.wait()
        return bulk(words[-1])

    async with hostile_peer(late) as peer:
        mux = connect(peer.url, Bounds(timeout_s=5))
        tasks = [asyncio.create_task(mux.command("ECHO", f"n{n}")) for n in range(40)]
        await wait_true(lambda: len(peer.asked) > 1)
        for task in tasks[::3]:
            task.cancel()
        go_on.set()
        told = [outcome(one) for one in await asyncio.gather(*tasks, return_exceptions=True)]
        gone = asyncio.CancelledError
        assert told == [gone if n % 3 == 0 else b"n%d" % n for n in range(40)]
        assert await ask(mux, b"after") == [b"after"]
        assert len(peer.writers) == 1


async def test_an_unexpected_reply_ends_the_connection(connect):
    async with hostile_peer(lambda _, words: bulk(words[-1]) * 2) as peer:
        mux = connect(peer.url)
        assert await ask(mux, b"one") == [b"one"]
        peer.answer = echo
        await wait_true(lambda: len(peer.writers) == 2)
        assert await ask(mux, b"two", b"three") == [b"two", b"three"]


@pytest.mark.parametrize(
    "told",
    [
        lambda text: bulk(text)[::-1],
        lambda text: bulk(text)[4:] + bulk(text)[:4],
        lambda text: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        lambda text: b"$-7\r\n",
        lambda text: b"$99999999999999999999\r\n",
        lambda text: b"\x00\x00\x00",
    ],
    ids=["backwards", "turned", "http", "negative length", "huge length", "zeros"],
)
async def test_bytes_out_of_order_are_never_an_answer(connect, told):
    async with hostile_peer(lambda _, words: told(words[-1])) as peer:
        mux = connect(peer.url)
        assert await ask(mux, b"abcdef", b"ghijkl") == [ValkeyLost, ValkeyLost]
        peer.answer = echo

        async def is_well():
            return await ask(mux, b"again") == [b"again"]

        await wait_true(is_well)


async def test_a_silent_server_is_disconnected_and_its_callers_fail(connect):
    async with hostile_peer(lambda _, words: None) as peer:
        mux = connect(peer.url)
        await mux.open()
        began = time.monotonic()
        assert await ask(mux, b"a", b"b") == [ValkeyLost, ValkeyLost]
        assert time.monotonic() - began >= 0.2
        await wait_true(lambda: len(peer.writers) == 2)


@pytest.mark.slow
async def test_a_slow_server_keeps_its_connection(connect):
    async def slow(_peer, words):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.03)
        return bulk(words[-1])

    async with hostile_peer(slow) as peer:
        mux = connect(peer.url)
        texts = [b"n%d" % n for n in range(20)]
        told = await ask(mux, *texts)
        assert set(told) <= {*texts, ValkeyLost}
        assert told[0] == b"n0"
        assert ValkeyLost in told
        assert all(one in (text, ValkeyLost) for one, text in zip(told, texts, strict=True))
        await wait_true(lambda: len(peer.asked) == 21)
        peer.answer = echo
        assert await ask(mux, b"after") == [b"after"]
        assert len(peer.writers) == 1


async def test_callers_over_the_limit_fail_at_once(connect):
    go_on = asyncio.Event()

    async def late(_peer, words):
        await go_on.wait()
        return bulk(words[-1])

    async with hostile_peer(late) as peer:
        mux = connect(peer.url, Bounds(timeout_s=5, waiting_max=100))
        await mux.open()
        texts = [b"n%d" % n for n in range(300)]
        tasks = [asyncio.create_task(mux.command("ECHO", t)) for t in texts]
        await wait_true(lambda: sum(task.done() for task in tasks) == 200)
        go_on.set()
        told = [outcome(one) for one in await asyncio.gather(*tasks, return_exceptions=True)]
        assert told == texts[:100] + [ValkeyBusy] * 200


async def test_what_was_held_back_was_never_sent(connect):
    async with hostile_peer() as peer:
        mux = connect(peer.url, Bounds(timeout_s=5, unsent_bytes_max=20 * 2**20))
        await mux.open()
        peer.reading.clear()
        # More than both kernels' buffers take, so that the transport pauses writing.
        big = [asyncio.create_task(mux.command("ECHO", b"x" * 2**20)) for _ in range(16)]
        await asyncio.sleep(0)
        link = next(iter(mux._by_loop.values())).connection
        await wait_true(lambda: link._is_paused)
        held = [asyncio.create_task(mux.command("ECHO", b"y" * 2**20)) for _ in range(21)]
        await wait_true(held[-1].done)
        assert outcome(held[-1].exception()) is ValkeyBusy
        peer.cut()
        told = await asyncio.gather(*big, *held[:-1], return_exceptions=True)
        assert [outcome(one) for one in told] == [ValkeyLost] * 16 + [ValkeyDown] * 20


async def test_callers_of_an_absent_server_fail_at_once(connect):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        mux = connect(f"valkey://127.0.0.1:{port}")
        assert await ask(mux, b"a", b"b") == [ValkeyDown, ValkeyDown]
        began = time.monotonic()
        for _ in range(50):
            assert await ask(mux, b"a") == [ValkeyDown]
        assert time.monotonic() - began < 10, "attempts come a second apart by then"
    server = await asyncio.start_server(_answer_pings, "127.0.0.1", port)

    async def is_up():
        return await ask(mux, b"hello") == [b"hello"]

    await wait_true(is_up)
    server.close()


async def _answer_pings(reader, writer):
    while data := await reader.read(1000):
        writer.write(b"+PONG\r\n" if b"PING" in data else b"$5\r\nhello\r\n")
    writer.close()


async def test_a_lost_connection_reopens_and_callers_wait_for_the_first_attempt(connect):
    async with hostile_peer() as peer:
        mux = connect(peer.url)
        assert await ask(mux, b"a") == [b"a"]
        peer.cut()
        await wait_true(lambda: next(iter(mux._by_loop.values())).connection is None)
        told = await ask(mux, b"b")
        # A connection that was just opened may be waited for or reported as closed.
        assert told in ([b"b"], [ValkeyDown])

        async def is_well():
            return await ask(mux, b"c") == [b"c"]

        await wait_true(is_well)


async def test_a_former_connections_watchdog_leaves_the_new_one_alone(connect):
    async with hostile_peer() as peer:
        mux = connect(peer.url)

        async def is_well():
            return await ask(mux, b"a") == [b"a"]

        for _ in range(3):
            await wait_true(is_well)
            peer.cut()
        await wait_true(is_well)
        connections, ends = len(peer.writers), time.monotonic() + 3 * QUICK.timeout_s
        while time.monotonic() < ends:
            assert await ask(mux, b"b") == [b"b"]
        assert len(peer.writers) == connections


async def test_a_server_that_loads_its_data_is_not_used(connect):
    async with hostile_peer(
        lambda _, words: b"-LOADING Valkey is loading the dataset in memory\r\n"
    ) as peer:
        peer.greets = False
        mux = connect(peer.url)
        with pytest.raises(ValkeyDown, match="LOADING"):
            await mux.command("ECHO", "a")
        assert {tuple(words) for words in peer.asked} == {(b"PING",)}
        peer.greets, peer.answer = True, echo

        async def is_well():
            return await ask(mux, b"a") == [b"a"]

        await wait_true(is_well)


async def test_a_primary_that_became_a_replica_is_left(connect):
    async with hostile_peer(
        lambda _, words: b"-READONLY You can't write against a read only replica.\r\n"
    ) as peer:
        mux = connect(peer.url)
        with pytest.raises(ValkeyNotReady) as told:
            await mux.command("SET", "a", 1)
        assert told.value.word == "READONLY"
        await wait_true(lambda: len(peer.writers) == 2)


async def test_password_and_database_are_sent_first(connect):
    async with hostile_peer() as peer:
        mux = connect(peer.url.replace("//", "//me:se%20cret@") + "/3")
        assert await ask(mux, b"a") == [b"a"]
        assert peer.asked == [
            [b"AUTH", b"me", b"se cret"],
            [b"SELECT", b"3"],
            [b"PING"],
            [b"CLUSTER", b"SLOTS"],
            [b"ECHO", b"a"],
        ]


def test_addresses_are_read_as_the_stock_client_reads_them():
    unix = address_of("unix:///run/valkey.sock?db=2")
    assert (unix.path, unix.tls, unix.greeting) == (
        "/run/valkey.sock",
        None,
        (("SELECT", "2"), ("PING",)),
    )
    plain = address_of("valkeys://cache.example:7000")
    assert (plain.host, plain.port, plain.path) == ("cache.example", 7000, None)
    assert plain.tls is not None
    assert plain.tls.check_hostname
    assert not address_of("rediss://cache.example?ssl_cert_reqs=none").tls.check_hostname


@pytest.mark.parametrize("word", ["MULTI", "subscribe", "WAITAOF", "BLPOP", "CLIENT"])
async def test_what_needs_a_connection_of_its_own_is_refused(connect, word):
    with pytest.raises(AssertionError, match="separate connection"):
        await connect("valkey://127.0.0.1:1").command(word)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
async def test_each_loop_has_a_connection_of_its_own(real, new_loop):
    """Also uvloop's, whose transports are none of asyncio's classes."""
    texts = [b"%d" % n for n in range(500)]

    async def elsewhere():
        told = await ask(real, *texts)
        big = await ask(real, b"x" * 2**21)
        await real.close()
        return told, len(big[0])

    def run():
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(elsewhere())

    assert await ask(real, b"here") == [b"here"]
    assert await asyncio.to_thread(run) == (texts, 2**21)
    assert await ask(real, b"here") == [b"here"]


@pytest.mark.slow
async def test_no_reply_ever_reaches_another_caller(real, valkey):
    """Random sizes, callers that give up, connections killed by the server, for two seconds."""
    dice, ends_s = random.Random(20261121), time.monotonic() + 2.0
    counts = {"right": 0, "gave up": 0, ValkeyLost: 0, ValkeyDown: 0}

    async def caller(number):
        asked = 0
        while time.monotonic() < ends_s:
            asked += 1
            text = b"%d:%d:" % (number, asked) + b"x" * dice.choice((0, 10, 200, 40_000))
            patience_s = dice.choice((0.0002, 0.002, 5.0))
            try:
                async with asyncio.timeout(patience_s):
                    assert await real.command("ECHO", text) == text
                counts["right"] += 1
            except TimeoutError:
                counts["gave up"] += 1
            except ValkeyDown as error:
                counts[type(error)] += 1
                await asyncio.sleep(0)

    async def killer():
        while time.monotonic() < ends_s:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), dice.uniform(0.02, 0.2))
            await valkey.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    await asyncio.gather(killer(), *(caller(number) for number in range(20)))
    assert counts["right"] > 500, counts
    assert counts["gave up"] > 20, counts
    assert counts[ValkeyLost] + counts[ValkeyDown] > 0, counts


async def test_cancelled_callers_do_not_affect_others(real):
    dice = random.Random(7)
    texts = [b"%d" % n for n in range(2_000)]
    tasks = [asyncio.create_task(real.command("ECHO", text)) for text in texts]
    await asyncio.sleep(0)
    for task in dice.sample(tasks, 700):
        task.cancel()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(
        one == text or isinstance(one, asyncio.CancelledError)
        for one, text in zip(told, texts, strict=True)
    )
    assert sum(isinstance(one, bytes) for one in told) == 1_300
