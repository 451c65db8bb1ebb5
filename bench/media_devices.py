"""Is a raw block device faster than a file system below the cache of blocks?

The device is a loop device over an image on the same disk as the folder beside it: it shows what
the code path costs, not what a disk of its own would give. Each cell fills the cache with all
tracks of the object store, reads ranges from memory, then reads every track again after the kernel
has dropped the pages. A loop device needs root and losetup; without them the rows state that.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from bench.children import BenchFault
from bench.figures import Figure, Runs, figure
from bench.harness import Run
from bench.media_objects import make_tracks
from bench.media_stage import Serving, blobs_folder, disk_of, hot_times, our_node, press, read_all
from bench.systems import OURS, Cell

SIZE = "1GiB"
SIZE_BYTES = 2**30
LOOP = "loop device"
RANGE_BYTES = 256 * 1024


async def measure(run: Run) -> list[Figure]:
    """A folder and a loop device in turns."""
    cells = {OURS.name: partial(_in_folder, run)}
    note = "the loop device is an image in the same file system, with direct I/O"
    if why := missing():
        note = f"skipped: a {LOOP} needs {why}"
    else:
        cells[LOOP] = partial(_on_loop, run)
    found = await run.alternate(cells)
    size = f"{run.sized(64, 16)} tracks of 5 MiB"
    return [
        figure(
            title,
            unit,
            size,
            ours=found.get(metric, {}).get(OURS.name),
            peers=_of_loop(found, metric),
            not_measured=[note],
        )
        for metric, title, unit in (
            ("fill", "disk cache in a folder: filled by one client", "MB/s"),
            ("hot", "the same: hot ranges of 256 KiB", "answers/s"),
            ("cold", "the same: read from the disk by one client, every block verified", "MB/s"),
        )
    ]


def missing() -> str:
    """What a loop device needs and this machine lacks; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    return "" if shutil.which("losetup") and Path("/dev/loop-control").exists() else "losetup"


def _of_loop(found: Mapping[str, Mapping[str, Runs]], metric: str) -> dict[str, Runs]:
    runs = found.get(metric, {}).get(LOOP)
    return {LOOP: runs} if runs else {}


@asynccontextmanager
async def _loop_device(cell: Cell) -> AsyncIterator[Path]:
    """A device over an own image; detached by its name. Raises: BenchFault."""
    image = cell.folder / "image"
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE_BYTES)
    device = await asyncio.to_thread(_losetup, "--find", "--show", "--direct-io=on", str(image))
    try:
        yield Path(device)
    finally:
        await asyncio.to_thread(_losetup, "--detach", device)


def _losetup(*words: str) -> str:
    done = subprocess.run(
        ["losetup", *words], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise BenchFault(f"losetup: {done.stderr.strip()}")
    return done.stdout.strip()


async def _in_folder(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell:
        pages = cell.folder / "disk" / "blocks"
        return await _measure(run, cell, disk_of(cell, SIZE), pages)


async def _on_loop(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell, _loop_device(cell) as device:
        return await _measure(run, cell, f"{device}:{SIZE}", device)


async def _measure(run: Run, cell: Cell, disk: str, pages: Path) -> Mapping[str, float]:
    tracks = make_tracks(blobs_folder(cell), run.sized(64, 16))
    async with our_node(cell, tracks, HEADRACE_MEDIA_DISKS=disk) as serving:
        filled = await asyncio.to_thread(read_once, serving)
        await read_all(serving)
        hot = await press(
            cell, serving, "hot", range_bytes=RANGE_BYTES, connections=64, **hot_times(run)
        )
        await asyncio.to_thread(drop_pages, pages)
        cold = await asyncio.to_thread(read_once, serving)
    return {"fill": filled, "hot": hot.rate_per_s, "cold": cold}


def read_once(serving: Serving) -> float:
    """Read every track once, without comparing it; return MB/s. Raises: BenchFault."""
    line = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    count, began_s = 0, time.perf_counter()
    for row in serving.targets.read_text().splitlines():
        _, _, target = row.split()
        line.request("GET", target)
        count += len(line.getresponse().read())
    spent_s = time.perf_counter() - began_s
    line.close()
    if count != sum(track.size_bytes for track in serving.tracks):
        raise BenchFault(f"{count} bytes of all tracks were received")
    return count / spent_s / 1e6


def drop_pages(path: Path) -> None:
    """Have the kernel drop the pages of a file or device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
