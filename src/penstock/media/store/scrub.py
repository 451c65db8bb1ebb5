"""Blocks compared with their sums: on request, and all of them in the background at a bounded rate.

A worker compares a block once a start, when it is first asked for. The scrub finds what went bad since, and what nobody asks
for, before a client has to wait for it. It reads through the disk's own thread, between writes, and gives back the memory of what
was not in memory before.
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

from penstock.media.model import BLOCK_BYTES
from penstock.media.store.disk import Disk, DiskState
from penstock.media.store.series import SUMS

SCRUB_BYTES_PER_S: Final = 8 * 1024 * 1024
"""A disk: 1 TiB in 36 hours, a twentieth of what a hard disk reads, and 2 % of a core."""
ROUND_S: Final = 3600.0
"""A small disk is not gone over more often than this."""
_TRIED: Final = [bytearray(1)]
"""Where a byte is read to that nobody looks at."""
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
    """Compare a frame's block with its sum; a wrong one is hidden, a right one is proved. Raises: OSError."""
    table = disk.table
    entry = table.entry(frame)
    if not entry.tag or frame in disk.busy:
        return Checked(Verdict.EMPTY)
    data = await disk.call(_read_and_forget, disk, frame)
    if disk.state is DiskState.OUT or frame in disk.busy or table.entry(frame) != entry:
        return Checked(Verdict.CHANGED)
    is_right = table.is_right(frame, entry, data)
    SUMS["scrub", is_right].inc()
    if not is_right:
        table.hide(frame)
        disk.note_changed(frame)
        return Checked(Verdict.WRONG)
    table.verified[frame] = 1
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


def _read_and_forget(disk: Disk, frame: int) -> bytes:
    offset = disk.files.offset_of(frame)
    was_in_memory = is_in_memory(disk.files.reader, offset, BLOCK_BYTES)
    data = disk.read_block(frame)
    if not was_in_memory:
        os.posix_fadvise(disk.files.reader, offset, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    return data


def is_in_memory(descriptor: int, offset: int, length: int) -> bool:
    """Whether these bytes can be sent without waiting for the disk, judged by the first and the last.

    One byte proves its page alone, so both ends are tried: 0.8 us each (prototypes of 2026-11-21).
    """
    try:
        os.preadv(descriptor, _TRIED, offset, os.RWF_NOWAIT)
        os.preadv(descriptor, _TRIED, offset + length - 1, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        # A file system that knows no RWF_NOWAIT has no better way to tell; a fault shows when it is sent.
        return True
    return True
