"""How long is a full tebibyte store down after kill -9, and what do its lookups cost and hit?

The store has 4,194,304 frames. Its blocks file is sparse, and its index is full of entries with
right sums, like those of blocks without requests. The node is killed with all its processes and
started again. The clock stops at the first byte of a track that the node had stored, served from
its store. Hits are simulated: SIEVE in sets of 16, as in the store, against LRU, a global SIEVE and
the best static choice, on the popularity where 140 tracks are 10 % of plays and 500,000 are 90 %.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tests.kit.processes import descendants

from bench.children import BenchFault, send_signal, wait_for
from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from bench.media_objects import make_tracks, write_targets
from bench.media_stage import (
    Serving,
    blobs_folder,
    our_settings,
    read_all,
    served,
    signed_targets,
)
from bench.report import write_plot
from bench.systems import OURS
from bench.views_stage import free_port
from headrace.media.cache.layout import (
    DATA_AT,
    DISK_ID_BYTES,
    ENTRY,
    HEAD_BYTES,
    PROBE_BLOCKS,
    SET_BYTES,
    TAGS_BYTES,
    WAYS,
    Superblock,
    entry_sum,
    frames_within,
    pack_head,
    pack_superblock,
)
from headrace.media.model import BLOCK_BYTES
from headrace.media.simulate.cluster import lines_svg
from headrace.media.simulate.eviction import TRACKS, simulate

FRAMES, FRAMES_QUICK = 4_194_304, 262_144
BACK_S = 30.0
CACHES = (10_000, 50_000, 150_000, 500_000)
PLAYS_A_TRACK = 240
POLICIES = {
    "sieve_sets": "SIEVE in sets of 16",
    "lru": "LRU",
    "sieve_global": "global SIEVE",
    "best_static": "best static choice",
}


async def measure_restart(run: Run) -> list[Figure]:
    """Killed and started, as often as there are pairs."""
    frames = run.sized(FRAMES, FRAMES_QUICK)
    found = await run.alternate({OURS.name: partial(_restart, run, frames)})
    size = f"{frames:,} entries"
    return [
        figure(
            "restart after kill -9: to the first stored byte",
            "s",
            size,
            ours=found.get("back s", {}).get(OURS.name),
            goal=Goal(at_most=2),
            why="after a crash each entry's sum is checked before a block is served",
        ),
        figure(
            "the same: to the first answer",
            "s",
            size,
            ours=found.get("answers s", {}).get(OURS.name),
        ),
    ]


async def measure_hits(run: Run) -> list[Figure]:
    """Simulated, all numbers divided alike; the second half of the plays is counted.

    At least PLAYS_A_TRACK for each track that fits: LRU is at its end after 10, SIEVE still learns
    at 60.
    """
    requests, scale = run.sized(3_000_000, 600_000), run.sized(10, 100)
    rows = []
    if run.quick:
        run.leave_out(*(f"{tracks:,} tracks" for tracks in CACHES if tracks != CACHES[1]))
    for tracks in CACHES[1:2] if run.quick else CACHES:
        plays = max(requests, PLAYS_A_TRACK * tracks // scale)
        rows += await asyncio.to_thread(simulate, [tracks], requests=plays, scale=scale)
    lines = {
        name: [(row.frames, getattr(row, field)) for row in rows]
        for field, name in POLICIES.items()
    }
    title = f"hits by the number of tracks that fit, of {TRACKS:,}"
    write_plot(run.results, "media_hits", lines_svg(title, lines))
    figures = []
    for row in rows:
        size = f"{row.frames:,} of {TRACKS:,} tracks fit"
        others = {
            POLICIES[field]: Runs((getattr(row, field) * 100,))
            for field in ("lru", "sieve_global", "best_static")
        }
        figures += [
            figure("hits", "% of plays", size, ours=Runs((row.sieve_sets * 100,)), peers=others),
            figure(
                "hits over LRU's",
                "points",
                size,
                ours=Runs(((row.sieve_sets - row.lru) * 100,)),
                goal=Goal(at_least=2.5),
            ),
            figure(
                "hits behind a global SIEVE's",
                "points",
                size,
                ours=Runs(((row.sieve_global - row.sieve_sets) * 100,)),
                goal=Goal(at_most=2),
            ),
        ]
    return figures


async def _restart(run: Run, frames: int) -> Mapping[str, float]:
    async with run.cell() as cell:
        tracks = make_tracks(blobs_folder(cell), 4)
        disk, size_bytes = cell.folder / "disk", size_of(frames)
        make_full_disk(disk, frames)
        port = free_port()
        settings = our_settings(cell, port, HEADRACE_MEDIA_DISKS=f"{disk}:{size_bytes}B")
        targets = write_targets(cell.folder / "targets", tracks, signed_targets(cell, tracks))
        first = cell.role("media", "serve", **settings)
        async with served(first, port, targets, tracks) as serving:
            await read_all(serving)
            await wait_for(lambda: _probe(serving)[1], "stored blocks", BACK_S, first)
            for pid in [first.pid, *descendants(first.pid)]:
                send_signal(pid)
        began_s = time.perf_counter()
        second = cell.role("media", "serve", **settings)
        again = Serving(second, port, targets, tracks)
        try:
            await wait_for(lambda: _probe(again)[0], "an answer", BACK_S, second)
            answers_s = time.perf_counter() - began_s
            await wait_for(lambda: _probe(again)[1], "a stored byte", BACK_S, second)
            back_s = time.perf_counter() - began_s
        finally:
            await second.end()
    return {"back s": back_s, "answers s": answers_s}


def _probe(serving: Serving) -> tuple[bool, bool]:
    """Whether a block of the first track is answered, and whether it came out of the store."""
    _, _, target = serving.targets.read_text().splitlines()[0].split()
    line = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=5)
    try:
        line.request("GET", target, headers={"Range": f"bytes={BLOCK_BYTES}-{BLOCK_BYTES + 99}"})
        answer = line.getresponse()
        body = answer.read()
        is_right = answer.status == 206 and len(body) == 100
        return is_right, is_right and "; hit" in (answer.getheader("cache-status") or "")
    except (OSError, http.client.HTTPException):
        return False, False
    finally:
        line.close()


def size_of(frames: int) -> int:
    """The size of a disk that has so many frames."""
    size_bytes = (
        frames * (BLOCK_BYTES + SET_BYTES // WAYS) + 2 * DATA_AT + PROBE_BLOCKS * BLOCK_BYTES
    )
    if frames_within(size_bytes) != frames:
        raise BenchFault(
            f"{size_bytes} bytes have {frames_within(size_bytes)} frames, not {frames}"
        )
    return size_bytes


def make_full_disk(folder: Path, frames: int) -> None:
    """A disk whose frames all have an entry with a right sum, of keys that are never requested.

    Some 8 s.
    """
    folder.mkdir()
    superblock = Superblock(os.urandom(DISK_ID_BYTES), frames)
    with (folder / "blocks").open("wb") as blocks:
        blocks.write(pack_superblock(superblock))
        blocks.truncate(DATA_AT + (frames + PROBE_BLOCKS) * BLOCK_BYTES)
    dice = np.random.default_rng(1)
    index = bytearray(frames // WAYS * SET_BYTES)
    for number in range(frames // WAYS):
        _fill_set(index, number, dice.integers(1, 2**63, 3 * WAYS).tolist(), superblock)
    with (folder / "index").open("wb") as file:
        file.write(pack_head(superblock, is_clean=False).ljust(HEAD_BYTES, b"\0"))
        file.write(index)


def _fill_set(index: bytearray, number: int, drawn: Sequence[int], superblock: Superblock) -> None:
    start = number * SET_BYTES
    for way in range(WAYS):
        tag, fingerprint, own_sum = drawn[3 * way], drawn[3 * way + 1] % 2**32, drawn[3 * way + 2]
        fields = (fingerprint, way + 1, BLOCK_BYTES, own_sum)
        sum_of = entry_sum(tag, fields, frame=number * WAYS + way, superblock=superblock)
        tag_at, entry_at = start + 8 * way, start + TAGS_BYTES + ENTRY.size * way
        index[tag_at : tag_at + 8] = tag.to_bytes(8, "little")
        ENTRY.pack_into(index, entry_at, *fields, sum_of)
