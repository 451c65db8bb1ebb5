"""Messages between processes: whole however the stream is cut, in order, within their limit."""

from __future__ import annotations

import asyncio
import random
import socket

import msgspec
import pytest
from tests.kit.waiting import wait_true

from headrace.kernel import ipc
from headrace.kernel.ipc import (
    LENGTH_BYTES,
    MessageConnection,
    MessageSplitter,
    encode_message,
    message_decoder,
    read_message,
    receive_message,
)

VALUES = ["", "a", ["x" * 300, 7], {"many": list(range(1000))}, "y" * 70_000, None]
TOO_LONG = (2**31).to_bytes(LENGTH_BYTES, "little")


def decoded(bodies):
    return [msgspec.msgpack.decode(body) for body in bodies]


@pytest.mark.parametrize("most", [1, 3, 5, 64, 5000, 200_000])
def test_messages_arrive_whole_however_the_stream_is_cut(most):
    stream = b"".join(encode_message(value) for value in VALUES * 2)
    splitter, found, rng = MessageSplitter(), [], random.Random(most)
    while stream:
        cut = rng.randint(1, most)
        found += decoded(splitter.feed(stream[:cut]))
        stream = stream[cut:]
    assert found == VALUES * 2


async def test_both_ends_of_a_connection_exchange_messages_and_see_the_end():
    received, lost = [], []
    first, second = (
        MessageConnection(msgspec.msgpack.decode, received.append, lambda: lost.append(1))
        for _ in range(2)
    )
    ours, theirs = socket.socketpair()
    for value in VALUES:
        first.send(value)
    await first.connect(ours)
    await second.connect(theirs)
    await first.flush()
    second.send("back")
    await wait_true(lambda: len(received) == len(VALUES) + 1)
    assert [one for one in received if one != "back"] == VALUES
    first.close()
    await wait_true(lambda: len(lost) == 2)
    second.send("dropped")
    await second.flush()


def test_code_that_blocks_receives_messages():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode_message(["config", 1]) + encode_message("next")[:-1])
        assert msgspec.msgpack.decode(receive_message(ours)) == ["config", 1]
        theirs.close()
        with pytest.raises(EOFError):
            receive_message(ours)


async def test_a_message_over_the_limit_is_another_protocol(monkeypatch):
    with pytest.raises(ValueError, match="another protocol"):
        MessageSplitter().feed(TOO_LONG)
    reader = asyncio.StreamReader()
    reader.feed_data(encode_message("ten bytes!") + encode_message("more than ten bytes"))
    assert msgspec.msgpack.decode(await read_message(reader, bytes_max=11)) == "ten bytes!"
    with pytest.raises(ValueError, match="exceeds 11"):
        await read_message(reader, bytes_max=11)
    monkeypatch.setattr(ipc, "BODY_BYTES_MAX", 3)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode_message("four"))
        with pytest.raises(ValueError, match="exceeds 3"):
            receive_message(ours)


NESTED = b"\x91" * 200_000 + b"\xc0"
"""Lists in a list. The limit of Python 3.11 is about 1,000, that of 3.13 about 10,000."""


@pytest.mark.parametrize("body", [NESTED, b"\xc1", b"", encode_message("a")[LENGTH_BYTES:-1]])
async def test_a_malformed_message_closes_its_connection_and_no_other(body):
    received, lost = [], []
    loop = asyncio.get_running_loop()
    unexpected = []
    loop.set_exception_handler(lambda _, context: unexpected.append(context))
    try:
        link = MessageConnection(message_decoder(object), received.append, lambda: lost.append(1))
        ours, theirs = socket.socketpair()
        await link.connect(ours)
        with theirs:
            theirs.setblocking(False)
            data = encode_message("good") + len(body).to_bytes(LENGTH_BYTES, "little") + body
            await loop.sock_sendall(theirs, data + encode_message("after it"))
            await wait_true(lambda: lost)
    finally:
        loop.set_exception_handler(None)
    assert received == ["good"]
    assert unexpected == []
