"""What does a range of media cost by where it comes from, and what memory does each process have?

A range of 256 KiB comes from memory, from the node's disk, from another node (a hop) or from the
object store, whose blocks the node writes to its disk (a fill). All URLs are signed and checked.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import asyncpg

from bench.children import BenchFault, Child, cpu_of, memory_of
from bench.figures import Figure, Runs, figure
from bench.harness import Run, wait_started
from bench.media_cluster import relay_and_owner
from bench.media_devices import drop_pages, read_once
from bench.media_objects import make_tracks
from bench.media_ranges import LARGE
from bench.media_stage import blobs_folder, disk_of, hot_times, our_node, press, read_all
from bench.ours import nothing, open_app
from bench.peers.driver import PAYLOAD
from bench.systems import OURS, Cell
from bench.views_stage import free_port

FROM: Final = {
    "memory": "range of 256 KiB from memory",
    "disk": "range of 256 KiB from the disk",
    "hop": "range of 256 KiB by a hop",
    "fill": "range of 256 KiB filled",
}
SLOTS: Final = 10
JOBS: Final = 1_000
SESSIONS: Final = 20
DISK_BYTES: Final = 256 * 2**20
DISK_CHUNK: Final = 2**20
SYNC_EVERY: Final = 16
IDLE_S: Final = 2.0
START_S: Final = 5.0


async def measure_media(run: Run) -> list[Figure]:
    """CPU of the nodes for a range."""
    found = await run.alternate({OURS.name: partial(_one_node, run)})
    found |= await run.alternate({OURS.name: partial(_hop, run)})
    size = f"{run.sized(64, 16)} tracks of 5 MiB"
    return [figure(name, "us", size, ours=rows[OURS.name]) for name, rows in sorted(found.items())]


async def _one_node(run: Run) -> Mapping[str, float]:
    """Filled by one client, hot, then from the disk."""
    async with run.cell() as cell:
        tracks = make_tracks(blobs_folder(cell), run.sized(64, 16))
        ranges = sum(track.size_bytes for track in tracks) / LARGE
        async with our_node(cell, tracks, HEADRACE_MEDIA_DISKS=disk_of(cell)) as serving:
            pid, found = serving.child.pid, {}
            for kind in ("fill", "disk"):
                before_s = cpu_of(pid)
                await asyncio.to_thread(read_once, serving)
                # Blocks are written to the disk after they were sent.
                await asyncio.sleep(IDLE_S)
                found[f"{FROM[kind]}: CPU"] = (cpu_of(pid) - before_s) / ranges * 1e6
                if kind == "fill":
                    await read_all(serving)
                    hot = await press(cell, serving, "hot", range_bytes=LARGE, **hot_times(run))
                    found[f"{FROM['memory']}: CPU"] = hot.cpu_s / hot.report["done"] * 1e6
                    await asyncio.to_thread(drop_pages, cell.folder / "disk" / "blocks")
    return found


async def _hop(run: Run) -> Mapping[str, float]:
    """CPU of both nodes for a range that one gets from the other."""
    async with run.cell() as cell, relay_and_owner(run, cell) as (relay, owner):
        before_s = owner.child.cpu_s()
        pressed = await press(cell, relay, "hot", range_bytes=LARGE, **hot_times(run))
        # The warm-up is counted for the owner, too: its share is the same for each range.
        warm = 1 + hot_times(run)["warm_s"] / hot_times(run)["seconds"]
        cpu_s = pressed.cpu_s + (owner.child.cpu_s() - before_s) / warm
        return {f"{FROM['hop']}: CPU": cpu_s / pressed.report["done"] * 1e6}


async def measure_memory(run: Run) -> list[Figure]:
    """Memory of each process without load, of a slot, of a session; the disk's writes in order."""
    found = await run.alternate({OURS.name: partial(_memory, run)}, pairs=1)
    found |= {
        "disk: synced writes": {OURS.name: Runs((_disk_bytes_per_s(run.folder),))},
    }
    return [
        figure(name, "B/s" if name.startswith("disk") else "B", "", ours=rows[OURS.name])
        for name, rows in found.items()
    ]


async def _memory(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell:
        found = {}
        for name, words in {
            "scheduler": ("scheduler",),
            "flusher": ("flusher",),
            "API process": ("api",),
        }.items():
            child = cell.role(*words, HEADRACE_WEB_LISTEN=f"127.0.0.1:{free_port()}")
            found[f"{name}: memory"] = await _memory_of(child)
        few = await _agent_memory(cell, 1, run_before=0)
        many = await _agent_memory(cell, 1 + SLOTS, run_before=JOBS)
        found["slot: memory"] = (many - few) / SLOTS
        found["agent: memory"] = few - found["slot: memory"]
        found["session of PostgreSQL: memory"] = await _session_memory(cell)
    return found


async def _memory_of(child: Child) -> float:
    """Memory of a role that has started."""
    try:
        await asyncio.sleep(START_S)
        if not child.is_running:
            raise BenchFault(f"{child.name} ended: {child.err[-1500:]}")
        return float(memory_of(child.pid))
    finally:
        await child.end()


async def _agent_memory(cell: Cell, slots: int, *, run_before: int) -> float:
    """Memory of an agent whose slots have each run jobs."""
    app = open_app(cell.url)
    try:
        await app.task("noop")(nothing).enqueue_many([PAYLOAD] * JOBS)
    finally:
        await app.close()
    worker = cell.work(slots=slots)
    try:
        await wait_started(cell, worker, run_before + JOBS)
        await asyncio.sleep(IDLE_S)
        return float(memory_of(worker.pid))
    finally:
        await worker.end()


async def _session_memory(cell: Cell) -> float:
    """Memory of a session that has run statements."""
    pid = cell.engines.postgres_pid
    sessions = [await asyncpg.connect(cell.url)]
    try:
        before = memory_of(pid)
        for _ in range(SESSIONS):
            sessions.append(await asyncpg.connect(cell.url))
            await sessions[-1].fetch("SELECT * FROM headrace.queue_counts_v1(NULL, 100)")
        return (memory_of(pid) - before) / SESSIONS
    finally:
        for session in sessions:
            await session.close()


def _disk_bytes_per_s(folder: Path) -> float:
    """Bytes a second that the disk takes in order, synced every 16 MiB."""
    path, chunk = folder / "disk-probe", os.urandom(DISK_CHUNK)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        began_s = time.perf_counter()
        for number in range(DISK_BYTES // DISK_CHUNK):
            os.write(file, chunk)
            if number % SYNC_EVERY == SYNC_EVERY - 1:
                os.fdatasync(file)
        return DISK_BYTES / (time.perf_counter() - began_s)
    finally:
        os.close(file)
        path.unlink()
