"""Each answer marks a stored block once, except the answer that it was filled for."""

from __future__ import annotations

import asyncio
import socket

import pytest
from raw_clients import Client
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import Reader, WholeNode, content, whole_node

from headrace.engines.blobs import Blobs
from headrace.media.cache.filler_ipc import read_manifest
from headrace.media.cache.frame_table import MARKS_MAX, FrameTable
from headrace.media.cache.layout import Superblock
from headrace.media.cache.linux import map_shared
from headrace.media.model import BLOCK_BYTES

pytestmark = pytest.mark.slow
KEY, BLOCKS = "tracks/a.mp3", 3
SIZE_BYTES = BLOCKS * BLOCK_BYTES


def marks_of(node: WholeNode) -> list[int]:
    """The marks of all stored blocks."""
    [run] = {path.parent for path in node.folder.rglob("filler.lock")}
    [disk] = read_manifest(run).disks
    memory, _ = map_shared(disk.table_path)
    table = FrameTable(memory, Superblock(bytes.fromhex(disk.id), disk.frames))
    try:
        return [table.visited[frame] for frame in range(disk.frames) if table.entry(frame).tag]
    finally:
        table.close()


async def read_whole(node: WholeNode) -> None:
    """Read the track on its own connection, with a buffer that needs many epochs."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", node.port))
    reader = Reader(node.port)
    reader._streams = await asyncio.open_connection(sock=client, limit=65536)
    found = await reader.ask(KEY, 0, SIZE_BYTES - 1)
    reader.drop()
    assert found is not None
    assert found[2] == content("a", 0, SIZE_BYTES)


async def test_one_answer_is_one_visit_and_a_fill_is_none(tmp_path):
    blobs = Blobs((tmp_path / "store").as_uri())
    await blobs.put(KEY, content("a", 0, SIZE_BYTES))
    settings = {"blobs_url": blobs.folder.as_uri(), "media_workers": "1"}
    async with whole_node(tmp_path, media_disks=f"{tmp_path}/disk:32MiB", **settings) as node:
        seen = []
        for _ in range(4):
            await read_whole(node)
            # The answer does not wait for a slow disk: the block is placed later.
            await wait_true(lambda: len(marks_of(node)) == BLOCKS, what="all blocks stored")
            seen.append(marks_of(node))
    await blobs.close()
    assert seen == [[marks] * BLOCKS for marks in (0, 1, MARKS_MAX, MARKS_MAX)]


async def test_a_head_is_a_hit_once_the_object_is_stored(tmp_path):
    """A repeated range of another origin has its own fields, also for known heads."""
    blobs = Blobs((tmp_path / "store").as_uri())
    await blobs.put(KEY, content("a", 0, SIZE_BYTES))
    settings = {"blobs_url": blobs.folder.as_uri(), "media_workers": "1", "media_cors_origins": "*"}
    async with whole_node(tmp_path, media_disks=f"{tmp_path}/disk:32MiB", **settings) as node:
        client = Client(*await asyncio.open_connection("127.0.0.1", node.port, limit=2**20))
        first = [await client.ask(KEY, method="HEAD") for _ in range(4)]
        unchanged = await client.ask(KEY, If_None_Match=first[0].fields["etag"])
        assert {one.fields["cache-status"] for one in (*first, unchanged)} == {"headrace; fwd=miss"}
        await read_whole(node)
        await wait_true(lambda: len(marks_of(node)) == BLOCKS, what="all blocks stored")
        head = await client.ask(KEY, method="HEAD")
        assert (head.status, head.fields["cache-status"]) == (200, "headrace; hit")
        parts = [
            await client.ask(KEY, Range=f"bytes={start}-{start + 9}", Origin="https://a.example")
            for start in range(5)
        ]
        assert {one.fields["access-control-allow-origin"] for one in parts} == {"*"}
        client.drop()
    await blobs.close()
