"""Floods of slow clients hardly affect a healthy client."""

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


@pytest.fixture
async def settings(tmp_path):
    """A node with disks over a folder store with one long track."""
    blobs = Blobs((tmp_path / "store").as_uri())
    await blobs.put("track.mp3", content("track", 0, SIZE_BYTES))
    await blobs.close()
    return {
        "blobs_url": blobs.folder.as_uri(),
        "media_disks": f"{tmp_path}/a:64MiB",
        "media_workers": "2",
        "media_connections_max": "12000",
        "media_header_timeout": "3s",
    }


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


async def stand_the_flood(tmp_path, settings, *, loris: int, stalled: int, asks: int) -> None:
    async with whole_node(tmp_path, **settings) as node:
        await times_to_first_byte(node.port, 310)
        half_heads = await asyncio.to_thread(
            flood, node.port, loris, b"GET /m/track.mp3 HTTP/1.1\r\nX"
        )
        whole = b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n"
        readers = await asyncio.to_thread(flood, node.port, stalled, whole)
        taken = await times_to_first_byte(node.port, asks)
        assert taken[int(0.99 * asks)] < P99_S, f"p50 {taken[asks // 2]}, p99 {taken[-asks // 100]}"

        def are_answered() -> bool:
            # Each gets 408 by the deadline, however many there are.
            return all(_has_come(client) for client in (half_heads[0], half_heads[-1]))

        await wait_true(
            are_answered, what="the heads that never ended are over", deadline_s=DEADLINE_S
        )
        assert half_heads[-1].recv(100).startswith(b"HTTP/1.1 408")
        for client in (*half_heads, *readers):
            client.close()
        gone = "the node is free again"
        await wait_true(
            lambda: node.series("media_connections") <= 1, what=gone, deadline_s=DEADLINE_S
        )


def _has_come(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


@pytest.mark.slow
async def test_a_flood_of_slow_clients_does_not_hurt_a_healthy_one(tmp_path, settings):
    await stand_the_flood(tmp_path, settings, loris=600, stalled=200, asks=400)


@pytest.mark.soak
async def test_a_flood_of_ten_thousand_does_not_hurt_a_healthy_one(tmp_path, settings):
    await stand_the_flood(tmp_path, settings, loris=5000, stalled=5000, asks=2000)
