"""Rules of the block cache beside its model: commands, files, processes, odd disks."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
from pathlib import Path

import pytest
from cache_lab import (
    HASH_KEY,
    cache_node,
    disk_bytes,
    is_block,
    keys_of,
    look_up,
    put_object,
    read_all,
    read_block,
    wait_indexed,
)
from filler_process import CRASH_POINTS, FillerChild
from tests.kit.waiting import wait_true

from headrace.kernel.metrics import REGISTRY
from headrace.media.cache import BlockCache, Filler, Frame, control
from headrace.media.cache.filler_ipc import DiskState
from headrace.media.cache.linux import open_shared, remove_shared, shared_folders
from headrace.media.errors import (
    CommandUnknown,
    DiskRefused,
    DiskUnknown,
    FillerAway,
    FillerRunning,
    InvalidDiskSize,
    SharedMemoryLost,
    SourceCut,
    StoreUnavailable,
)
from headrace.media.model import BLOCK_BYTES, DiskConfig, Shape


async def filled(node, blobs, blocks: int = 12) -> list:
    keys = keys_of(node.store, {"a.mp3": await put_object(blobs, "a.mp3", blocks)})
    await read_all(node.store, keys)
    return keys


def disks_out() -> float:
    return REGISTRY.get_sample_value("media_disks", {"state": "out"})


@pytest.mark.parametrize(
    ("command", "arguments", "error"),
    [
        ("format", {}, CommandUnknown),
        ("drain", {}, CommandUnknown),
        ("drain", {"id": "none", "more": 1}, CommandUnknown),
        ("drain", {"id": "none"}, DiskUnknown),
        ("retire", {"id": ""}, DiskUnknown),
    ],
)
async def test_wrong_commands_are_refused(one_set, command, arguments, error):
    with pytest.raises(error):
        await control(one_set.socket, command, **arguments)
    assert len(await control(one_set.socket, "disks")) == 1


async def test_invalid_disks_are_not_added(one_set, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "blocks").write_bytes(b"somebody's work")
    for path, size_bytes, error in (
        (tmp_path / "small", 1000, (DiskRefused, InvalidDiskSize)),
        (tmp_path / "full", disk_bytes(1), DiskRefused),
        (one_set.disks[0].path, disk_bytes(1), DiskRefused),
        (tmp_path / "not" / "there", disk_bytes(1), DiskRefused),
    ):
        with pytest.raises(error):
            await control(one_set.socket, "add", path=str(path), size_bytes=size_bytes)
    assert (tmp_path / "full" / "blocks").read_bytes() == b"somebody's work"


async def test_a_disk_refused_at_the_start_is_counted_until_it_is_retired(tmp_path, blobs):
    (tmp_path / "disk-0").write_bytes(b"no folder")
    async with cache_node(tmp_path, blobs, disks=2) as node:
        assert disks_out() == 1
        bad = str(tmp_path / "disk-0")
        row = await control(node.socket, "retire", id=bad)
        assert (row["path"], row["fault"]) == (bad, "retired")
        assert [one["state"] for one in await control(node.socket, "disks")] == ["in use"]
        assert disks_out() == 0
        with pytest.raises(DiskUnknown):
            await control(node.socket, "retire", id=bad)


async def test_a_copy_of_a_disk_is_refused(one_set, blobs, tmp_path):
    await filled(one_set, blobs)
    await one_set.stop()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("blocks", "index"):
        (copy / name).write_bytes((one_set.disks[0].path / name).read_bytes())
    one_set.disks.append(DiskConfig(copy, one_set.disks[0].size_bytes))
    await one_set.start()
    rows = await control(one_set.socket, "disks")
    assert [row["state"] for row in rows] == ["in use", "out"]
    assert "copy" in rows[1]["fault"]


async def test_a_disk_whose_writes_fail_is_out_and_bytes_pass_through(two_disks, blobs):
    """Its file is replaced by an unwritable one, like a device that disappeared."""
    keys = await filled(two_disks, blobs, 8)
    broken = two_disks.disk(0)
    os.dup2(os.open("/dev/full", os.O_RDONLY), broken.files.blocks)
    more: list = []
    # Of eight blocks the broken disk may own none: once in 256 objects.
    while not any(two_disks.filler._disks.owner(key) is broken for key in more):
        name = f"b-{secrets.token_hex(4)}.mp3"
        more = keys_of(two_disks.store, {name: await put_object(blobs, name, 8)})
    await read_all(two_disks.store, more)
    await wait_true(lambda: broken.state is DiskState.OUT, what="the disk is out")
    counts = await read_all(two_disks.store, keys + more)
    assert counts["passed"] == 0
    assert await read_all(two_disks.store, keys + more) == {"hit": 16, "stored": 0, "passed": 0}


async def test_a_disk_that_cannot_be_read_by_a_worker_passes_through(one_set, blobs):
    keys = await filled(one_set, blobs, 4)
    await one_set.restart()
    served = one_set.store._disks[0]
    os.dup2(os.open("/", os.O_RDONLY), served.reader)
    for key in keys:
        assert is_block(await one_set.store.block(key), key)
    await wait_true(lambda: one_set.disk().state is DiskState.OUT, what="the disk is out")


@pytest.mark.slow
async def test_a_slow_disk_holds_nobody_up(one_set, blobs):
    """Its thread is busy. A miss returns the bytes, read once, and the block is stored later."""
    key = one_set.store.key("a.mp3", await put_object(blobs, "a.mp3", 1), 0)
    loop = asyncio.get_running_loop()
    gate = loop.create_future()
    busy = asyncio.create_task(
        one_set.disk().call(lambda: asyncio.run_coroutine_threadsafe(_wait(gate), loop).result())
    )
    assert is_block(await one_set.store.block(key), key)
    assert one_set.disk().writes_waiting >= 2
    await blobs.delete("a.mp3")
    assert is_block(await one_set.store.block(key), key)
    gate.set_result(None)
    await busy
    await wait_true(lambda: is_block(look_up(one_set.store, key), key), what="it is stored")


async def _wait(gate) -> None:
    await gate


async def test_a_disk_that_hangs_is_taken_out(one_set, blobs):
    [key] = await filled(one_set, blobs, 1)
    disk = one_set.disk()
    disk.writes_waiting += 1
    disk._moved_s -= 60
    await wait_true(lambda: disk.state is DiskState.OUT, what="the disk is out")
    assert is_block(await one_set.store.block(key), key)
    disk.writes_waiting -= 1


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.slow
async def test_a_worker_keeps_no_descriptor_of_a_disk_that_left(two_disks, blobs):
    await filled(two_disks, blobs)
    before = descriptors()
    for _ in range(5):
        row = await control(two_disks.socket, "retire", id=str(two_disks.disks[0].path))
        two_disks.store.enter_epoch()
        two_disks.store.leave_epoch()
        await control(two_disks.socket, "add", path=row["path"], size_bytes=row["size_bytes"])
        two_disks.store.enter_epoch()
        two_disks.store.leave_epoch()
    await wait_true(lambda: descriptors() <= before + 2, what="descriptors given back")


@pytest.mark.slow
async def test_frames_of_many_sizes_of_disks_share_the_blocks(tmp_path, blobs):
    async with cache_node(tmp_path, blobs, disks=2) as node:
        await control(node.socket, "add", path=str(tmp_path / "large"), size_bytes=disk_bytes(8))
        keys = keys_of(node.store, {"a.mp3": await put_object(blobs, "a.mp3", 60)})
        await read_all(node.store, keys)
        used = [row["used"] for row in await control(node.socket, "disks")]
        assert used[2] > used[0] + used[1]


async def test_a_shorter_object_is_another_version(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 2)
    lied = Shape(3 * BLOCK_BYTES, shape.etag, shape.modified_s, is_immutable=False)
    for number in (0, 2, 3):
        with pytest.raises((SourceCut, StoreUnavailable)):
            await one_set.store.block(one_set.store.key("a.mp3", lied, number))
    assert one_set.disk().table.used() == 0


async def test_a_node_without_disks_passes_through(tmp_path, blobs):
    async with cache_node(tmp_path, blobs, disks=0) as node:
        shape = await put_object(blobs, "a.mp3", 2)
        keys = keys_of(node.store, {"a.mp3": shape})
        assert await read_all(node.store, keys) == {"hit": 0, "stored": 0, "passed": 2}


async def test_a_filler_that_stays_away_is_503(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 1)
    await one_set.stop_filler()
    store = one_set.open_cache(1, timeout_s=-0.9)
    with pytest.raises(FillerAway) as caught:
        await store.block(store.key("a.mp3", shape, 0))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    with pytest.raises(FillerAway, match="media serve"):
        await control(one_set.socket, "disks")


async def test_one_node_has_one_filler(one_set, blobs):
    with pytest.raises(FillerRunning):
        Filler(blobs, [], run=one_set.run, boot="other", hash_key=HASH_KEY)


async def test_the_socket_and_the_manifest_are_for_this_user_alone(one_set):
    for name in ("filler.sock", "manifest.json"):
        assert oct((one_set.run / name).stat().st_mode)[-3:] == "600"


async def test_an_invalid_message_ends_its_own_connection_alone(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 1)
    for nonsense in (b"\xff\xff\xff\xff", b"\x04\0\0\0nope", b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await asyncio.open_unix_connection(str(one_set.socket))
        writer.write(nonsense)
        if nonsense.startswith(b"GET"):
            writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    assert isinstance(await one_set.store.block(one_set.store.key("a.mp3", shape, 0)), Frame)


async def test_a_worker_reads_the_manifest_of_its_own_boot_alone(one_set, blobs):
    [key] = await filled(one_set, blobs, 1)
    stranger = BlockCache(one_set.run, worker=9, boot="another")
    assert look_up(stranger, key) is None
    await stranger.close()


async def test_a_worker_that_outlived_its_node_finds_nothing_any_more(one_set, blobs):
    [key] = await filled(one_set, blobs, 1)
    survivor = one_set.stores.pop()
    await one_set.stop_filler()
    assert is_block(look_up(survivor, key), key)
    one_set.boot = "boot-2"
    await one_set.start()
    assert look_up(survivor, key) is None
    assert is_block((await read_block(one_set.store, key))[0], key)
    await survivor.close()


async def test_shared_memory_that_vanished_stops_the_filler(one_set, blobs):
    """Workers still send from memory that others cannot see: nothing may be overwritten."""
    await filled(one_set, blobs, 1)
    await one_set.stop_filler()
    folder = shared_folders(one_set.run)[0]
    (folder / "board").rename(folder / "board.away")
    with pytest.raises(SharedMemoryLost):
        await one_set.start()
    (folder / "board.away").rename(folder / "board")
    await one_set.start()


async def test_the_shared_memory_goes_with_the_node(tmp_path, blobs):
    async with cache_node(tmp_path, blobs) as node:
        folder = shared_folders(node.run)[0]
        assert (folder / "board").exists()
    assert folder == node.run or not folder.exists()


async def test_the_memory_of_a_killed_node_whose_folder_was_deleted_is_removed(tmp_path, blobs):
    runs = [tmp_path / "deleted" / "run", tmp_path / "stopped" / "run"]
    for run in runs:
        run.mkdir(parents=True)
        open_shared(run, "board", 4096)[1].close()
    deleted, stopped = (shared_folders(run)[0] for run in runs)
    shutil.rmtree(runs[0].parent)
    async with cache_node(tmp_path, blobs):
        assert not deleted.exists()
        assert stopped.exists()
    remove_shared(runs[1])


async def test_a_request_of_a_process_that_ends_is_failed(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 1)
    await one_set.stop_filler()
    store = one_set.open_cache(1)
    asked = asyncio.create_task(store.block(store.key("a.mp3", shape, 0)))
    await asyncio.wait([asked], timeout=0.02)
    await one_set.stores.pop().close()
    with pytest.raises((FillerAway, asyncio.CancelledError)):
        await asked
    await one_set.start()
    assert isinstance(await one_set.store.block(one_set.store.key("a.mp3", shape, 0)), Frame)


@pytest.mark.slow
async def test_a_filler_killed_at_each_step_of_a_fill_harms_nothing(blobs, one_set):
    """Killed at the third fill of a full set; workers and a new filler continue, then a restart."""
    node = one_set
    keys = await filled(node, blobs, 16)
    await node.stop_filler()
    for number, point in enumerate(CRASH_POINTS):
        shape = await put_object(blobs, f"{point}.mp3", 5)
        more = keys_of(node.store, {f"{point}.mp3": shape})
        with FillerChild(node, crash_at=f"media.fill.{point}:3") as child:
            asked = [asyncio.create_task(read_block(node.store, key)) for key in more]
            await asyncio.to_thread(child.process.wait, 30)
            assert child.process.returncode == -signal.SIGKILL, point
        for key in keys + more:
            found = look_up(node.store, key)
            assert found is None or is_block(found, key), point
        await node.start()
        for key, task in zip(more, asked, strict=True):
            assert is_block((await task)[0], key), point
        keys = [*keys[-11:], *more]
        await read_all(node.store, keys)
        if number % 3 == 0:
            await wait_indexed(node)
            await node.restart(boot=f"boot-{point}")
            await read_all(node.store, keys)
        await node.stop_filler()
    await node.start()
