"""Disks damaged while the node was down: every block served afterwards is correct.

Each case fills two disks, damages their files, restarts and reads every key, first those that are
served without the origin. The planted bug at the end proves that the cases detect a wrong byte.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_lab import CacheNode, cache_node, is_block, keys_of, look_up, put_object, read_all

from headrace.media.cache import Frame
from headrace.media.cache.frame_table import FrameTable
from headrace.media.cache.layout import DATA_AT, HEAD_BYTES, SET_BYTES
from headrace.media.model import BLOCK_BYTES

SECTOR = 512


async def filled_and_stopped(tmp_path, blobs) -> tuple[CacheNode, list]:
    async with cache_node(tmp_path, blobs, disks=2, sets=2) as node:
        shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 5) for n in range(6)}
        keys = keys_of(node.store, shapes)
        await read_all(node.store, keys)
    return node, keys


async def served(node: CacheNode, keys: list) -> int:
    """The number of blocks served from the disks, all of them correct."""
    count = 0
    for key in keys:
        ready = await node.store._prove(key, is_copy=False)
        if isinstance(ready, Frame):
            assert is_block(look_up(node.store, key), key), f"wrong bytes of {key.object}"
            count += 1
    return count


async def started_anew(node: CacheNode, keys: list) -> int:
    """Start on the damaged disks and return the number of blocks served. All must be readable."""
    node.boot = f"boot-{random.random()}"
    await node.start()
    try:
        count = await served(node, keys)
        await read_all(node.store, keys)
    finally:
        await node.stop()
    return count


def disk_folders(node: CacheNode) -> list[Path]:
    return [disk.path for disk in node.disks]


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))


def flip_bits(data: bytearray, count: int, *, start: int = 0) -> None:
    for _ in range(count):
        data[random.randrange(start, len(data))] ^= 1 << random.randrange(8)


def swap(one: Path, other: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def cut_index(node: CacheNode) -> None:
    index = disk_folders(node)[0] / "index"
    os.truncate(index, random.randrange(index.stat().st_size))


def flip_index(node: CacheNode) -> None:
    for folder in disk_folders(node):
        edit(folder / "index", lambda data: flip_bits(data, 64, start=HEAD_BYTES))


def flip_heads(node: CacheNode) -> None:
    for folder in disk_folders(node):
        edit(folder / "index", lambda data: flip_bits(data[:64], 3) or flip_bits(data, 1))


def scribble_on_index(node: CacheNode) -> None:
    def scribble(data: bytearray) -> None:
        start = random.randrange(HEAD_BYTES, len(data) - 600)
        data[start : start + 600] = random.randbytes(600)

    edit(disk_folders(node)[0] / "index", scribble)


def mix_sets(node: CacheNode) -> None:
    def mix(data: bytearray) -> None:
        first, second = HEAD_BYTES, HEAD_BYTES + SET_BYTES
        data[first:second], data[second : second + SET_BYTES] = (
            data[second : second + SET_BYTES],
            data[first:second],
        )

    edit(disk_folders(node)[0] / "index", mix)


def lose_index(node: CacheNode) -> None:
    (disk_folders(node)[0] / "index").unlink()


def swap_blocks(node: CacheNode) -> None:
    one, other = disk_folders(node)
    swap(one / "blocks", other / "blocks")


def swap_indexes(node: CacheNode) -> None:
    one, other = disk_folders(node)
    swap(one / "index", other / "index")


def swap_folders(node: CacheNode) -> None:
    swap(*disk_folders(node))


def foreign_index_with_a_right_head(node: CacheNode) -> None:
    one, other = disk_folders(node)
    sets = (other / "index").read_bytes()[HEAD_BYTES:]
    edit(one / "index", lambda data: data.__setitem__(slice(HEAD_BYTES, None), sets))


def lose_a_disk(node: CacheNode) -> None:
    shutil.rmtree(disk_folders(node)[0])


def tear_a_superblock(node: CacheNode) -> None:
    edit(disk_folders(node)[0] / "blocks", lambda data: data.__setitem__(slice(20, 40), bytes(20)))


def flip_data(node: CacheNode) -> None:
    for folder in disk_folders(node):
        edit(folder / "blocks", lambda data: flip_bits(data, 10, start=DATA_AT))


def move_blocks_by_one(node: CacheNode) -> None:
    def move(data: bytearray) -> None:
        data[DATA_AT + BLOCK_BYTES :] = data[DATA_AT:-BLOCK_BYTES]

    edit(disk_folders(node)[0] / "blocks", move)


DAMAGES = {
    cut_index: (0, 30),
    flip_index: (1, 30),
    flip_heads: (0, 30),
    scribble_on_index: (1, 30),
    mix_sets: (1, 29),
    lose_index: (1, 30),
    swap_blocks: (0, 0),
    swap_indexes: (0, 0),
    swap_folders: (30, 30),
    foreign_index_with_a_right_head: (1, 30),
    lose_a_disk: (1, 30),
    tear_a_superblock: (0, 30),
    flip_data: (1, 30),
    move_blocks_by_one: (1, 29),
}
"""Damage -> the least and the most of 30 blocks that may still be served."""


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_damage_costs_misses_only(tmp_path, blobs, damage):
    node, keys = await filled_and_stopped(tmp_path, blobs)
    damage(node)
    least, most = DAMAGES[damage]
    assert least <= await started_anew(node, keys) <= most


async def age(tmp_path, blobs) -> tuple[CacheNode, list, dict[Path, bytes]]:
    """A node whose frames were filled twice, and its files from half-time."""
    node, keys = await filled_and_stopped(tmp_path, blobs)
    files = [folder / name for folder in disk_folders(node) for name in ("blocks", "index")]
    before = {path: path.read_bytes() for path in files}
    await node.start(workers=1)
    shapes = {f"new-{n}.mp3": await put_object(blobs, f"new-{n}.mp3", 8) for n in range(10)}
    newer = keys_of(node.store, shapes)
    await read_all(node.store, newer)
    await node.stop()
    return node, keys + newer, before


def lose_power(node: CacheNode, before: dict[Path, bytes], seed: int) -> None:
    """Each index sector and each data page is randomly the old or the new one."""
    chosen = random.Random(seed)
    for path, old in before.items():
        step = SECTOR if path.name == "index" else 4096
        with path.open("r+b") as file:
            start = HEAD_BYTES if path.name == "index" else DATA_AT
            for at in range(start, len(old), step):
                if chosen.random() < 0.5:
                    file.seek(at)
                    file.write(old[at : at + step])


@pytest.mark.slow
@pytest.mark.parametrize("older", ["index", "blocks", "pages"])
async def test_what_is_half_old_is_never_served_wrong(tmp_path, blobs, older):
    node, keys, before = await age(tmp_path, blobs)
    if older == "pages":
        lose_power(node, before, seed=1)
    else:
        for path, data in before.items():
            if path.name == older:
                path.write_bytes(data)
    assert await started_anew(node, keys) < len(keys)


@pytest.mark.soak
async def test_power_loss_again_and_again(tmp_path, blobs):
    node, keys, before = await age(tmp_path, blobs)
    newest = {path: path.read_bytes() for path in before}
    for seed in range(60):
        for path, data in newest.items():
            path.write_bytes(data)
        lose_power(node, before, seed)
        await started_anew(node, keys)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
async def test_every_damage_with_other_dice(tmp_path, blobs, seed):
    random.seed(seed)
    for number, damage in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        folder.mkdir()
        node, keys = await filled_and_stopped(folder, blobs)
        damage(node)
        await started_anew(node, keys)


@pytest.mark.slow
async def test_planted_without_the_block_sum_the_cases_show_wrong_bytes(
    tmp_path, blobs, monkeypatch
):
    node, keys, before = await age(tmp_path, blobs)
    lose_power(node, before, seed=1)
    monkeypatch.setattr(
        FrameTable, "is_right", lambda table, frame, entry, _: table.is_sound(frame, entry)
    )
    with pytest.raises(AssertionError, match="wrong bytes"):
        await started_anew(node, keys)
    await node.stop()
