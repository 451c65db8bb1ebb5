"""A node whose folder of objects is not mounted: a missing file is no miss."""

from __future__ import annotations

import pytest
from raw_clients import serving

from headrace.engines.blobs import Blobs
from headrace.engines.mount_guard import StoreRecord


@pytest.fixture
async def marked(tmp_path):
    blobs = Blobs((tmp_path / "disk").as_uri(), record=StoreRecord(tmp_path / "object-store"))
    yield blobs
    await blobs.close()


async def test_a_disk_that_goes_while_a_node_serves_is_503_and_not_404(marked, tmp_path):
    await marked.put("track.mp3", b"music")
    async with serving(marked) as node:
        client = await node.connect()
        assert (await client.ask("track.mp3")).body == b"music"
        (tmp_path / "disk").rename(tmp_path / "away")
        (tmp_path / "disk").mkdir()
        answer = await (await node.connect()).ask("track.mp3")
        assert (answer.status, answer.fields["retry-after"]) == (503, "5")
        assert str(tmp_path).encode() not in answer.body
        (tmp_path / "disk").rmdir()
        (tmp_path / "away").rename(tmp_path / "disk")
        client = await node.connect()
        assert (await client.ask("track.mp3")).body == b"music"
        assert (await client.ask("gone.mp3")).status == 404
