"""Messages between our own processes: agent, slots, zygote, filler and media workers.

A damaged message closes the connection it arrived on. The receiver lives, and its other connections
exchange messages as before.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import damaged

from headrace.engines.blobs import Blobs
from headrace.engines.remote import PackedError
from headrace.jobs import messages
from headrace.jobs.agent import zygote_protocol
from headrace.jobs.messages import decode_from_slot, decode_to_slot
from headrace.kernel.ipc import MessageConnection, MessageSplitter, encode_message
from headrace.media.cache import Filler, filler_ipc
from headrace.media.cache.filler_ipc import SOCKET_NAME, Command, GetBlock, GetShape, control
from headrace.media.model import Shape
from headrace.media.worker.ipc_reports import Report, decode_report

PATIENCE_S = 60
TO_SLOT = [
    messages.Work(
        queue="mail",
        lease_id=7,
        ids=[1, 2],
        payloads=[b'{"to":"ann"}', b"{}"],
        attempts=[0, 1],
        losses=[0, 0],
        lanes=[None, "ann"],
        headers=[None, None],
        versions=[1, 1],
        retries=3,
    ),
    messages.Stop(2.0),
    messages.CancelJob(7),
    messages.SpendAnswer(1, 0.5, 12.0),
    messages.Result(1, {"rows": [[1, "a", None]]}),
    messages.Result(2, None),
    messages.Failure(1, PackedError("jobs.queue_unknown", "no such queue")),
]
FROM_SLOT = [
    messages.Ready(42),
    messages.Ack(lease_id=7, outcomes={1: messages.Outcome("done"), 2: messages.Outcome("fail")}),
    messages.Progress(1, 0.5, "half"),
    messages.Spend(1, "mail", "ann", 2, 1.0),
    messages.Statement(2, "one", "SELECT 1", {"id": 1}),
    messages.Abandon(2),
    messages.Recycle(2**30, "memory"),
    messages.Left(),
]
TO_FILLER = [
    GetBlock(1, "a.bin", "v", 0, wants_bytes=True),
    GetShape(2, "a.bin", 0, is_fresh=True),
    Command(3, "disks", {}),
    Command(4, "disks", {"a": None}),
    filler_ipc.WrongBlock("00" * 16, 5, 1),
    filler_ipc.DiskFault("00" * 16, 5),
]
REPLIES = [
    filler_ipc.BlockReply(1, b"bytes"),
    filler_ipc.ShapeReply(1, Shape(9, "e", 0, is_immutable=True), 5.0),
    filler_ipc.CommandReply(1, {"disks": []}),
    filler_ipc.CommandReply(1, None),
    filler_ipc.ErrorReply(1, "media.object_unknown", "no object", None),
]
REPORTS = [Report(is_ready=True, grown=[], gauges=[("g", {"a": "b"}, 1.0)])]
NESTED = b"\x91" * 20_000
"""Lists in a list. The limit of Python 3.11 is about 1,000, that of 3.13 about 10,000."""


def streams(said) -> st.SearchStrategy[bytes]:
    """Damaged streams of these messages."""
    whole = [bytes(encode_message(one)) for one in said]
    # The last value of a message becomes a nested one; some fields take any value.
    deep = [
        (len(one) - 5 + len(NESTED)).to_bytes(4, "little") + one[4:-1] + NESTED for one in whole
    ]
    return damaged([b"".join(whole), *whole]) | st.sampled_from(deep) | st.binary()


RECEIVERS = {
    "slot": (TO_SLOT, decode_to_slot),
    "agent": (FROM_SLOT, decode_from_slot),
    "supervisor": (REPORTS, decode_report),
}


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_a_damaged_message_closes_its_connection_alone(receiver):
    said, decode = RECEIVERS[receiver]
    loop = asyncio.new_event_loop()
    faults = []
    loop.set_exception_handler(lambda _, context: faults.append(context))

    async def exchange(data: bytes) -> None:
        received, lost = [], asyncio.Event()
        link = MessageConnection(decode, received.append, lost.set)
        ours, theirs = socket.socketpair()
        await link.connect(ours)
        loop = asyncio.get_running_loop()
        with theirs:
            theirs.setblocking(False)
            await loop.sock_sendall(theirs, data)
            theirs.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(PATIENCE_S):
                await lost.wait()
        assert all(isinstance(one, msgspec.Struct) for one in received)
        link.close()

    def check(data: bytes) -> None:
        loop.run_until_complete(exchange(data))
        assert faults == [], faults

    try:
        for one in said:
            assert decode(bytes(encode_message(one))[4:]) == one
        fuzz(streams(said), check, examples=100, share=0.15)
    finally:
        loop.close()


def test_a_reader_of_streams_finds_messages_or_a_fault():
    def check(data: bytes) -> None:
        splitter = MessageSplitter()
        try:
            bodies = [body for byte in data[:200] for body in splitter.feed(bytes([byte]))]
        except ValueError:
            return
        assert b"".join(bodies) in data[:200] or len(bodies) > 1

    fuzz(streams(TO_FILLER), check, examples=100, share=0.05)


def test_a_damaged_packet_of_the_zygote_is_refused():
    packets = [
        msgspec.msgpack.encode(one)
        for one in (zygote_protocol.Fork(3), zygote_protocol.Exited(3, 42, -9))
    ]

    def check(packet: bytes) -> None:
        ours, theirs = zygote_protocol.make_pair()
        with ours, theirs:
            ours.send(packet or b"\0")
            theirs.setblocking(False)
            try:
                zygote_protocol.receive_from_zygote(theirs)
            except ValueError:
                return

    fuzz(damaged(packets), check, examples=100, share=0.1)


@pytest.mark.slow
def test_the_filler_outlives_damaged_messages(tmp_path):
    loop = asyncio.new_event_loop()
    faults = []
    loop.set_exception_handler(lambda _, context: faults.append(context))

    async def exchange(data: bytes) -> None:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET_NAME))
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
        writer.close()
        assert await control(tmp_path / SOCKET_NAME, "disks", timeout_s=PATIENCE_S) == []

    def check(data: bytes) -> None:
        loop.run_until_complete(exchange(data))
        assert faults == [], faults

    async def start() -> tuple[Blobs, asyncio.Task[None], asyncio.Event]:
        blobs = Blobs((tmp_path / "blobs").as_uri())
        filler = Filler(blobs, (), run=Path(tmp_path), boot="", hash_key=b"k" * 32)
        stop, ready = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(filler.run(stop, ready.set))
        async with asyncio.timeout(PATIENCE_S):
            await ready.wait()
        return blobs, running, stop

    async def end(blobs: Blobs, running: asyncio.Task[None], stop: asyncio.Event) -> None:
        stop.set()
        await running
        await blobs.close()

    try:
        parts = loop.run_until_complete(start())
        fuzz(streams(TO_FILLER), check, examples=60, share=0.2)
        loop.run_until_complete(end(*parts))
    finally:
        loop.close()


@pytest.mark.slow
def test_a_worker_outlives_damaged_replies_of_the_filler(tmp_path):
    loop = asyncio.new_event_loop()
    faults = []
    loop.set_exception_handler(lambda _, context: faults.append(context))

    async def exchange(data: bytes) -> None:
        rounds = iter([data])

        async def serve(reader, writer) -> None:
            await reader.readexactly(4)
            good = encode_message(filler_ipc.CommandReply(1, "good"))
            writer.write(next(rounds, bytes(good)))
            writer.write_eof()
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(serve, str(tmp_path / SOCKET_NAME))
        client = filler_ipc.FillerClient(tmp_path, timeout_s=PATIENCE_S)
        try:
            reply = await client.request(lambda call: Command(call, "disks", {}))
            assert isinstance(reply, filler_ipc.Reply)
        except filler_ipc.HeadraceError:
            pass
        finally:
            await client.close()
            server.close()
            await server.wait_closed()

    def check(data: bytes) -> None:
        (tmp_path / SOCKET_NAME).unlink(missing_ok=True)
        loop.run_until_complete(exchange(data))
        assert faults == [], faults

    try:
        fuzz(streams(REPLIES), check, examples=20, share=0.2)
    finally:
        loop.close()
