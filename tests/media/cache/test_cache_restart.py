"""A cache through stops, kills and restarts: no wrong byte, and a kill causes misses only."""

from __future__ import annotations

import asyncio
import shutil
import signal

import pytest
from cache_lab import (
    CacheNode,
    cache_node,
    is_block,
    keys_of,
    look_up,
    put_object,
    read_all,
    read_block,
    wait_indexed,
)
from filler_child import CRASH_POINTS, FillerChild

from headrace.kernel.metrics import REGISTRY
from headrace.media.cache import Frame
from headrace.media.cache.linux import open_shared, remove_shared, shared_folders
from headrace.media.errors import FillerAway, SharedMemoryLost
from headrace.media.model import DiskConfig


def sums() -> float:
    """The number of correct checksums by any reader; the scrub may be first."""
    labels = [{"by": by, "result": "right"} for by in ("worker", "scrub")]
    return sum(REGISTRY.get_sample_value("media_block_sums_total", found) or 0 for found in labels)


async def filled(node: CacheNode, blobs, blocks: int = 6) -> list:
    shape = await put_object(blobs, "a.mp3", blocks)
    keys = keys_of(node.store, {"a.mp3": shape})
    await read_all(node.store, keys)
    return keys


async def test_a_clean_stop_keeps_every_block(two_disks, blobs):
    keys = await filled(two_disks, blobs, 20)
    await two_disks.restart()
    assert all(disk.files.was_clean for disk in two_disks.filler._disks.opened)
    before = sums()
    assert await read_all(two_disks.store, keys) == {"hit": 0, "stored": 20, "passed": 0}
    assert sums() >= before + 20, "each is compared with its sum once a start"
    assert await read_all(two_disks.store, keys) == {"hit": 20, "stored": 0, "passed": 0}
    assert sums() <= before + 21


async def test_no_origin_is_needed_for_what_is_stored(two_disks, blobs):
    keys = await filled(two_disks, blobs)
    await two_disks.restart()
    await blobs.delete("a.mp3")
    for key in keys:
        assert is_block((await read_block(two_disks.store, key))[0], key)


async def test_a_filler_of_the_same_boot_goes_on_with_what_was_proved(one_set, blobs):
    keys = await filled(one_set, blobs)
    await one_set.stop_filler()
    await one_set.start()
    assert await read_all(one_set.store, keys) == {"hit": 6, "stored": 0, "passed": 0}


async def test_a_worker_believes_the_manifest_of_its_own_boot_alone(one_set, blobs):
    [key] = await filled(one_set, blobs, 1)
    stranger = one_set.store.open(one_set.run, worker=9, boot="another")
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


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_a_filler_killed_within_a_fill_harms_nothing(tmp_path, blobs, one_set, point):
    """Killed at the tenth fill of a full set; workers and a new filler continue, then a restart."""
    node = one_set
    keys = await filled(node, blobs, 16)
    await node.stop_filler()
    more = keys_of(node.store, {"b.mp3": await put_object(blobs, "b.mp3", 24)})
    with FillerChild(node, crash_at=f"media.fill.{point}:10") as child:
        asked = [asyncio.create_task(read_block(node.store, key)) for key in more]
        await asyncio.to_thread(child.process.wait, 30)
        assert child.process.returncode == -signal.SIGKILL
    for key in keys + more:
        found = look_up(node.store, key)
        assert found is None or is_block(found, key)
    await node.start()
    for key, task in zip(more, asked, strict=True):
        assert is_block((await task)[0], key)
    await read_all(node.store, keys + more)
    await wait_indexed(node)
    await node.restart()
    await read_all(node.store, keys + more)


@pytest.mark.slow
async def test_a_whole_node_killed_costs_misses_only(tmp_path, blobs):
    node = CacheNode(tmp_path, blobs, [DiskConfig(tmp_path / f"d{n}", 20 * 2**20) for n in (0, 1)])
    with FillerChild(node):
        store = node.open_cache(0)
        keys = keys_of(store, {"a.mp3": await put_object(blobs, "a.mp3", 40)})
        await read_all(store, keys)
    await node.stop()
    node.boot = "boot-2"
    await node.start()
    assert not any(disk.files.was_clean for disk in node.filler._disks.opened)
    assert (await read_all(node.store, keys))["stored"] == len(keys)
    await node.stop()


async def test_who_waits_when_a_process_ends_is_told(one_set, blobs):
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
