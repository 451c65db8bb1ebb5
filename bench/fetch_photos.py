"""How many photos of 150 KB a second come in, end to end, against Scrapy, img2dataset and the
bare loop?

Ours: from the first request in the origin's log to the moment at which a consumer had received
every photo: claimed, downloaded, hashed, checked, stored durably, its row committed, its item
published and the `on_item` handler called, with a lane a customer, through the real agent. A peer
is timed from its first to its last photo in the origin's log, so neither its start nor its last
write counts. The origin is nginx on 60 addresses of the same two cores,
three for each customer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bench.children import BenchFault, Child, wait_for
from bench.fetch_site import Offered, Site, fetch_site
from bench.figures import Figure, Goal, Runs, figure
from bench.harness import READY_S, Run, empty
from bench.machine import ROOT
from bench.origins.nginx import Nginx, nginx
from bench.origins.photos import make_photos
from bench.systems import OURS, PEER_PYTHON
from bench.tally import read_tally

SIZES = (2_000, 6_000, 20_000)
QUICK_SIZE = 2_000
APP = "bench.apps.items:app"
SCRAPY, BARE = "scrapy images pipeline", "bare pycurl loop"
IMG2DATASET, IN_SHARDS = "img2dataset", "img2dataset, tar files of 500"
PEER_MOST = {SCRAPY: 2_000, IMG2DATASET: 6_000, IN_SHARDS: 6_000}
"""At most so many; more would take minutes."""
WORDS = {
    SCRAPY: ("bench.peers.scrapy_images",),
    IMG2DATASET: ("bench.peers.img2dataset_run", "files"),
    IN_SHARDS: ("bench.peers.img2dataset_run", "webdataset"),
    BARE: ("bench.peers.bare_pycurl",),
}
QUIET = {"NO_ALBUMENTATIONS_UPDATE": "1"}
"""Otherwise a library of img2dataset requests news from the network at each start."""
GOAL = Goal(at_least=1_500, times={SCRAPY: 10, IMG2DATASET: 1.3})
CUSTOMERS = 20
PHOTOS_OF_ITEM = 4
SLOTS = 2
DEADLINE_S = 180.0
LOOK_S = 0.02
BODIES_CHECKED = 200


async def measure(run: Run) -> list[Figure]:
    """Three sizes, as far as each peer goes; a quick run takes one of its own."""
    figures = []
    for photos in (QUICK_SIZE,) if run.quick else SIZES:
        folder = await asyncio.to_thread(_photos, run, photos)
        cells = {OURS.name: partial(_ours, run, folder, photos)}
        for peer in WORDS:
            if photos <= PEER_MOST.get(peer, photos) and (peer, run.quick) != (IN_SHARDS, True):
                cells[peer] = partial(_peer, run, folder, photos, peer)
        found = await run.alternate(cells)
        figures += _figures(photos, found)
    return figures


def _figures(photos: int, found: dict[str, dict[str, Runs]]) -> list[Figure]:
    size = f"{photos:,} photos of 150 KB"
    rates, cpu = found.get("photos/s", {}), found.get("CPU us", {})
    ours, limit = rates.get(OURS.name), rates.get(BARE)
    peers = {name: runs for name, runs in rates.items() if name in PEER_MOST}
    used = {BARE: cpu[BARE].median} if BARE in cpu else {}
    bound = {BARE: limit.median} if limit else {}
    goal = GOAL if not bound or GOAL.times.keys() <= peers.keys() else Goal(at_least=1_500)
    return [
        figure(
            "photos end to end, a consumer attached",
            "photos/s",
            size,
            ours=ours,
            peers=peers,
            limit=bound,
            goal=goal,
            why="40 % of a slot's CPU is the kernel's (files, sockets), beside the origin",
            not_measured=["TLS, hosts beyond this machine"],
        ),
        figure(
            "CPU a photo, all processes but the origin",
            "us",
            size,
            ours=cpu.get(OURS.name),
            limit=used,
        ),
    ]


def _photos(run: Run, count: int) -> Path:
    """The photos' files, on the disk: a later sync of ours must not write them."""
    folder = run.folder / "photos"
    make_photos(folder, count)
    os.sync()
    return folder


