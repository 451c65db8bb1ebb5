"""Bytes that change on a disk of a running node are not served, and the disk is retired."""

from __future__ import annotations

import asyncio
import mmap
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from raw_clients import Client
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import WholeNode, content, whole_node

from headrace.engines.blobs import Blobs
from headrace.media import Media, MediaConfig
from headrace.media.cache.filler_ipc import read_manifest
from headrace.media.cache.frame_table import FrameTable
from headrace.media.cache.layout import DATA_AT, Superblock
from headrace.media.cache.linux import is_in_memory, map_shared
from headrace.media.model import BLOCK_BYTES

pytestmark = pytest.mark.slow
TRACKS, BLOCKS = 8, 3
SIZE_BYTES = BLOCKS * BLOCK_BYTES
KEYS = [f"tracks/{number}.mp3" for number in range(TRACKS)]


@asynccontextmanager
async def full_node(folder: Path, disk: str = "32MiB"):
    """A node of two workers and one disk that holds every block of every track."""
    blobs = Blobs((folder / "store").as_uri())
    for key in KEYS:
        await blobs.put(key, content(key, 0, SIZE_BYTES))
    settings = {"blobs_url": blobs.folder.as_uri(), "media_workers": "2"}
    async with whole_node(folder, media_disks=f"{folder}/disk:{disk}", **settings) as node:
        for key in KEYS:
            await read(node, key)
        await wait_true(lambda: len(stored(node)) == TRACKS * BLOCKS, what="all blocks stored")
        yield node, blobs
    await blobs.close()


async def read(node: WholeNode, key: str, **fields: str):
    """The answer to one request on its own connection."""
    client = Client(*await asyncio.open_connection("127.0.0.1", node.port, limit=2 * SIZE_BYTES))
    try:
        return await client.ask(key, **fields)
    finally:
        client.drop()


def stored(node: WholeNode) -> list[int]:
    """The frames that hold a block."""
    [disk] = read_manifest(node.folder / "data/run/media").disks
    memory, _ = map_shared(disk.table_path)
    table = FrameTable(memory, Superblock(bytes.fromhex(disk.id), disk.frames))
    try:
        return [frame for frame in range(disk.frames) if table.entry(frame).tag]
    finally:
        table.close()


async def rot(node: WholeNode, frames: list[int]) -> None:
    """Change bytes of these frames on the disk and drop the disk's page cache."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(os.urandom(mmap.PAGESIZE))
    descriptor = os.open(node.folder / "disk" / "blocks", os.O_RDWR | os.O_DIRECT)
    try:
        os.fdatasync(descriptor)
        for frame in frames:
            os.pwrite(descriptor, page, DATA_AT + frame * BLOCK_BYTES + 25 * mmap.PAGESIZE)
        await wait_true(lambda: all(is_dropped(descriptor, f) for f in frames), what="dropped")
    finally:
        os.close(descriptor)


def is_dropped(descriptor: int, frame: int) -> bool:
    """Whether no page of a frame is in memory; a socket may hold its pages for a moment."""
    start = DATA_AT + frame * BLOCK_BYTES
    os.posix_fadvise(descriptor, start, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    return not any(
        is_in_memory(descriptor, start + page, mmap.PAGESIZE)
        for page in range(0, BLOCK_BYTES, mmap.PAGESIZE)
    )


async def disk_of(node: WholeNode):
    """The node's disk as users see it."""
    media = Media(
        Blobs((node.folder / "store").as_uri()),
        MediaConfig(),
        folder=node.folder / "data/run/media",
    )
    [disk] = await media.disks.list()
    return disk


async def test_a_track_whose_bytes_changed_on_the_disk_is_repaired_and_counted(tmp_path):
    async with full_node(tmp_path) as (node, _):
        for key in KEYS:
            assert (await read(node, key)).fields["cache-status"] == "headrace; hit"
        await rot(node, stored(node)[:4])
        answers = [(key, await read(node, key)) for key in KEYS]
        wrong = [key for key, answer in answers if answer.body != content(key, 0, SIZE_BYTES)]
        assert wrong == []
        disk = await disk_of(node)
        assert (disk.state, disk.rotten) == ("in use", 4)
        for key in KEYS:
            answer = await read(node, key)
            assert answer.body == content(key, 0, SIZE_BYTES)
            assert answer.fields["cache-status"] == "headrace; hit"
        await wait_true(
            lambda: node.series('media_disk_rotten_blocks{disk="0"}') == 4, what="the series"
        )


async def test_a_rotten_first_block_is_told_as_a_miss(tmp_path):
    async with full_node(tmp_path) as (node, _):
        await rot(node, stored(node)[:9])
        told = [(await read(node, key, Range="bytes=99000-120000")) for key in KEYS]
        misses = [one for one in told if one.fields["cache-status"] == "headrace; fwd=miss; stored"]
        for key, one in zip(KEYS, told, strict=True):
            assert one.body == content(key, 0, SIZE_BYTES)[99000:120001]
        rotten = (await disk_of(node)).rotten
        # The background check may have found others meanwhile.
        assert 0 < len(misses) <= rotten


async def test_a_crowd_that_asks_for_one_rotten_block_gets_no_wrong_byte(tmp_path):
    async with full_node(tmp_path) as (node, _):
        await rot(node, stored(node)[:8])
        wanted = [(key, first) for key in KEYS for first in (0, 90_000, 300_000) for _ in range(4)]
        answers = await asyncio.gather(
            *(read(node, key, Range=f"bytes={first}-{first + 99_999}") for key, first in wanted)
        )
        for (key, first), answer in zip(wanted, answers, strict=True):
            assert answer.body == content(key, 0, SIZE_BYTES)[first : first + 100_000]


async def test_without_its_object_store_a_rotten_block_fails(tmp_path):
    async with full_node(tmp_path) as (node, blobs):
        await rot(node, stored(node))
        blobs.folder.rename(tmp_path / "away")
        for key in KEYS[:3]:
            answer = await read(node, key, Range="bytes=0-262143")
            assert answer.status == 503
        (tmp_path / "away").rename(blobs.folder)


async def test_a_disk_that_goes_on_rotting_is_retired_and_stays_out(tmp_path):
    async with full_node(tmp_path) as (node, _):
        await rot(node, stored(node))
        for key in KEYS:
            assert (await read(node, key)).body == content(key, 0, SIZE_BYTES)
        await wait_true(lambda: node.series('media_disks{state="out"}') == 1, what="out")
        retired = await disk_of(node)
        assert retired.state == "out"
        assert "10 blocks" in retired.fault
        for key in KEYS:
            assert (await read(node, key)).body == content(key, 0, SIZE_BYTES)
        node.end()
        node.start()
        again = await disk_of(node)
        assert (again.state, again.fault) == ("out", retired.fault)
        media = Media(
            Blobs((tmp_path / "store").as_uri()),
            MediaConfig(),
            folder=node.folder / "data/run/media",
        )
        added = await media.disks.add(str(tmp_path / "disk"), 32 * 2**20)
        assert (added.state, added.fault, added.rotten) == ("in use", "", 0)
        for key in KEYS:
            assert (await read(node, key)).body == content(key, 0, SIZE_BYTES)
