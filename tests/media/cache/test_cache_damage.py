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


async def served_after_a_start(node: CacheNode, keys: list) -> int:
    """Start on the damaged disks and return the number of blocks served. All must be readable."""
    node.boot = f"boot-{random.random()}"
    await node.start()
    try:
        count = await served(node, keys)
        await read_all(node.store, keys)
    finally:
        await node.stop()
    return count


def files_of(node: CacheNode, name: str) -> list[Path]:
    """The file `name` of each disk."""
    return [disk.path / name for disk in node.disks]


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))


def edit_each(name: str, change: Callable[[bytearray], None], disks: int = 2) -> Callable:
    """A damage that edits the file `name` of each of the first `disks` disks."""
    return lambda node: [edit(path, change) for path in files_of(node, name)[:disks]]


def swap(node: CacheNode, name: str = "") -> None:
    """Swap a file of both disks, or their folders."""
    one, other = (disk.path / name for disk in node.disks)
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def flip_bits(data: bytearray, count: int, start: int = 0, end: int = 0) -> None:
    for _ in range(count):
        data[random.randrange(start, end or len(data))] ^= 1 << random.randrange(8)


def scribble(data: bytearray) -> None:
    start = random.randrange(HEAD_BYTES, len(data) - 600)
    data[start : start + 600] = random.randbytes(600)


def mix_sets(data: bytearray) -> None:
    first, second, end = (HEAD_BYTES + n * SET_BYTES for n in range(3))
    data[first:second], data[second:end] = data[second:end], data[first:second]


def move_by_one(data: bytearray) -> None:
    data[DATA_AT + BLOCK_BYTES :] = data[DATA_AT:-BLOCK_BYTES]


def cut_index(node: CacheNode) -> None:
    index = files_of(node, "index")[0]
    os.truncate(index, random.randrange(index.stat().st_size))


def foreign_index(node: CacheNode) -> None:
    """The entries of the other disk behind the right head."""
    one, other = files_of(node, "index")
    sets = other.read_bytes()[HEAD_BYTES:]
    edit(one, lambda data: data.__setitem__(slice(HEAD_BYTES, None), sets))


DAMAGES = {
    "index cut": (cut_index, 0, 30),
    "index flipped": (edit_each("index", lambda d: flip_bits(d, 64, HEAD_BYTES)), 1, 30),
    "heads flipped": (edit_each("index", lambda d: flip_bits(d, 4, end=64)), 0, 30),
    "index scribbled": (edit_each("index", scribble, 1), 1, 30),
    "sets mixed": (edit_each("index", mix_sets, 1), 1, 29),
    "index lost": (lambda node: files_of(node, "index")[0].unlink(), 1, 30),
    "blocks swapped": (lambda node: swap(node, "blocks"), 0, 0),
    "indexes swapped": (lambda node: swap(node, "index"), 0, 0),
    "folders swapped": (swap, 30, 30),
    "foreign index": (foreign_index, 1, 30),
    "disk lost": (lambda node: shutil.rmtree(node.disks[0].path), 1, 30),
    "superblock torn": (
        edit_each("blocks", lambda d: d.__setitem__(slice(20, 40), bytes(20)), 1), 0, 30,
    ),
    "data flipped": (edit_each("blocks", lambda d: flip_bits(d, 10, DATA_AT)), 1, 30),
    "blocks moved by one": (edit_each("blocks", move_by_one, 1), 1, 29),
}  # fmt: skip
"""Damage: what it does, and the least and the most of 30 blocks that may still be served."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
async def test_damage_costs_misses_only(tmp_path, blobs, name):
    node, keys = await filled_and_stopped(tmp_path, blobs)
    damage, least, most = DAMAGES[name]
    damage(node)
    assert least <= await served_after_a_start(node, keys) <= most


async def age(tmp_path, blobs) -> tuple[CacheNode, list, dict[Path, bytes]]:
    """A node whose frames were filled twice, and its files from half-time."""
    node, keys = await filled_and_stopped(tmp_path, blobs)
    files = [*files_of(node, "blocks"), *files_of(node, "index")]
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
    assert await served_after_a_start(node, keys) < len(keys)


@pytest.mark.soak
async def test_power_loss_again_and_again(tmp_path, blobs):
    node, keys, before = await age(tmp_path, blobs)
    newest = {path: path.read_bytes() for path in before}
    for seed in range(60):
        for path, data in newest.items():
            path.write_bytes(data)
        lose_power(node, before, seed)
        await served_after_a_start(node, keys)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
async def test_every_damage_with_other_dice(tmp_path, blobs, seed):
    random.seed(seed)
    for number, (damage, _, _) in enumerate(DAMAGES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        node, keys = await filled_and_stopped(folder, blobs)
        damage(node)
        await served_after_a_start(node, keys)


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
        await served_after_a_start(node, keys)
    await node.stop()