async def _ours(run: Run, folder: Path, photos: int) -> Mapping[str, float]:
    async with (
        run.cell() as cell,
        nginx(cell.folder / "origin", folder) as origin,
        fetch_site(cell, origin.settings) as site,
    ):
        await _offer(site, origin, photos)
        await cell.engines.settle(cell.database)
        worker = cell.work(APP, slots=SLOTS)
        try:
            ended_s, cpu_s = await _wait_delivered(site, worker, origin, photos)
        finally:
            await worker.end()
        if (found := await site.decided()) != {"stored": photos}:
            raise BenchFault(f"{photos} photos: {found}")
        await asyncio.to_thread(_check_bodies, site, folder)
        sent = await asyncio.to_thread(origin.sent_s)
        if len(sent) < photos:
            raise BenchFault(f"{photos} photos delivered, {len(sent)} sent")
        return {"photos/s": photos / (ended_s - sent[0]), "CPU us": cpu_s / photos * 1e6}


async def _offer(site: Site, origin: Nginx, photos: int) -> None:
    """Catalogues of all customers, applied before any worker starts.

    The photos of a customer are on three hosts of its own, as those of a seller are.
    """
    names = [f"c{n}" for n in range(CUSTOMERS)]
    await site.set_customers(names)
    each = photos // CUSTOMERS
    for number, name in enumerate(names):
        urls = [origin.url(n) for n in range(number, photos, CUSTOMERS)]
        items = [
            Offered(f"i{at}", urls[at : at + PHOTOS_OF_ITEM])
            for at in range(0, each, PHOTOS_OF_ITEM)
        ]
        await site.offer(name, items)


async def _wait_delivered(
    site: Site, worker: Child, origin: Nginx, photos: int
) -> tuple[float, float]:
    """The wall-clock moment of the last handler call, and CPU seconds from the first request on."""
    engines, folder = site.cell.engines, site.cell.tally_folder
    await wait_for(origin.has_sent, "a request", READY_S, worker)
    began_cpu_s = worker.cpu_s() + engines.cpu_s()
    ends_s = time.monotonic() + DEADLINE_S
    while (found := read_tally(folder)).count < photos:
        if time.monotonic() > ends_s or not worker.is_running:
            raise BenchFault(f"{found.count} of {photos} photos delivered {worker.err[-800:]}")
        await asyncio.sleep(LOOK_S)
    cpu_s = worker.cpu_s() + engines.cpu_s() - began_cpu_s
    return time.time() - (time.monotonic_ns() - found.last_ns) / 1e9, cpu_s


def _check_bodies(site: Site, folder: Path) -> None:
    """Bytes of some photos, against their names and against what was served."""
    stored = [path for path in site.blobs_folder.rglob("*.jpg") if path.is_file()]
    for path in stored[:BODIES_CHECKED]:
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.stem:
            raise BenchFault(f"{path.name} holds other bytes")
    served = {hashlib.sha256((folder / f"{n}.jpg").read_bytes()).hexdigest() for n in range(20)}
    if not served <= {path.stem for path in stored}:
        raise BenchFault("a photo that was served is not in the store")


async def _peer(run: Run, folder: Path, photos: int, peer: str) -> Mapping[str, float]:
    scratch = run.folder / f"peer-{time.monotonic_ns()}"
    await asyncio.to_thread(scratch.mkdir)
    try:
        async with nginx(scratch / "origin", folder) as origin:
            urls = scratch / "urls.txt"
            text = "\n".join(origin.url(number) for number in range(photos))
            await asyncio.to_thread(urls.write_text, f"{text}\n")
            out = scratch / "stored"
            python = sys.executable if peer == BARE else str(PEER_PYTHON)
            words = [python, "-m", *WORDS[peer], str(urls), str(out)]
            env = {"PYTHONPATH": str(ROOT), **QUIET}
            child = Child(words, folder=scratch, env=env, name="peer")
            try:
                found = json.loads((await _finish(child)).strip().splitlines()[-1])
            finally:
                await child.end()
            # nginx writes a line a moment after its last byte.
            await wait_for(lambda: len(origin.sent_s()) >= photos, "its log", 10, None)
            sent = origin.sent_s()
    finally:
        await asyncio.to_thread(empty, scratch)
    if found["stored"] < photos:
        raise BenchFault(f"{peer}: {found['stored']} of {photos} photos stored")
    took_s = found.get("seconds") or sent[-1] - sent[0]
    return {"photos/s": photos / took_s, "CPU us": found["cpu_s"] / photos * 1e6}


async def _finish(child: Child) -> str:
    return await child.finish(DEADLINE_S)
