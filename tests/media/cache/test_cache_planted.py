"""Each rule of the cache broken on purpose: its check must detect it."""

from __future__ import annotations

import asyncio
import os

import pytest
from cache_lab import (
    CacheNode,
    expected_block,
    keys_of,
    put_object,
    read_all,
    read_block,
)
from filler_process import plant

from headrace.media.cache.disk import Disk
from headrace.media.cache.disk_files import _receive, _send_unread
from headrace.media.cache.epochs import FillerEpochs
from headrace.media.cache.fills import Fills


@pytest.fixture
def planted(monkeypatch):
    """Plant a bug for this test only."""

    def do(bug: str) -> None:
        for owner, name in (
            (FillerEpochs, "wait_for_workers"),
            (Disk, "write_block"),
            (Fills, "_put"),
        ):
            monkeypatch.setattr(owner, name, getattr(owner, name))
        plant(bug)

    return do


async def full_set(node: CacheNode, blobs) -> tuple[list, list]:
    """The keys of a full set, and as many that are not stored."""
    shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 4) for n in range(8)}
    keys = keys_of(node.store, shapes)
    held, others = keys[:16], keys[16:]
    await read_all(node.store, held)
    node.disk().table.visited[:] = bytes(16)
    return held, others


async def frames_change_within_a_turn(node: CacheNode, blobs) -> bool:
    """Whether a worker in an epoch sees a frame change while others are filled."""
    held, others = await full_set(node, blobs)
    reader = node.open_cache(1)
    reader.enter_epoch()
    frames = [(key, reader.find(key)) for key in held]
    node.disk().table.visited[:] = bytes(16)
    await asyncio.gather(*(node.store.block(key) for key in others))
    seen = [os.pread(f.fd, f.length, f.offset) == expected_block(key) for key, f in frames]
    reader.leave_epoch()
    return not all(seen)


async def test_planted_without_the_wait_frames_change_within_a_turn(one_set, blobs, planted):
    planted("no wait")
    assert await frames_change_within_a_turn(one_set, blobs)


async def stalled_clients_see_other_bytes(node: CacheNode, blobs) -> bool:
    """Whether clients with unread data get other bytes after an eviction."""
    held, others = await full_set(node, blobs)
    node.store.enter_epoch()
    sent = [
        (key, *_send_unread(frame.fd, frame.offset))
        for key, frame in ((key, node.store.find(key)) for key in held)
    ]
    node.store.leave_epoch()
    node.disk().table.visited[:] = bytes(16)
    for key in others:
        await read_block(node.store, key)
    right = [_receive(client, count) == expected_block(key)[:count] for key, client, count in sent]
    for _, client, _ in sent:
        client.close()
    return not all(right)


async def test_stalled_clients_get_what_they_were_sent(one_set, blobs):
    assert not await stalled_clients_see_other_bytes(one_set, blobs)


async def test_planted_without_the_punch_stalled_clients_get_other_bytes(one_set, blobs, planted):
    planted("no punch")
    assert await stalled_clients_see_other_bytes(one_set, blobs)


async def is_written_while_it_can_be_found(node: CacheNode, blobs, monkeypatch) -> bool:
    """Whether a block is written into a frame that has a tag."""
    seen = []
    write = Disk.write_block

    def look_and_write(disk: Disk, frame: int, data: bytes) -> None:
        seen.append(disk.table.entry(frame).tag != 0)
        write(disk, frame, data)

    monkeypatch.setattr(Disk, "write_block", look_and_write)
    held, others = await full_set(node, blobs)
    await read_all(node.store, others)
    assert len(seen) >= len(held) + len(others)
    return any(seen)


async def test_nothing_is_written_where_it_can_be_found(one_set, blobs, monkeypatch):
    assert not await is_written_while_it_can_be_found(one_set, blobs, monkeypatch)


async def test_planted_with_the_tag_first_it_can_be_found(one_set, blobs, planted, monkeypatch):
    planted("tag first")
    assert await is_written_while_it_can_be_found(one_set, blobs, monkeypatch)


async def test_planted_resumed_by_frame_a_body_goes_on_with_another_block(one_set, blobs):
    """The reverse of rule 3: the frame of the last epoch has another block in the next one."""
    held, others = await full_set(one_set, blobs)
    store = one_set.store
    store.enter_epoch()
    frames = [(key, store.find(key)) for key in held]
    store.leave_epoch()
    one_set.disk().table.visited[:] = bytes(16)
    for key in others:
        await read_block(store, key)
    by_frame = [os.pread(f.fd, f.length, f.offset) == expected_block(key) for key, f in frames]
    assert not all(by_frame)
    store.enter_epoch()
    by_key = [(key, store.find(key)) for key in held]
    right = [
        frame is None or os.pread(frame.fd, frame.length, frame.offset) == expected_block(key)
        for key, frame in by_key
    ]
    store.leave_epoch()
    assert all(right)
