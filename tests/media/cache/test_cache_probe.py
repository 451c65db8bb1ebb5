"""Bytes in a socket outlive their frame; the probe detects disks where they do not."""

from __future__ import annotations

import os

import pytest
from cache_lab import block_data, disk_bytes, is_block, look_up, put_object

from headrace.media.cache import Frame
from headrace.media.cache.disk import open_disk
from headrace.media.cache.disk_files import _receive, _send_unread, keeps_sent_bytes, write_whole
from headrace.media.cache.linux import remove_shared
from headrace.media.model import BLOCK_BYTES, DiskConfig


@pytest.fixture
def disk(tmp_path):
    found = open_disk(DiskConfig(tmp_path / "disk", disk_bytes(1)), tmp_path, is_same_boot=False)
    yield found
    found.close()
    remove_shared(tmp_path)


def test_this_disk_keeps_what_was_sent(disk):
    assert keeps_sent_bytes(disk.files, disk.write_block)
    assert not disk.is_copied


def test_writing_without_punching_is_found_out(disk):
    def overwrite(frame: int, data: bytes) -> None:
        write_whole(disk.files.blocks, data, disk.files.offset_of(frame))

    assert not keeps_sent_bytes(disk.files, overwrite)


def test_a_punch_over_the_border_is_found_out(disk):
    """As if a folio crossed the border: the socket's page is zeroed beyond it."""

    def zero_in_place(frame: int, data: bytes) -> None:
        disk.write_block(frame, data)
        write_whole(disk.files.blocks, bytes(4096), disk.files.offset_of(frame) + BLOCK_BYTES)

    assert not keeps_sent_bytes(disk.files, zero_in_place)


def test_a_disk_that_cannot_punch_is_copied(disk):
    def refuse(frame: int, data: bytes) -> None:
        raise OSError(95, "not supported")

    assert not keeps_sent_bytes(disk.files, refuse)


def test_a_stalled_client_gets_the_block_that_was_there(disk):
    """Twenty fills of one frame, with clients that read only at the end."""
    waiting = []
    for number in range(20):
        data = block_data("old", number)
        disk.write_block(3, data)
        client, count = _send_unread(disk.files.reader, disk.files.offset_of(3))
        assert count
        waiting.append((client, data[:count]))
    for client, data in waiting:
        assert _receive(client, len(data)) == data
        client.close()


async def test_a_disk_that_failed_the_probe_is_served_by_copying(one_set, blobs):
    node = one_set
    shape = await put_object(blobs, "a.mp3", 3)
    keys = [node.store.key("a.mp3", shape, number) for number in range(3)]
    for key in keys:
        assert isinstance(await node.store.block(key), Frame)
    node.disk().is_copied = True
    node.filler._disks._publish()
    for key in keys:
        assert look_up(node.store, key) is None
        assert is_block(await node.store.block(key), key)
    os.pwrite(node.disk().files.blocks, b"damaged", node.disk().files.offset_of(0))
    for key in keys:
        assert is_block(await node.store.block(key), key)
