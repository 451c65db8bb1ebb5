"""Difficult clients of a node of every kind: ambiguous, slow, silent, too many, leaving."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest
from conformance_cases import BAD_HEADS, BODIES, OBJECTS, UNFINISHED
from node_kinds import BLOCKS, BYPASS, FILES, PEER, PYTHON_TLS, TLS
from raw_clients import (
    SMALL_BYTES,
    Answer,
    Client,
    head_of,
    open_files,
    pattern,
    pause,
    wait_until,
)
from tests.kit.waiting import wait_true

KEY, DATA, _ = OBJECTS["track"]
GOOD = head_of(KEY, fields={"Range": "bytes=0-9"})
LONG_KEY, LONG = "tracks/long.mp3", pattern(12_000_000)
"""More than the sockets of a client and the kernel take."""


def cuts(node, *reasons: str) -> float:
    return sum(node.series("media_cuts_total", reason=reason) for reason in reasons)


async def require_serving(node) -> None:
    client = await node.connect()
    assert (await client.ask(KEY, Range="bytes=0-9")).body == DATA[:10]
    client.drop()


# Framing


@pytest.mark.parametrize("step", [100_000, 5])
async def test_a_head_that_can_be_read_in_two_ways_ends_its_connection(plain, step):
    """The valid request behind it must not be answered: its start is ambiguous."""
    faults = []
    for name, (status, data) in BAD_HEADS.items():
        if step < len(data) > 400:
            continue
        client = await plain.connect()
        await client.send_in_pieces(data if name in UNFINISHED else data + GOOD, step)
        answer = await client.answer()
        if (answer.status, answer.fields["connection"]) != (status, "close"):
            faults.append((name, answer))
        assert answer.code.startswith("media.")
        assert await client.wait_closed() == b"", name
    assert faults == []
    await require_serving(plain)


@pytest.mark.parametrize(("status", "head"), BODIES)
async def test_a_body_is_never_read_as_a_request(plain, status, head):
    client = await plain.connect()
    # Far more than one receive: unread bytes at a close would reset the connection.
    client.send(head + GOOD * 3000)
    answer = await client.answer()
    assert (answer.status, answer.fields["connection"]) == (status, "close")
    assert await client.wait_closed() == b""


async def test_random_bytes_get_a_refusal_or_nothing(plain):
    chance = random.Random(5)
    for _ in range(60):
        data = bytearray(GOOD)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        client = await plain.connect()
        client.send(bytes(data) + b"\r\n\r\n")
        answer = await client.answer()
        assert answer.status in (200, 206, 304, 400, 404, 405, 416, 501, 505), (answer.status, data)
        client.drop()
    await require_serving(plain)


async def test_a_half_closed_client_gets_its_answer(plain, kind):
    if kind.is_tls:
        pytest.skip("TLS has no half-closed connections here")
    client = await plain.connect(buffer_bytes=SMALL_BYTES)
    client.send(f"GET /m/{KEY} HTTP/1.0\r\n\r\n".encode())
    client.writer.write_eof()
    answer = await client.answer()
    assert ((answer.body == DATA), answer.fields["connection"]) == (True, "close")
    assert await client.wait_closed() == b""


# Slow and silent clients


async def cut_as_silent(node) -> None:
    """A client that sends nothing is closed without an answer."""
    assert await (await node.connect()).wait_closed() == b""


async def cut_as_idle(node) -> None:
    client = await node.connect()
    assert (await client.ask(KEY, Range="bytes=0-9")).status == 206
    assert await client.wait_closed() == b""


async def cut_as_trickling(node) -> None:
    """Each byte of its head arrives within the timeout; the whole head does not."""
    client = await node.connect()
    waiting, sent = asyncio.create_task(client.answer()), b""
    while not waiting.done():
        client.send(b"GET /m/x HTTP/1.1\r\nX: "[: len(sent) + 1][len(sent) :] or b"x")
        sent += b"."
        await asyncio.wait([waiting], timeout=0.05)
    answer = await waiting
    assert (answer.status, answer.code) == (408, "media.head_timeout")
    client.drop()


async def cut_as_stalled(node) -> None:
    """It reads nothing until it and the sipping client are cut."""
    client = await node.connect(buffer_bytes=SMALL_BYTES)
    client.send(head_of(LONG_KEY))
    await wait_true(lambda: cuts(node, "stalled", "client") >= node.cuts_before + 2, what="cut")
    _, is_cut = await client.read_up_to(len(LONG))
    assert is_cut


async def cut_as_sipping(node) -> None:
    """It reads all the time, and only its measured progress shows the fault."""
    client = await node.connect(buffer_bytes=SMALL_BYTES)
    client.send(head_of(LONG_KEY))
    total, began_s = 0, time.monotonic()
    try:
        while piece := await client.reader.read(512):
            total += len(piece)
            await pause(0.02)
            assert time.monotonic() - began_s < 60
    except ConnectionResetError:
        pass
    assert total < len(LONG) / 2


async def keeps_reading(node) -> None:
    """A slow client whose progress is above the least is not cut."""
    client = await node.connect(buffer_bytes=32_768)
    client.send(head_of(KEY))
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    got = bytearray()
    while len(got) < len(DATA):
        got += await client.reader.read(20_000)
        await pause(0.05)
    assert (got == DATA) is True


async def test_slow_clients_are_cut_by_their_progress_and_deadlines(strict, kind):
    await strict.blobs.put(LONG_KEY, LONG)
    strict.cuts_before = cuts(strict, "stalled", "client")
    clients = [cut_as_silent, cut_as_idle, cut_as_trickling, keeps_reading]
    if not kind.is_tls:
        # The buffers of TLS hide the progress of a client with a small one.
        clients += [cut_as_stalled, cut_as_sipping]
    await asyncio.gather(*(client(strict) for client in clients))
    await require_serving(strict)


async def test_a_client_too_many_is_refused_at_once(strict):

    async def statuses(count: int) -> list[Answer]:
        clients = [await strict.connect() for _ in range(count)]
        for client in clients:
            client.send(GOOD)
        answers = await asyncio.gather(*(client.answer() for client in clients))
        for client in clients:
            client.drop()
        return answers

    async def are_all_served() -> bool:
        return {one.status for one in await statuses(5)} == {206}

    refused = [one for one in await statuses(20) if one.status != 206]
    assert {(one.status, one.code, one.fields["retry-after"]) for one in refused} == {
        (503, "media.too_many_connections", "1")
    }
    await wait_true(are_all_served, what="room again")


async def test_floods_leave_room_for_others(plain, kind):
    """Pipelined requests, and readers that stop: a client behind them is served."""
    await plain.blobs.put(LONG_KEY, LONG)
    flood = await plain.connect(buffer_bytes=SMALL_BYTES)
    flood.send(GOOD * 5000)
    count = 10 if kind.is_tls else 60
    stalled = [await plain.connect(buffer_bytes=SMALL_BYTES) for _ in range(count)]
    for client in stalled:
        client.send(head_of(LONG_KEY))
    other = await plain.connect()
    for _ in range(20):
        assert (await other.ask(KEY, Range="bytes=0-9")).body == DATA[:10]
    for client in (flood, other, *stalled):
        client.drop()


async def test_clients_that_leave_in_the_middle_leave_nothing_behind(plain, kind):
    await plain.blobs.put(LONG_KEY, LONG)
    await require_serving(plain)
    before = open_files()
    for _ in range(2):
        victims = [await plain.connect(buffer_bytes=SMALL_BYTES) for _ in range(10)]
        for client in victims:
            client.send(head_of(LONG_KEY))
        for client in victims:
            await client.wait_begun()
            client.drop()
    # The pool of connections to a remote store may grow, and that to the other node by ten.
    spare = 4 + 2 * 10 * (kind is PEER)
    await wait_until(lambda: kind is BYPASS or open_files() <= before + spare)
    await require_serving(plain)


# Objects that change while they are sent, and stops


async def test_an_object_replaced_while_it_is_sent_never_mixes(plain, kind):
    """The former bytes to the end, or a cut."""
    key = f"tracks/replaced-{time.time_ns()}.mp3"
    old, new = b"old!" * 4_000_000, b"new!" * 4_000_000
    await plain.blobs.put(key, old)
    client = await plain.connect(buffer_bytes=SMALL_BYTES)
    client.send(head_of(key))
    await client.wait_begun()
    await plain.blobs.put(key, new)
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    body, is_cut = await client.read_up_to(len(old))
    assert body == old[: len(body)]
    assert is_cut == (len(body) < len(old))
    if kind in (FILES, TLS, PYTHON_TLS):
        assert not is_cut
        assert ((await client.ask(key)).body == new) is True
    client.drop()


async def test_a_stop_ends_answers_in_progress_and_answers_what_was_sent_before_it(kind, tmp_path):
    async with kind.start(tmp_path) as node:
        await node.blobs.put(LONG_KEY, LONG)
        await node.blobs.put(KEY, DATA)
        idle, kept = await node.connect(), await node.connect()
        for client in (idle, kept):
            assert ((await client.ask(KEY)).body == DATA) is True
        busy = await node.connect(buffer_bytes=SMALL_BYTES)
        busy.send(head_of(LONG_KEY))
        await busy.wait_begun()
        waiting = socket.create_connection(("127.0.0.1", node.port))
        waiting.sendall(b"" if kind.is_tls else GOOD)
        kept.send(GOOD)
        node.stop.set()
        new = Client(*await asyncio.open_connection(sock=waiting))
        for client in (kept,) if kind.is_tls else (kept, new):
            assert (await client.answer()).body == DATA[:10]
        new.drop()
        assert await kept.wait_closed() == b""
        assert await idle.wait_closed() == b""
        assert ((await busy.answer()).body == LONG) is True
        await asyncio.wait_for(node.task, 60)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", node.port))


@pytest.mark.parametrize("kind", [FILES, BLOCKS, PEER], ids=str)
async def test_a_stop_cuts_clients_that_do_not_end(kind, tmp_path):
    async with kind.start(tmp_path, stop_timeout_s=0.2) as node:
        await node.blobs.put(LONG_KEY, LONG)
        client = await node.connect(buffer_bytes=SMALL_BYTES)
        client.send(head_of(LONG_KEY))
        await client.wait_begun()
        node.stop.set()
        await asyncio.wait_for(node.task, 60)
        _, is_cut = await client.read_up_to(len(LONG))
        assert is_cut
