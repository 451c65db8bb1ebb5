"""Scheduling in one worker: new requests come before clients with room in their sockets."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios

import pytest
from raw_clients import DEADLINE_S, pattern, pause, serving, wait_until

from headrace.media.worker.node import EVENTS_MAX, QUEUED_MAX

SLOW = EVENTS_MAX + 4 * QUEUED_MAX
RECEIVE_BUFFER_BYTES = 64 * 1024
DRAINED_BYTES = 1 << 20


def connect_slow(served) -> socket.socket:
    """A client that reads nothing by itself."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    client.connect(("127.0.0.1", served.port))
    client.setblocking(False)
    return client


def waiting_bytes(client: socket.socket) -> int:
    return struct.unpack("i", fcntl.ioctl(client.fileno(), termios.FIONREAD, bytes(4)))[0]


def drain(client: socket.socket) -> None:
    """Read all that is in the kernel; the node sends nothing meanwhile."""
    try:
        while client.recv(DRAINED_BYTES):
            pass
    except BlockingIOError:
        pass


async def wait_full(clients: list[socket.socket]) -> None:
    """Return once no more bytes arrive for any of them, since none of them reads."""
    before = None
    async with asyncio.timeout(DEADLINE_S):
        while (now := [waiting_bytes(client) for client in clients]) != before or not all(now):
            before = now
            await pause(0.05)


@pytest.mark.slow
async def test_who_asks_goes_before_those_that_only_have_room_again(blobs):
    # The native plane serves in a thread of its own, so nothing is ready at once for it.
    async with serving(blobs, connections_max=SLOW + 10, data_plane="python") as served:
        key = await served.put(pattern(4_000_000))
        head = f"GET /m/{key} HTTP/1.1\r\nHost: media.test\r\n\r\n".encode()
        fast = connect_slow(served)
        fast.sendall(head.replace(b"\r\n\r\n", b"\r\nRange: bytes=0-9\r\n\r\n"))
        await wait_until(lambda: waiting_bytes(fast))
        drain(fast)
        slow = [connect_slow(served) for _ in range(SLOW)]
        for client in slow:
            client.sendall(head)
        await wait_full(slow)
        # The node runs in this loop, so all of this is ready at its next poll, the request last.
        for client in slow:
            drain(client)
        fast.sendall(head.replace(b"\r\n\r\n", b"\r\nRange: bytes=0-9\r\n\r\n"))
        while not waiting_bytes(fast):
            await asyncio.sleep(0)
        served_before = sum(waiting_bytes(client) > 0 for client in slow)
        assert served_before < SLOW // 2, served_before
        await wait_until(lambda: all(waiting_bytes(client) for client in slow))
        for client in (fast, *slow):
            client.close()
