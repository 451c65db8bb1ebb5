"""How many variants of photos does a node make?

Photos of 1600 x 1200 pixels become variants 800 pixels wide, in WebP and AVIF. The server has one
worker and its child on one core. Beside it: libvips alone, called in a loop on the same core
without limits, URLs or a store. imgproxy is not on the package index, so it is not compared.
"""

from __future__ import annotations

import asyncio
import http.client
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from bench.children import BenchFault
from bench.figures import Figure, Runs, figure
from bench.harness import Run
from bench.media_stage import (
    SERVER_CORE,
    blobs_folder,
    disk_of,
    our_settings,
    pinned,
    served,
)
from bench.systems import OURS, Cell
from bench.views_stage import free_port, pin

BARE: Final = "pyvips alone"
WIDTH: Final = 800
FORMATS: Final = {"webp": {"Q": 78, "effort": 4}, "avif": {"Q": 52, "effort": 2}}
CONNECTIONS: Final = 8
_MAKE_PHOTOS: Final = """
import sys, pyvips
folder, count = sys.argv[1], int(sys.argv[2])
for number in range(count):
    noise = pyvips.Image.perlin(1600, 1200, cell_size=64, seed=number).linear(100, 128)
    fine = pyvips.Image.gaussnoise(1600, 1200, sigma=8, seed=number)
    bands = [noise + fine, noise.fliphor() + fine, noise.flipver() + fine]
    photo = bands[0].bandjoin(bands[1:]).cast("uchar").copy(interpretation="srgb")
    photo.jpegsave(f"{folder}/{number:04}.jpg", Q=85)
"""
_BARE_LOOP: Final = """
import os, sys, time
os.environ |= {"VIPS_CONCURRENCY": "1"}
import pyvips
pyvips.cache_set_max(0)
suffix, options, paths = sys.argv[1], eval(sys.argv[2]), sys.argv[3:]
began_s = time.perf_counter()
for path in paths:
    data = open(path, "rb").read()
    image = pyvips.Image.thumbnail_buffer(data, 800, size="down", output_profile="srgb")
    image.write_to_buffer(suffix, keep="none", **options)
print(len(paths) / (time.perf_counter() - began_s))
"""


async def measure(run: Run) -> list[Figure]:
    """Ours and the bare loop in turns."""
    cells = {OURS.name: lambda: _ours(run), BARE: lambda: _bare(run)}
    found = await run.alternate(cells)
    size = f"1600 x 1200 to {WIDTH} wide, one core"
    return [
        figure(
            f"variants made, {kind}",
            "variants/s",
            size,
            ours=found.get(kind, {}).get(OURS.name),
            peers=_only(found.get(kind, {}), BARE),
        )
        for kind in FORMATS
    ]


def _only(rows: Mapping[str, Runs], name: str) -> dict[str, Runs]:
    return {name: rows[name]} if name in rows else {}


async def _ours(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell:
        keys = _make_photos(cell, run.sized(96, 24))
        port = free_port()
        settings = {
            "HEADRACE_MEDIA_SIGNED": "off",
            "HEADRACE_MEDIA_VARIANTS": str(WIDTH),
            "HEADRACE_MEDIA_DISKS": disk_of(cell),
        }
        child = cell.role("media", "serve", **our_settings(cell, port) | settings)
        pin(child.pid, SERVER_CORE)
        nothing = cell.folder / "targets"
        async with served(child, port, nothing, []):
            found = {}
            _read(port, f"/m/{keys[0]}?w={WIDTH}&fm=png")  # starts the child
            for kind in FORMATS:
                began_s = time.perf_counter()
                targets = [f"/m/{key}?w={WIDTH}&fm={kind}" for key in keys]
                await asyncio.to_thread(_read_many, port, targets)
                found[kind] = len(keys) / (time.perf_counter() - began_s)
        return found


def _make_photos(cell: Cell, count: int) -> list[str]:
    folder = blobs_folder(cell) / "photos"
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", _MAKE_PHOTOS, str(folder), str(count)], check=True)
    return [f"photos/{path.name}" for path in sorted(folder.iterdir())]


def _read_many(port: int, targets: Sequence[str]) -> list[int]:
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        return list(threads.map(lambda target: _read(port, target), targets))


def _read(port: int, target: str) -> int:
    """The length of an object. Raises: BenchFault."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        line.request("GET", target)
        answer = line.getresponse()
        body = answer.read()
    finally:
        line.close()
    if answer.status != 200:
        raise BenchFault(f"{target}: {answer.status} {body[:200]!r}")
    return len(body)


async def _bare(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell:
        keys = _make_photos(cell, run.sized(96, 24))
        paths = [str(blobs_folder(cell) / key) for key in keys]
        found = {}
        for kind, options in FORMATS.items():
            words = [sys.executable, "-c", _BARE_LOOP, f".{kind}", repr(options), *paths]
            done = await asyncio.to_thread(
                subprocess.run, pinned(words, SERVER_CORE), check=True, capture_output=True
            )
            found[kind] = float(done.stdout)
        return found
