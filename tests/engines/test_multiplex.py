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
from headrace.kernel.config import InvalidConfig

QUICK = Bounds(timeout_s=0.2)
CANCELLED = asyncio.CancelledError


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


async def ends_of(tasks):
    """Replies, or the classes of errors."""
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(one) if isinstance(one, BaseException) else one for one in ended]


async def ask(mux, *texts):
    """ECHO of each at once: replies, or the classes of errors."""
    return await ends_of([mux.command("ECHO", text) for text in texts])


async def wait_echo(mux):
    """Wait until the connection works."""

    async def works():
        return await ask(mux, b"hello") == [b"hello"]

    await wait_true(works)


def link_of(mux):
    """The reconnecting connection of this loop."""
    return next(iter(mux._by_loop.values()))


def gated():
    """An answer that waits, and the event that releases it."""
    release = asyncio.Event()

    async def answer(_peer, words):
        await release.wait()
        return bulk(words[-1])

    return answer, release


async def test_commands_and_functions_are_answered(real):
    await real.open()
    key = f"{real.prefix}:{{m}}"
    assert await real.command("SET", key, 5) == b"OK"
    assert await real.command("MGET", key, "nothing") == [b"5", None]
    with pytest.raises(ValkeyRefused) as refused:
        await real.call("headrace_no_such_function", [key], [1, 2.5, b"\xff"])
    assert refused.value.reply == "ERR Function not found"
    assert "Function" not in refused.value.public_text
    assert await real.command("DEL", key) == 1
    for word in ("MULTI", "subscribe", "WAITAOF", "BLPOP", "CLIENT"):
        with pytest.raises(AssertionError, match="separate connection"):
            await real.command(word)


async def test_replies_in_small_pieces_reach_their_callers(connect):
    async with hostile_peer() as peer:
        peer.pieces = lambda data: [data[i : i + 1] for i in range(len(data))]
        mux = connect(peer.url)
        texts = [f"text {n}".encode() * (n % 7) for n in range(120)]
        assert await ask(mux, *texts) == texts
        assert len(peer.writers) == 1


class Recording:
    """A transport that records its writes."""

    def __init__(self, inner, writes):
        self._inner, self._writes = inner, writes

    def write(self, data):
        self._writes.append(data)
        self._inner.write(data)

    def abort(self):
        self._inner.abort()


async def test_commands_of_one_tick_share_a_write(connect):
    async with hostile_peer() as peer:
        mux, writes = connect(peer.url), []
        await mux.open()
        connection = link_of(mux).connection
        connection._transport = Recording(connection._transport, writes)
        assert await ask(mux, *[b"x"] * 50) == [b"x"] * 50
        assert len(writes) == 1


async def test_a_cancelled_caller_leaves_its_reply_to_no_one(connect):
    answer, release = gated()
    async with hostile_peer(answer) as peer:
        mux = connect(peer.url, Bounds(timeout_s=5))
        tasks = [asyncio.create_task(mux.command("ECHO", f"n{n}")) for n in range(40)]
        await wait_true(lambda: len(peer.asked) > 1)
        for task in tasks[::3]:
            task.cancel()
        release.set()
        assert await ends_of(tasks) == [CANCELLED if n % 3 == 0 else b"n%d" % n for n in range(40)]
        assert await ask(mux, b"after") == [b"after"]
        assert len(peer.writers) == 1


GARBAGE = {
    "backwards": lambda text: bulk(text)[::-1],
    "turned": lambda text: bulk(text)[4:] + bulk(text)[:4],
    "http": lambda text: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "negative length": lambda text: b"$-7\r\n",
    "huge length": lambda text: b"$99999999999999999999\r\n",
    "zeros": lambda text: b"\x00\x00\x00",
    "silence": lambda text: b"",
}


