"""Never a wrong byte: several processes, few frames for many blocks, stalled clients, kills.

Every byte that a client of `cache_worker` receives is checked. The planted bugs prove that the
check can fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from cache_lab import CacheNode, disk_bytes, put_object
from filler_process import CRASH_POINTS, FillerChild

from headrace.media.model import DiskConfig

WORKERS = 2


async def make_node(tmp_path: Path, blobs, *, sets: int = 1, objects: int = 12) -> tuple:
    disks = [DiskConfig(tmp_path / f"disk-{n}", disk_bytes(sets)) for n in range(2)]
    node = CacheNode(tmp_path, blobs, disks)
    shapes = {f"{n}.mp3": await put_object(blobs, f"{n}.mp3", 4.3) for n in range(objects)}
    return node, {name: dataclasses.astuple(shape) for name, shape in shapes.items()}


def start_workers(node: CacheNode, shapes: dict, **settings) -> list[subprocess.Popen]:
    command = [sys.executable, str(Path(__file__).with_name("cache_worker.py"))]
    parameters = {
        "run": str(node.run),
        "boot": node.boot,
        "shapes": shapes,
        "run_s": 300,
        **settings,
    }
    return [
        subprocess.Popen(
            [*command, json.dumps({**parameters, "worker": worker})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for worker in range(WORKERS)
    ]


async def finish(workers: list[subprocess.Popen]) -> Counter:
    """The combined results."""
    seen: Counter = Counter()
    for worker in workers:
        out = await asyncio.to_thread(worker.stdout.read)
        assert worker.wait(timeout=90) == 0
        worker.stdin.close()
        worker.stdout.close()
        seen.update(json.loads(out))
    return seen


async def run_under(node: CacheNode, shapes: dict, *, bug: str = "", **settings) -> Counter:
    """Run one filler and all workers to the end."""
    with FillerChild(node, bug=bug) as filler:
        seen = await finish(start_workers(node, shapes, **settings))
        assert filler.stop() == 0
    return seen


async def run_through_kills(node: CacheNode, shapes: dict, *, kills: int, **settings) -> Counter:
    """Run a filler that dies `kills` times, each time at another point, and is restarted."""
    dice = random.Random(5)
    workers = start_workers(node, shapes, **settings)
    for number in range(kills):
        point = CRASH_POINTS[number % len(CRASH_POINTS)]
        with FillerChild(node, crash_at=f"media.fill.{point}:{dice.randrange(1, 40)}") as filler:
            await asyncio.to_thread(filler.process.wait, 120)
    with FillerChild(node) as filler:
        seen = await finish(workers)
        assert filler.stop() == 0
    return seen


@pytest.mark.slow
async def test_never_a_wrong_byte(tmp_path, blobs):
    node, shapes = await make_node(tmp_path, blobs)
    seen = await run_under(node, shapes, reads=300)
    assert seen["wrong"] == seen["failed"] == 0
    assert seen["reads"] == 300 * WORKERS
    assert seen["hits"] > 150


@pytest.mark.soak
async def test_long_never_a_wrong_byte(tmp_path, blobs):
    node, shapes = await make_node(tmp_path, blobs, sets=2, objects=40)
    seen = await run_under(node, shapes, reads=50_000)
    assert (seen["wrong"], seen["failed"], seen["reads"]) == (0, 0, 50_000 * WORKERS)


@pytest.mark.soak
async def test_long_never_a_wrong_byte_through_a_hundred_kills(tmp_path, blobs):
    node, shapes = await make_node(tmp_path, blobs, objects=40)
    seen = await run_through_kills(node, shapes, kills=108, reads=40_000)
    assert (seen["wrong"], seen["failed"]) == (0, 0)


@pytest.mark.soak
async def test_long_with_workers_that_nap_inside_their_turns(tmp_path, blobs):
    node, shapes = await make_node(tmp_path, blobs, objects=40)
    seen = await run_under(node, shapes, reads=5000, nap_s=0.015)
    assert (seen["wrong"], seen["failed"]) == (0, 0)


@pytest.mark.soak
async def test_long_planted_without_punching(tmp_path, blobs):
    node, shapes = await make_node(tmp_path, blobs, objects=40)
    seen = await run_under(node, shapes, reads=10_000, bug="no punch, no probe")
    assert seen["wrong"] > 0
    # The probe detects such a disk, and it is served by copying.
    seen = await run_under(node, shapes, reads=2000, bug="no punch")
    assert (seen["wrong"], seen["failed"]) == (0, 0)


@pytest.mark.soak
async def test_long_planted_without_the_wait(tmp_path, blobs):
    node, shapes = await make_node(tmp_path, blobs, objects=40)
    seen = await run_under(node, shapes, reads=10_000, nap_s=0.015, bug="no wait")
    assert seen["wrong"] > 0


@contextmanager
def loop_device(image: Path, size_bytes: int):
    """A loop device over a new file."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    command = ["losetup", "--find", "--show", str(image)]
    if shutil.which("losetup") is None:
        pytest.skip("needs losetup")
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


@pytest.mark.soak
async def test_cold_blocks_with_eight_mebibytes_of_read_ahead(tmp_path, blobs):
    """On a loop device with its own file system, whose read-ahead can be set."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    with loop_device(tmp_path / "image", 200 * 2**20) as device:
        subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
        Path(f"/sys/block/{device.name}/queue/read_ahead_kb").write_text("8192")
        subprocess.run(["mount", str(device), str(mounted)], check=True)
        try:
            node, shapes = await make_node(tmp_path, blobs, objects=40)
            node.disks = [DiskConfig(mounted / f"d{n}", disk_bytes(4)) for n in range(2)]
            seen = await run_under(node, shapes, reads=20_000, is_cold=True)
            assert (seen["wrong"], seen["failed"]) == (0, 0)
        finally:
            subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.soak
async def test_a_block_device_is_a_disk(tmp_path, blobs):
    """The same code on a raw loop device."""
    with loop_device(tmp_path / "image", disk_bytes(4)) as device:
        node, shapes = await make_node(tmp_path, blobs, objects=40)
        node.disks = [DiskConfig(device, disk_bytes(4))]
        for boot in ("boot-1", "boot-2"):
            node.boot = boot
            seen = await run_under(node, shapes, reads=5000)
            assert (seen["wrong"], seen["failed"]) == (0, 0)
