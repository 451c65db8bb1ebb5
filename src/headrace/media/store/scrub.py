"""Blocks compared with their sums: on request, and all of them in the background at a bounded rate.

Workers compare each block that they read from a disk. The scrub compares the blocks that no client requests, so that a rotting
disk is found before a client waits for its blocks. It reads in the disk's own thread, between writes, and drops from memory
what was not in memory before. A block that is in memory is compared there: its disk is read when the kernel drops it.
"""

from __future__ import annotations

import asyncio
import enum
import os
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.media.model import BLOCK_BYTES
from headrace.media.store.disk import Disk, DiskState
from headrace.media.store.kernel_calls import is_in_memory
from headrace.media.store.series import SUMS
from headrace.media.store.table import PROVED

SCRUB_BYTES_PER_S: Final = 8 * 1024 * 1024
"""A disk: 1 TiB in 36 hours, a twentieth of what a hard disk reads, and 2 % of a core."""
ROUND_S: Final = 3600.0
"""A small disk is not gone over more often than this."""
_IDLE_S: Final = 0.1
_EMPTY_AT_ONCE: Final = 512


class Verdict(enum.Enum):
    """What a check found."""

    RIGHT = "right"
    WRONG = "wrong"
    EMPTY = "empty"
    CHANGED = "changed"


class Checked(NamedTuple):
    """A frame's block as it was read, if it was."""

    verdict: Verdict
    generation: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Tally:
    """What many checks found."""

    blocks: int = 0
    right: int = 0
    wrong: int = 0
    unread: int = 0


async def check_frame(disk: Disk, frame: int) -> Checked:
    """Compare a frame's block with its sum; hide it if it is wrong, else prove it. Raises: OSError."""
    table = disk.table
    entry = table.entry(frame)
    if not entry.tag or frame in disk.busy:
        return Checked(Verdict.EMPTY)
    is_cold = not is_in_memory(disk.files.reader, disk.files.offset_of(frame), BLOCK_BYTES)
    if is_cold:
        # Before the read: its bytes are in memory, where a worker finds them, before they are compared.
        table.note_cold(frame)
    data = await disk.call(_read_block, disk, frame, is_cold)
    if disk.state is DiskState.OUT or frame in disk.busy or table.entry(frame) != entry:
        return Checked(Verdict.CHANGED)
    is_right = table.is_right(frame, entry, data)
    SUMS["scrub", is_right].inc()
    if not is_right:
        disk.hide_wrong(frame)
        return Checked(Verdict.WRONG)
    table.verified[frame] = PROVED
    return Checked(Verdict.RIGHT, entry.generation, data[: entry.length])


async def check_frames(disk: Disk, frames: Iterable[int], tally: Tally) -> None:
    """Check many frames one after the other, adding up. Raises: OSError at the first that cannot be read."""
    for count, frame in enumerate(frames):
        if disk.state is DiskState.OUT:
            return
        try:
            checked = await check_frame(disk, frame)
        except OSError:
            tally.unread += 1
            raise
        if checked.verdict in (Verdict.RIGHT, Verdict.WRONG):
            tally.blocks += 1
            tally.right += checked.verdict is Verdict.RIGHT
            tally.wrong += checked.verdict is Verdict.WRONG
        elif count % _EMPTY_AT_ONCE == 0:
            await asyncio.sleep(0)


async def scrub(disk: Disk, *, bytes_per_s: float = SCRUB_BYTES_PER_S) -> None:
    """Check every block of the disk, round after round, until it is out. Raises: OSError."""
    start = random.randrange(disk.frames)
    while True:
        began_s = time.monotonic()
        await _scrub_round(disk, start, bytes_per_s)
        if disk.state is DiskState.OUT:
            return
        await asyncio.sleep(max(0.0, began_s + ROUND_S - time.monotonic()))


async def _scrub_round(disk: Disk, start: int, bytes_per_s: float) -> None:
    began_s, checked_bytes, empty = time.monotonic(), 0, 0
    for step in range(disk.frames):
        if disk.state is DiskState.OUT:
            return
        frame = (start + step) % disk.frames
        checked = await check_frame(disk, frame)
        if checked.verdict is Verdict.EMPTY:
            empty += 1
            if empty % _EMPTY_AT_ONCE == 0:
                await asyncio.sleep(_IDLE_S)
            continue
        checked_bytes += BLOCK_BYTES
        due_s = began_s + checked_bytes / bytes_per_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def _read_block(disk: Disk, frame: int, is_cold: bool) -> bytes:  # noqa: FBT001 - called by a pool
    data = disk.read_block(frame)
    if is_cold:
        offset = disk.files.offset_of(frame)
        os.posix_fadvise(disk.files.reader, offset, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    return data