async def test_malformed_bytes_and_silence_are_never_an_answer(connect):
    for name, garbage in GARBAGE.items():
        async with hostile_peer(lambda _, words, make=garbage: make(words[-1])) as peer:
            mux = connect(peer.url)
            assert await ask(mux, b"abcdef", b"ghijkl") == [ValkeyLost, ValkeyLost], name
            peer.answer = echo
            await wait_echo(mux)


async def test_an_unexpected_reply_ends_the_connection(connect):
    async with hostile_peer(lambda _, words: bulk(words[-1]) * 2) as peer:
        mux = connect(peer.url)
        assert await ask(mux, b"one") == [b"one"]
        peer.answer = echo
        await wait_true(lambda: len(peer.writers) == 2)
        assert await ask(mux, b"two", b"three") == [b"two", b"three"]


@pytest.mark.slow
async def test_a_slow_server_keeps_its_connection(connect):
    async def slow(_peer, words):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.03)
        return bulk(words[-1])

    async with hostile_peer(slow) as peer:
        mux = connect(peer.url)
        texts = [b"n%d" % n for n in range(20)]
        ends = await ask(mux, *texts)
        assert ends[0] == b"n0"
        assert ValkeyLost in ends
        assert all(one in (text, ValkeyLost) for one, text in zip(ends, texts, strict=True))
        await wait_true(lambda: len(peer.asked) == 21)
        peer.answer = echo
        assert await ask(mux, b"after") == [b"after"]
        assert len(peer.writers) == 1


async def test_callers_over_the_limit_fail_at_once(connect):
    answer, release = gated()
    async with hostile_peer(answer) as peer:
        mux = connect(peer.url, Bounds(timeout_s=5, waiting_max=100))
        await mux.open()
        texts = [b"n%d" % n for n in range(300)]
        tasks = [asyncio.create_task(mux.command("ECHO", t)) for t in texts]
        await wait_true(lambda: sum(task.done() for task in tasks) == 200)
        release.set()
        assert await ends_of(tasks) == texts[:100] + [ValkeyBusy] * 200


async def test_an_unsent_command_is_reported_as_not_sent(connect):
    async with hostile_peer() as peer:
        mux = connect(peer.url, Bounds(timeout_s=5, unsent_bytes_max=20 * 2**20))
        await mux.open()
        peer.reading.clear()
        # More than the buffers of both kernels hold, so that the transport pauses writing.
        sent = [asyncio.create_task(mux.command("ECHO", b"x" * 2**20)) for _ in range(16)]
        await asyncio.sleep(0)
        connection = link_of(mux).connection
        await wait_true(lambda: connection._is_paused)
        held = [asyncio.create_task(mux.command("ECHO", b"y" * 2**20)) for _ in range(21)]
        await wait_true(held[-1].done)
        peer.cut()
        expected = [ValkeyLost] * 16 + [ValkeyDown] * 20 + [ValkeyBusy]
        assert await ends_of([*sent, *held]) == expected


