"""Disks are added, drained, retired and fail while the node serves."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from pathlib import Path

import pytest
from cache_lab import (
    cache_node,
    disk_bytes,
    is_block,
    keys_of,
    look_up,
    put_object,
    read_all,
    read_block,
)
from tests.kit.waiting import wait_true

from headrace.kernel.metrics import REGISTRY
from headrace.media.cache import control
from headrace.media.cache.disk import DiskState
from headrace.media.errors import CommandUnknown, DiskRefused, DiskTooSmall, DiskUnknown
from headrace.media.model import DiskConfig


async def filled(node, blobs, blocks: int = 12) -> list:
    keys = keys_of(node.store, {"a.mp3": await put_object(blobs, "a.mp3", blocks)})
    await read_all(node.store, keys)
    return keys


async def test_disks_are_listed_with_what_is_on_them(two_disks, blobs):
    await filled(two_disks, blobs)
    rows = await control(two_disks.socket, "disks")
    assert [row["path"] for row in rows] == [str(disk.path) for disk in two_disks.disks]
    assert {row["state"] for row in rows} == {"in use"}
    assert sum(row["used"] for row in rows) == 12
    assert [(row["frames"], row["fault"], row["is_copied"]) for row in rows] == [
        (32, "", False)
    ] * 2
    stats = await control(two_disks.socket, "stats")
    assert stats == {"disks": 2, "workers": 1, "filling": 0}


async def test_a_disk_is_added_and_stays_after_a_restart(one_set, blobs, tmp_path):
    keys = await filled(one_set, blobs)
    added = await control(
        one_set.socket, "add", path=str(tmp_path / "more"), size_bytes=disk_bytes(4)
    )
    assert (added["frames"], added["state"]) == (64, "in use")
    await read_all(one_set.store, keys)
    assert (await control(one_set.socket, "disks"))[1]["used"] > 0
    await one_set.restart()
    assert {row["id"] for row in await control(one_set.socket, "disks")} >= {added["id"]}
    await read_all(one_set.store, keys)


async def test_a_drained_disk_serves_and_takes_nothing(two_disks, blobs):
    keys = await filled(two_disks, blobs)
    drained = two_disks.disk(0)
    row = await control(two_disks.socket, "drain", id=drained.id)
    assert (row["state"], row["fault"]) == ("draining", "drained")
    used = drained.table.used()
    assert (await read_all(two_disks.store, keys))["hit"] == 12
    more = keys_of(two_disks.store, {"b.mp3": await put_object(blobs, "b.mp3", 12)})
    await read_all(two_disks.store, more)
    assert drained.table.used() == used
    await two_disks.restart()
    assert two_disks.disk(0).state is DiskState.DRAINING
    await control(two_disks.socket, "undrain", id=str(two_disks.disks[0].path))
    await read_all(two_disks.store, keys + more)
    assert two_disks.disk(0).state is DiskState.IN_USE


async def test_a_retired_disk_can_be_pulled_and_come_back(two_disks, blobs):
    keys = await filled(two_disks, blobs)
    retired = two_disks.disk(0)
    row = await control(two_disks.socket, "retire", id=retired.id)
    assert (row["state"], row["fault"]) == ("out", "retired")
    await read_all(two_disks.store, keys)
    two_disks.disks[0].path.rename(two_disks.folder / "pulled")
    await read_all(two_disks.store, keys)
    await two_disks.restart()
    rows = await control(two_disks.socket, "disks")
    assert len(rows) == 2
    await control(
        two_disks.socket, "add", path=str(two_disks.folder / "pulled"), size_bytes=disk_bytes(2)
    )
    states = {row["id"]: row["state"] for row in await control(two_disks.socket, "disks")}
    assert states[retired.id] == "in use"
    await read_all(two_disks.store, keys)


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
async def test_wrong_commands_are_told_what_is_right(one_set, command, arguments, error):
    with pytest.raises(error):
        await control(one_set.socket, command, **arguments)
    assert len(await control(one_set.socket, "disks")) == 1


async def test_what_is_no_disk_is_not_added(one_set, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "blocks").write_bytes(b"somebody's work")
    for path, size_bytes, error in (
        (tmp_path / "small", 1000, (DiskRefused, DiskTooSmall)),
        (tmp_path / "full", disk_bytes(1), DiskRefused),
        (one_set.disks[0].path, disk_bytes(1), DiskRefused),
        (tmp_path / "not" / "there", disk_bytes(1), DiskRefused),
    ):
        with pytest.raises(error):
            await control(one_set.socket, "add", path=str(path), size_bytes=size_bytes)
    assert (tmp_path / "full" / "blocks").read_bytes() == b"somebody's work"


def disks_out() -> float:
    return REGISTRY.get_sample_value("media_disks", {"state": "out"})


async def test_what_was_refused_when_added_is_not_listed(one_set):
    with pytest.raises(DiskRefused, match="neither a folder nor a block device"):
        await control(one_set.socket, "add", path="/etc/passwd", size_bytes=disk_bytes(1))
    assert [row["state"] for row in await control(one_set.socket, "disks")] == ["in use"]


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


async def test_a_failed_disk_that_came_back_is_listed_once(two_disks):
    failed = two_disks.disk(0)
    two_disks.filler._disks.fail(failed, OSError(errno.EIO, "gone"))
    assert disks_out() == 1
    await wait_true(lambda: not two_disks.filler._disks._tasks, what="closed")
    again = {"path": str(failed.config.path), "size_bytes": disk_bytes(1)}
    await control(two_disks.socket, "add", **again)
    rows = await control(two_disks.socket, "disks")
    assert sorted((row["id"], row["state"]) for row in rows) == sorted(
        (disk.id, "in use") for disk in (failed, two_disks.disk(1))
    )
    assert disks_out() == 0


async def test_a_failed_disk_is_no_alert_once_it_is_retired(two_disks):
    failed = two_disks.disk(0)
    two_disks.filler._disks.fail(failed, OSError(errno.EIO, "gone"))
    row = await control(two_disks.socket, "retire", id=failed.id)
    assert (row["state"], row["fault"], disks_out()) == ("out", "retired", 0)


async def test_a_node_starts_with_the_disks_that_are_well(tmp_path, blobs):
    (tmp_path / "disk-0").write_bytes(b"no folder")
    async with cache_node(tmp_path, blobs, disks=2) as node:
        bad, good = sorted(await control(node.socket, "disks"), key=lambda row: row["id"])
        assert (bad["id"], bad["state"]) == ("", "out")
        assert bad["path"] in bad["fault"]
        assert good["state"] == "in use"
        await filled(node, blobs)


async def test_a_disk_known_by_its_id_may_be_anywhere(two_disks, blobs):
    """The folders are moved and renamed; every block is found again."""
    keys = await filled(two_disks, blobs)
    await two_disks.stop()
    one, other = (disk.path for disk in two_disks.disks)
    one.rename(two_disks.folder / "x")
    other.rename(one)
    (two_disks.folder / "x").rename(other)
    two_disks.boot = "boot-2"
    await two_disks.start()
    await blobs.delete("a.mp3")
    for key in keys:
        assert is_block((await read_block(two_disks.store, key))[0], key)


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


async def test_a_full_disk_serves_on_and_the_rest_passes_through(one_set, blobs):
    [key, *others] = await filled(one_set, blobs, 1) + keys_of(
        one_set.store, {"b.mp3": await put_object(blobs, "b.mp3", 3)}
    )
    one_set.filler._disks.fail(one_set.disk(), OSError(errno.ENOSPC, "No space left on device"))
    assert one_set.disk().state is DiskState.DRAINING
    assert is_block(look_up(one_set.store, key), key)
    assert await read_all(one_set.store, others) == {"hit": 0, "stored": 0, "passed": 3}
    [row] = await control(one_set.socket, "disks")
    assert "No space left" in row["fault"]


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


async def test_a_fault_that_a_worker_met_takes_the_disk_out(one_set, blobs):
    keys = await filled(one_set, blobs, 4)
    other = one_set.open_cache(1)
    one_set.store.report_fault(0, OSError(errno.EIO, "Input/output error"))
    assert look_up(one_set.store, keys[0]) is None
    await wait_true(lambda: one_set.disk().state is DiskState.OUT, what="the disk is out")
    assert look_up(other, keys[0]) is None
    for key in keys:
        assert is_block(await one_set.store.block(key), key)


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
    """Its thread is busy. A miss returns the bytes, and the block is stored later."""
    key = one_set.store.key("a.mp3", await put_object(blobs, "a.mp3", 1), 0)
    loop = asyncio.get_running_loop()
    gate = loop.create_future()
    busy = asyncio.create_task(
        one_set.disk().call(lambda: asyncio.run_coroutine_threadsafe(_wait(gate), loop).result())
    )
    assert is_block(await one_set.store.block(key), key)
    assert one_set.disk().writes_waiting >= 2
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
