"""Misses: one read of the origin for all callers, and never bytes of another version."""

from __future__ import annotations

import asyncio
import time

import pytest
from cache_lab import (
    HASH_KEY,
    cache_node,
    is_block,
    keys_of,
    look_up,
    put_object,
    read_all,
    read_block,
)

from headrace.kernel.metrics import REGISTRY
from headrace.media.cache import Filler, Frame, control
from headrace.media.cache.epochs import STUCK_S
from headrace.media.errors import (
    FillerAway,
    FillerRunning,
    ObjectUnknown,
    SourceCut,
    StoreUnavailable,
)
from headrace.media.model import BLOCK_BYTES, Shape


def fills(outcome: str) -> float:
    return REGISTRY.get_sample_value("media_fills_total", {"outcome": outcome}) or 0.0


async def test_a_miss_is_stored_and_then_found(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 3.5)
    assert await one_set.store.shape("a.mp3") == shape
    assert one_set.store.known_shape("a.mp3") == shape
    keys = keys_of(one_set.store, {"a.mp3": shape})
    assert len(keys) == 4
    assert await read_all(one_set.store, keys) == {"hit": 0, "stored": 4, "passed": 0}
    assert await read_all(one_set.store, keys) == {"hit": 4, "stored": 0, "passed": 0}


async def test_blocks_of_an_object_are_spread_over_the_disks(two_disks, blobs):
    shape = await put_object(blobs, "a.mp3", 24)
    keys = keys_of(two_disks.store, {"a.mp3": shape})
    await read_all(two_disks.store, keys)
    assert {type(await two_disks.store.block(key)) for key in keys} <= {Frame, bytes}
    used = [disk.table.used() for disk in two_disks.filler._disks.opened]
    assert min(used) >= 4


async def test_the_middle_is_read_without_the_beginning(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 8)
    before = fills("stored")
    key = one_set.store.key("a.mp3", shape, 5)
    assert is_block((await read_block(one_set.store, key))[0], key)
    assert fills("stored") == before + 1


async def test_a_herd_makes_one_read(one_set, blobs):
    shape = await put_object(blobs, "hot.mp3", 1)
    one_set.open_cache(1)
    before = fills("stored")
    keys = [store.key("hot.mp3", shape, 0) for store in one_set.stores]
    asked = [store.block(key) for store, key in zip(one_set.stores, keys, strict=True)] * 1
    asked += [one_set.store.block(keys[0]) for _ in range(500)]
    assert all(isinstance(ready, Frame) for ready in await asyncio.gather(*asked))
    assert fills("stored") == before + 1


async def test_all_workers_find_what_one_asked_for(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 1)
    other = one_set.open_cache(1)
    await one_set.store.block(one_set.store.key("a.mp3", shape, 0))
    key = other.key("a.mp3", shape, 0)
    assert is_block(look_up(other, key), key)


async def test_more_than_fits_pushes_others_out_and_stays_right(one_set, blobs):
    shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 4) for n in range(8)}
    keys = keys_of(one_set.store, shapes)
    for _ in range(3):
        counts = await read_all(one_set.store, keys)
    assert counts["stored"] > 0
    assert one_set.disk().table.used() == 16


async def test_what_is_asked_for_often_stays(one_set, blobs):
    shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 1) for n in range(40)}
    keys = keys_of(one_set.store, shapes)
    wanted, others = keys[:4], keys[4:]
    await read_all(one_set.store, wanted * 2)
    for key in others:
        await read_all(one_set.store, [key])
        await read_all(one_set.store, wanted)
    assert (await read_all(one_set.store, wanted))["hit"] == 4


async def test_an_object_that_is_not_there_is_told_so(one_set, blobs):
    with pytest.raises(ObjectUnknown):
        await one_set.store.shape("none.mp3")
    gone = await put_object(blobs, "gone.mp3", 1)
    await blobs.delete("gone.mp3")
    with pytest.raises(ObjectUnknown):
        await one_set.store.block(one_set.store.key("gone.mp3", gone, 0))
    assert one_set.disk().table.used() == 0


async def test_versions_never_mix(one_set, blobs):
    old = await put_object(blobs, "a.mp3", 2)
    old_key = one_set.store.key("a.mp3", old, 0)
    await one_set.store.block(old_key)
    await blobs.put("a.mp3", b"n" * old.size_bytes)
    with pytest.raises(SourceCut, match="replaced"):
        await one_set.store.block(one_set.store.key("a.mp3", old, 1))
    new = await one_set.store.shape_now("a.mp3")
    assert new.etag != old.etag
    data, _ = await read_block(one_set.store, one_set.store.key("a.mp3", new, 0))
    assert data == b"n" * BLOCK_BYTES
    assert is_block(look_up(one_set.store, old_key), old_key)


async def test_a_shorter_object_is_another_version(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 2)
    lied = Shape(3 * BLOCK_BYTES, shape.etag, shape.modified_s, is_immutable=False)
    for number in (0, 2, 3):
        with pytest.raises((SourceCut, StoreUnavailable)):
            await one_set.store.block(one_set.store.key("a.mp3", lied, number))
    assert one_set.disk().table.used() == 0