async def test_callers_of_an_absent_server_fail_at_once(connect):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        mux = connect(f"valkey://127.0.0.1:{port}")
        began_s = time.monotonic()
        for _ in range(50):
            assert await ask(mux, b"a", b"b") == [ValkeyDown, ValkeyDown]
        assert time.monotonic() - began_s < 10, "attempts to connect are a second apart by then"

    async def answer(reader, writer):
        while data := await reader.read(1000):
            writer.write(b"+PONG\r\n" if b"PING" in data else b"$5\r\nhello\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await wait_echo(mux)
    server.close()


async def test_a_cut_connection_is_opened_again_and_then_left_alone(connect):
    """Also by the watchdog of the former connection."""
    async with hostile_peer() as peer:
        mux = connect(peer.url)
        for _ in range(3):
            await wait_echo(mux)
            peer.cut()
            # The caller waits for the first attempt, or gets the loss.
            assert await ask(mux, b"b") in ([b"b"], [ValkeyDown], [ValkeyLost])
        await wait_echo(mux)
        connections, ends_s = len(peer.writers), time.monotonic() + 3 * QUICK.timeout_s
        while time.monotonic() < ends_s:
            assert await ask(mux, b"b") == [b"b"]
        assert len(peer.writers) == connections


async def test_a_server_that_loads_its_data_is_not_used(connect):
    loading = b"-LOADING Valkey is loading the dataset in memory\r\n"
    async with hostile_peer(lambda _, words: loading) as peer:
        peer.greets = False
        mux = connect(peer.url)
        with pytest.raises(ValkeyDown, match="LOADING"):
            await mux.command("ECHO", "a")
        assert {tuple(words) for words in peer.asked} == {(b"PING",)}
        peer.greets, peer.answer = True, echo
        await wait_echo(mux)


async def test_a_primary_that_became_a_replica_is_left(connect):
    readonly = b"-READONLY You can't write against a read only replica.\r\n"
    async with hostile_peer(lambda _, words: readonly) as peer:
        mux = connect(peer.url)
        with pytest.raises(ValkeyNotReady) as raised:
            await mux.command("SET", "a", 1)
        assert raised.value.word == "READONLY"
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


def test_addresses_are_parsed_as_the_stock_client_parses_them():
    unix = address_of("unix:///run/valkey.sock?db=2")
    assert (unix.path, unix.tls) == ("/run/valkey.sock", None)
    assert unix.greeting == (("SELECT", "2"), ("PING",))
    tls = address_of("valkeys://cache.example:7000")
    assert (tls.host, tls.port, tls.path) == ("cache.example", 7000, None)
    assert tls.tls.check_hostname
    assert not address_of("rediss://cache.example?ssl_cert_reqs=none").tls.check_hostname
    with pytest.raises(InvalidConfig, match="No such file"):
        address_of("valkeys://cache.example?ssl_ca_certs=/nowhere/ca.pem")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
async def test_each_loop_has_its_own_connection(real, new_loop):
    """Also uvloop's, whose transports are not of asyncio's classes."""
    texts = [b"%d" % n for n in range(500)]

    async def elsewhere():
        replies = await ask(real, *texts)
        big = await ask(real, b"x" * 2**21)
        await real.close()
        return replies, len(big[0])

    def run():
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(elsewhere())

    assert await ask(real, b"here") == [b"here"]
    assert await asyncio.to_thread(run) == (texts, 2**21)
    assert await ask(real, b"here") == [b"here"]


@pytest.mark.slow
async def test_no_reply_ever_reaches_another_caller(real, valkey):
    """Random sizes, callers with timeouts, cancellations, connections killed by the server."""
    draw = random.Random(20261121)
    counts = {"right": 0, "timeout": 0, "kill": 0, ValkeyLost: 0, ValkeyDown: 0}

    def is_done():
        return min(counts["right"] - 500, counts["timeout"] - 20, counts["kill"] - 8) > 0

    async def caller(number):
        asked = 0
        while not is_done():
            asked += 1
            text = b"%d:%d:" % (number, asked) + b"x" * draw.choice((0, 10, 200, 40_000))
            try:
                async with asyncio.timeout(draw.choice((0.0002, 0.002, 5.0))):
                    assert await real.command("ECHO", text) == text
                counts["right"] += 1
            except TimeoutError:
                counts["timeout"] += 1
            except ValkeyDown as error:
                counts[type(error)] += 1
                await asyncio.sleep(0)

    async def killer():
        while not is_done():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), draw.uniform(0.02, 0.1))
            await valkey.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            counts["kill"] += 1

    await asyncio.gather(killer(), *(caller(number) for number in range(20)))
    assert counts[ValkeyLost] + counts[ValkeyDown] > 0, counts
    await wait_echo(real)
    texts = [b"%d" % n for n in range(2_000)]
    tasks = [asyncio.create_task(real.command("ECHO", text)) for text in texts]
    await asyncio.sleep(0)
    for task in draw.sample(tasks, 700):
        task.cancel()
    ends = await ends_of(tasks)
    assert all(one in (text, CANCELLED) for one, text in zip(ends, texts, strict=True))
    assert ends.count(CANCELLED) == 700
