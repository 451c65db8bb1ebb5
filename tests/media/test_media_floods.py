"""Floods of slow clients on a node of processes hardly affect a healthy client."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import DEADLINE_S, Reader, content, flood, whole_node

from headrace.engines.blobs import Blobs

SIZE_BYTES = 20_000_000
P99_S = 1.0
"""Less than the deadline of 3 s for which an affected client would wait."""


async def times_to_first_byte(port: int, count: int) -> list[float]:
    """The times of a healthy client's ranges, sorted."""
    data, reader, taken = content("track", 0, SIZE_BYTES), Reader(port), []
    for number in range(count):
        first = number * 65_536 % (SIZE_BYTES - 16)
        began_s = time.perf_counter()
        assert (await reader.ask("track.mp3", first, first + 15))[2] == data[first : first + 16]
        taken.append(time.perf_counter() - began_s)
    reader.drop()
    return sorted(taken)


def has_answer(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


@pytest.mark.soak
@pytest.mark.parametrize(("loris", "stalled", "count"), [(600, 200, 400), (5000, 5000, 2000)])
async def test_a_flood_of_slow_clients_does_not_hurt_a_healthy_one(tmp_path, loris, stalled, count):
    blobs = Blobs((tmp_path / "store").as_uri())
    await blobs.put("track.mp3", content("track", 0, SIZE_BYTES))
    await blobs.close()
    settings = {
        "blobs_url": blobs.folder.as_uri(),
        "media_disks": f"{tmp_path}/a:64MiB",
        "media_workers": "2",
        "media_connections_max": "12000",
        "media_header_timeout": "3s",
    }
    async with whole_node(tmp_path, **settings) as node:
        await times_to_first_byte(node.port, 310)
        half = b"GET /m/track.mp3 HTTP/1.1\r\nX"
        half_heads = await asyncio.to_thread(flood, node.port, loris, half)
        whole = b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n"
        readers = await asyncio.to_thread(flood, node.port, stalled, whole)
        taken = await times_to_first_byte(node.port, count)
        assert taken[int(0.99 * count)] < P99_S, f"p50 {taken[count // 2]}, p99 {taken[-1]}"
        # Each gets 408 by the deadline, however many there are.
        await wait_true(
            lambda: all(map(has_answer, (half_heads[0], half_heads[-1]))),
            what="the heads that never ended are over",
            deadline_s=DEADLINE_S,
        )
        assert half_heads[-1].recv(100).startswith(b"HTTP/1.1 408")
        for client in (*half_heads, *readers):
            client.close()
        await wait_true(
            lambda: node.series("media_connections") <= 1, what="room", deadline_s=DEADLINE_S
        )