async def test_a_purge_asks_the_origin_anew(one_set, blobs):
    generations = {"a.mp3": 0}
    store = one_set.open_cache(1, generation=lambda name: generations[name])
    old = await put_object(blobs, "a.mp3", 1)
    key = store.key("a.mp3", await store.shape("a.mp3"), 0)
    await store.block(key)
    await blobs.put("a.mp3", b"n" * BLOCK_BYTES)
    assert (await store.shape("a.mp3")) == old
    generations["a.mp3"] = 1
    assert store.known_shape("a.mp3") is None
    new = await store.shape("a.mp3")
    assert new.etag != old.etag
    assert store.key("a.mp3", new, 0).digest != key.digest
    assert (await read_block(store, store.key("a.mp3", new, 0)))[0] == b"n" * BLOCK_BYTES


async def test_a_purge_hides_blocks_also_where_the_origin_did_not_change(one_set, blobs):
    generations = {"a.mp3": 0}
    store = one_set.open_cache(1, generation=lambda name: generations[name])
    shape = await put_object(blobs, "a.mp3", 1)
    await store.block(store.key("a.mp3", shape, 0))
    generations["a.mp3"] = 1
    assert look_up(store, store.key("a.mp3", shape, 0)) is None


async def test_an_origin_that_is_away_empties_nothing(one_set, blobs):
    shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 4) for n in range(4)}
    keys = keys_of(one_set.store, shapes)
    await read_all(one_set.store, keys)
    used = one_set.disk().table.used()
    missing = Shape(BLOCK_BYTES, "e", 0, is_immutable=False)
    blobs.folder.rename(blobs.folder.with_name("away"))
    for number in range(30):
        with pytest.raises(StoreUnavailable):
            await one_set.store.block(one_set.store.key(f"missing-{number}.mp3", missing, 0))
    assert one_set.disk().table.used() == used
    assert (await read_all(one_set.store, [k for k in keys if look_up(one_set.store, k)]))["hit"]
    blobs.folder.with_name("away").rename(blobs.folder)


@pytest.mark.slow
async def test_a_stuck_worker_makes_others_pass_through(one_set, blobs):
    shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 1) for n in range(7)}
    keys = keys_of(one_set.store, shapes)
    stuck = one_set.open_cache(1)
    await read_block(one_set.store, keys[0])
    stuck.enter_epoch()
    assert is_block(await one_set.store.block(keys[1]), keys[1])
    took_s = []
    for key in keys[2:]:
        began_s = time.monotonic()
        assert is_block(await one_set.store.block(key), key)
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < STUCK_S
    assert is_block(look_up(one_set.store, keys[0]), keys[0])
    stuck.leave_epoch()
    assert isinstance(await one_set.store.block(keys[1]), Frame)


@pytest.mark.slow
async def test_a_frame_is_not_written_while_a_turn_may_send_it(one_set, blobs):
    """The set is full; a worker holds a frame in an epoch while all others are requested."""
    shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 1) for n in range(17)}
    *held, new = keys_of(one_set.store, shapes)
    await read_all(one_set.store, held)
    reader = one_set.open_cache(1)
    one_set.disk().table.visited[:] = bytes(16)
    reader.enter_epoch()
    frames = {key: reader._find(key) for key in held}
    asked = asyncio.create_task(one_set.store.block(new))
    await asyncio.wait([asked], timeout=STUCK_S / 2)
    assert not asked.done()
    for key, (disk, hit) in frames.items():
        assert is_block(disk.read(hit.frame, disk.table.entry(hit.frame))[0], key)
    reader.leave_epoch()
    assert isinstance(await asked, Frame)
    assert is_block(look_up(one_set.store, new), new)


async def test_a_block_can_be_had_as_bytes(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 1.5)
    for number in (0, 1):
        key = one_set.store.key("a.mp3", shape, number)
        assert is_block(await one_set.store.block(key, is_copy=True), key)
        assert is_block(await one_set.store.block(key, is_copy=True), key)
        assert is_block(look_up(one_set.store, key), key)


async def test_a_node_without_disks_passes_through(tmp_path, blobs):
    async with cache_node(tmp_path, blobs, disks=0) as node:
        shape = await put_object(blobs, "a.mp3", 2)
        keys = keys_of(node.store, {"a.mp3": shape})
        assert await read_all(node.store, keys) == {"hit": 0, "stored": 0, "passed": 2}


@pytest.mark.slow
async def test_questions_outlive_a_filler(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 2)
    keys = keys_of(one_set.store, {"a.mp3": shape})
    await one_set.store.block(keys[0])
    await one_set.stop_filler()
    assert is_block(look_up(one_set.store, keys[0]), keys[0])
    asked = asyncio.create_task(one_set.store.block(keys[1]))
    await asyncio.wait([asked], timeout=0.05)
    await one_set.start()
    assert isinstance(await asked, Frame)
    assert is_block(look_up(one_set.store, keys[0]), keys[0])


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


async def test_a_worker_that_speaks_nonsense_ends_its_own_connection_alone(one_set, blobs):
    shape = await put_object(blobs, "a.mp3", 1)
    for nonsense in (b"\xff\xff\xff\xff", b"\x04\0\0\0nope", b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await asyncio.open_unix_connection(str(one_set.socket))
        writer.write(nonsense)
        if nonsense.startswith(b"GET"):
            writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    assert isinstance(await one_set.store.block(one_set.store.key("a.mp3", shape, 0)), Frame)
