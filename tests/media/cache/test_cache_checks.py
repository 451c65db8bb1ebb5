"""Blocks are compared with their checksums: on request, in the background, before they are sent.

Bytes in a socket outlive their frame; the probe at the start detects disks where they do not.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from cache_lab import (
    disk_bytes,
    is_block,
    keys_of,
    look_up,
    put_object,
    read_all,
    read_block,
)
from tests.kit.waiting import wait_true

from headrace.media.cache import Frame, control
from headrace.media.cache.disk import (
    ROTTEN_MAX,
    DiskState,
    Verdict,
    check_frame,
    open_disk,
    scrub,
)
from headrace.media.cache.disk_files import keeps_sent_bytes, write_whole
from headrace.media.cache.frame_table import COLD, VERIFIED
from headrace.media.cache.linux import _RESIDENCY, is_in_memory, remove_shared
from headrace.media.model import BLOCK_BYTES, DiskConfig


async def filled(node, blobs, blocks: int = 8) -> list:
    keys = keys_of(node.store, {"a.mp3": await put_object(blobs, "a.mp3", blocks)})
    await read_all(node.store, keys)
    return keys


def damage(node, frames: list[int]) -> None:
    disk = node.disk()
    for frame in frames:
        os.pwrite(disk.files.blocks, b"damaged", disk.files.offset_of(frame) + 1000)


async def test_verify_takes_a_share(one_set, blobs):
    await filled(one_set, blobs, 16)
    assert 1 <= (await control(one_set.socket, "verify", share=0.25))["blocks"] <= 4


async def test_the_scrub_goes_over_every_frame(one_set, blobs):
    keys = await filled(one_set, blobs)
    damage(one_set, [0])
    task = asyncio.create_task(scrub(one_set.disk(), bytes_per_s=1e12))
    await wait_true(
        lambda: sum(look_up(one_set.store, key) is None for key in keys) == 1, what="found"
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_that_sees_a_wrong_sum_has_the_frame_hidden(one_set, blobs):
    [key] = await filled(one_set, blobs, 1)
    await one_set.restart()
    damage(one_set, [0])
    # The scrub may have found it first.
    one_set.disk().table.verified[0] = 0
    assert await one_set.store._prove(key, is_copy=False) is None
    await wait_true(lambda: not one_set.disk().table.entry(0).tag, what="hidden by the filler")


async def test_a_frame_that_changes_under_a_check_is_left_alone(one_set, blobs):
    await filled(one_set, blobs)
    disk = one_set.disk()
    checking = asyncio.create_task(check_frame(disk, 2))
    await asyncio.sleep(0)
    disk.busy.add(2)
    assert (await checking).verdict is Verdict.CHANGED
    assert (await check_frame(disk, 2)).verdict is Verdict.EMPTY
    disk.busy.discard(2)
    assert (await check_frame(disk, 2)).verdict is Verdict.RIGHT
    assert (await check_frame(disk, 15)).verdict is Verdict.EMPTY


async def test_checks_give_back_the_memory_they_took(one_set, blobs):
    await filled(one_set, blobs, 2)
    files = one_set.disk().files
    os.fdatasync(files.blocks)
    os.posix_fadvise(files.blocks, 0, 0, os.POSIX_FADV_DONTNEED)
    offset = files.offset_of(0)
    assert not is_in_memory(files.reader, offset, BLOCK_BYTES)
    assert (await control(one_set.socket, "verify"))["right"] == 2
    assert not is_in_memory(files.reader, offset, BLOCK_BYTES)


def drop_from_memory(node) -> None:
    files = node.disk().files
    os.fdatasync(files.blocks)
    os.posix_fadvise(files.blocks, 0, 0, os.POSIX_FADV_DONTNEED)


def is_warm(store, key) -> bool | None:
    """Whether the whole block can be sent from memory; None: it is not found."""
    store.enter_epoch()
    try:
        frame = store.find(key)
        return None if frame is None else store.is_warm(frame, 0, frame.length)
    finally:
        store.leave_epoch()


async def test_a_cold_block_is_compared_off_the_loop_before_it_is_found_again(one_set, blobs):
    [key] = await filled(one_set, blobs, 1)
    assert is_warm(one_set.store, key)
    drop_from_memory(one_set)
    assert is_warm(one_set.store, key) is False
    assert is_warm(one_set.store, key) is None
    assert one_set.disk().table.verified[0] == COLD
    assert one_set.disk().rotten == 0
    await one_set.store.block(key)
    assert is_warm(one_set.store, key)
    assert one_set.disk().table.verified[0] == VERIFIED


async def test_what_a_read_brought_is_not_sent_before_it_is_compared(one_set, blobs):
    """Two workers: one reads an uncached block; the other finds its pages in memory meanwhile."""
    [key] = await filled(one_set, blobs, 1)
    other = one_set.open_cache(1)
    drop_from_memory(one_set)
    assert is_warm(one_set.store, key) is False
    os.pread(one_set.disk().files.reader, BLOCK_BYTES, one_set.disk().files.offset_of(0))
    assert is_warm(other, key) is None
    assert is_block(await other.block(key, is_copy=True), key)
    assert is_warm(one_set.store, key)


async def test_a_block_of_which_one_page_is_cold_is_cold(one_set, blobs):
    if _RESIDENCY.is_refused:
        pytest.skip("this kernel counts no cached pages")
    [key] = await filled(one_set, blobs, 1)
    drop_from_memory(one_set)
    files = one_set.disk().files
    at = files.offset_of(0)
    for start, count in ((0, 4096), (BLOCK_BYTES - 4096, 4096)):
        os.pread(files.reader, count, at + start)
    assert not is_in_memory(files.reader, at, BLOCK_BYTES)
    assert is_in_memory(files.reader, at, 4096)
    assert is_warm(one_set.store, key) is False


async def test_rot_is_counted_where_a_block_was_right_before(one_set, blobs):
    keys = await filled(one_set, blobs)
    damage(one_set, [0, 1, 2])
    drop_from_memory(one_set)
    for key in keys:
        is_warm(one_set.store, key)
        assert is_block((await read_block(one_set.store, key))[0], key)
    assert one_set.disk().rotten == 3
    assert (await control(one_set.socket, "disks"))[0]["rotten"] == 3
    damage(one_set, [0, 1])
    await one_set.restart()
    for key in keys:
        assert is_block((await read_block(one_set.store, key))[0], key)
    assert one_set.disk().rotten == 0


async def test_a_check_in_the_background_counts_rot_and_retires(one_set, blobs):
    await filled(one_set, blobs, 12)
    damage(one_set, list(range(ROTTEN_MAX)))
    drop_from_memory(one_set)
    assert (await control(one_set.socket, "verify"))["wrong"] == ROTTEN_MAX
    disk = one_set.disk()
    await wait_true(lambda: disk.state is DiskState.OUT, what="retired")
    assert disk.fault.startswith(f"{ROTTEN_MAX} blocks changed")
    await control(one_set.socket, "retire", id=disk.id)
    await one_set.restart()
    assert one_set.disk().fault == "retired"


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
