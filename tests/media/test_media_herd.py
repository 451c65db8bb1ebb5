"""Bounded load on the origin: a herd costs one read per block, a stalled client two blocks."""

from __future__ import annotations

import asyncio

import pytest
from raw_clients import pattern, serving
from tests.kit.whole_nodes import Reader, pause, whole_node

from headrace.kernel.metrics import REGISTRY
from headrace.media.model import BLOCK_BYTES

pytestmark = pytest.mark.slow
BLOCKS = 12
HERD = 1000


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def bucket(blobs):
    """A node in this process that plays the S3 bucket `m` and counts requests."""
    async with serving(blobs) as node:
        node.settings = {"blobs_url": "s3://m", "media_workers": "2"}
        yield node


@pytest.fixture
def _far(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{bucket.port}")


@pytest.mark.usefixtures("_far")
async def test_a_thousand_clients_of_one_cold_track_read_each_block_once(bucket, tmp_path):
    data = pattern(BLOCKS * BLOCK_BYTES - 1000)
    await bucket.blobs.put("track.mp3", data)
    disks = f"{tmp_path}/a:16MiB, {tmp_path}/b:16MiB"
    async with whole_node(tmp_path / "node", media_disks=disks, **bucket.settings) as node:
        parts, sent = sample("media_requests_total", status="206"), sent_bytes()

        async def listen(number: int) -> None:
            reader = Reader(node.port)
            first = (number % BLOCKS) * BLOCK_BYTES
            for block in (first, (first + BLOCK_BYTES) % len(data)):
                last = min(block + BLOCK_BYTES, len(data)) - 1
                status, _, body = await reader.ask("track.mp3", block, last)
                assert (status, body) == (206, data[block : last + 1])
            reader.drop()

        await asyncio.gather(*(listen(n) for n in range(HERD)))
        assert sample("media_requests_total", status="206") - parts == BLOCKS
        assert sent_bytes() - sent == len(data)


@pytest.mark.usefixtures("_far")
async def test_clients_that_stop_reading_make_the_node_read_no_further(bucket, tmp_path):
    data = pattern(100 * BLOCK_BYTES)
    await bucket.blobs.put("track.mp3", data)
    disks = f"{tmp_path}/a:64MiB"
    async with whole_node(tmp_path / "node", media_disks=disks, **bucket.settings) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port, limit=1024)
        sent = sent_bytes()
        writer.write(b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        before = -1.0
        while sent_bytes() != before:
            before = sent_bytes()
            await pause(0.5)
        # The kernel's buffers on both sides count for the client; beyond them two blocks.
        assert sent_bytes() - sent < len(data) / 2
        assert await reader.readexactly(len(data)) == data
        writer.close()


def sent_bytes() -> float:
    """The bytes that the bucket sent."""
    return sum(sample("media_bytes_total", source=s) for s in ("memory", "disk"))
