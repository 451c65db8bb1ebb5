"""A remote store: a second node plays the S3 bucket `m`, since it serves /m/{key} by range."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from raw_clients import pattern, serving, wait_until

from headrace.engines.blobs import Blobs
from headrace.kernel.metrics import REGISTRY

SIZE_BYTES = 3_000_000


def cuts() -> float:
    return REGISTRY.get_sample_value("media_cuts_total", {"reason": "source"}) or 0.0


@pytest.fixture
def bucket(monkeypatch):
    """Make the store that has `/m/` of this port as its bucket."""
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")

    def make(port: int) -> Blobs:
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{port}")
        return Blobs("s3://m")

    return make


async def test_ranges_and_conditions_are_the_same_through_a_distant_store(node, bucket):
    data = pattern(SIZE_BYTES)
    key = await node.put(data)
    async with serving(bucket(node.port)) as far:
        client = await far.connect()
        whole = await client.ask(key)
        assert (whole.status, whole.body) == (200, data)
        assert whole.fields["cache-status"] == "headrace; fwd=bypass"
        near = (await (await node.connect()).ask(key)).fields
        assert {n: v for n, v in whole.fields.items() if n not in ("date", "cache-status")} == {
            n: v for n, v in near.items() if n not in ("date", "cache-status")
        }
        part = await client.ask(key, Range="bytes=262100-1000000")
        assert (part.status, part.body) == (206, data[262100:1000001])
        assert (await client.ask(key, Range=f"bytes={SIZE_BYTES}-")).status == 416
        assert (await client.ask(key, If_None_Match=whole.fields["etag"])).status == 304
        assert (await client.ask(key, method="HEAD")).fields["content-length"] == str(SIZE_BYTES)
        assert (await client.ask("photos/none.jpg")).status == 404
        assert (await client.ask(key, Range="bytes=0-0")).body == data[:1]


async def test_pipelined_requests_wait_for_the_store_in_order(node, bucket):
    keys = [await node.put(pattern(300_000 + n)) for n in range(4)]
    async with serving(bucket(node.port)) as far:
        client = await far.connect()
        for key in keys * 3:
            client.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        for n in [*range(4)] * 3:
            assert (await client.answer()).body == pattern(300_000 + n)


async def test_a_store_that_does_not_answer_is_503(bucket):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        store = bucket(deaf.getsockname()[1])
        async with serving(store, origin_timeout_s=0.3) as far:
            client = await far.connect()
            answer = await client.ask("track.mp3")
            assert (answer.status, answer.fields["retry-after"]) == (503, "5")
            assert json.loads(answer.body)["code"] == "media.store_unavailable"
            assert (await client.ask("track.mp3")).status == 503


async def test_a_store_that_goes_away_cuts_the_body(node, bucket):
    await node.blobs.put("track.mp3", pattern(30_000_000))
    before = cuts()
    async with serving(bucket(node.port), origin_timeout_s=0.5) as far:
        client = await far.connect(limit=1024)
        client.send(b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n")
        await wait_until(lambda: len(client.reader._buffer) > 1024)
        await node.blobs.delete("track.mp3")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.answer()
        assert cuts() == before + 1


async def test_an_object_replaced_in_the_store_never_mixes(node, bucket):
    await node.blobs.put("track.mp3", b"old!" * 8_000_000)
    before = cuts()
    async with serving(bucket(node.port)) as far:
        client = await far.connect(limit=1024)
        client.send(b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n")
        await wait_until(lambda: len(client.reader._buffer) > 1024)
        await node.blobs.put("track.mp3", b"new!" * 8_000_000)
        got, is_reset = b"", False
        try:
            while piece := await client.reader.read(1_000_000):
                got += piece
        except ConnectionResetError:
            is_reset = True
        assert is_reset
        assert b"new!" not in got
        assert cuts() == before + 1


async def test_a_stalled_client_holds_two_blocks_of_demand(node, bucket):
    key = await node.put(pattern(30_000_000))

    def fetched() -> float:
        return REGISTRY.get_sample_value("media_bytes_total", {"source": "memory"}) or 0.0

    def sent() -> float:
        return REGISTRY.get_sample_value("media_bytes_total", {"source": "origin"}) or 0.0

    async with serving(bucket(node.port)) as far:
        before = fetched() - sent()
        client = await far.connect(limit=1024)
        client.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        seen = []

        def stands_still() -> bool:
            seen.append(fetched())
            return len(seen) > 60 and len(set(seen[-50:])) == 1

        await wait_until(stands_still)
        assert fetched() < 30_000_000 + before
        assert fetched() - sent() - before <= 2 * 262_144
