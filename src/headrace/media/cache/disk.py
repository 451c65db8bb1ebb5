"""One disk as the filler has it: its table, its files, which frames are being filled, and how it is.

A disk writes in a thread of its own, so that a slow one holds up neither the others nor the answers. Sets that
changed are written to the index some times a second; what a crash takes with it costs misses.

    IN_USE    blocks are placed and served
    DRAINING  blocks are served, none is placed: a person's wish, or no room on a disk that is not ours alone
    OUT       nothing is served: it failed, it rots, or it was retired


[store/scrub.py] Blocks compared with their sums: on request, and all of them in the background at a bounded rate.

Workers compare each block that they read from a disk. The scrub compares the blocks that no client requests, so that a rotting
disk is found before a client waits for its blocks. It reads in the disk's own thread, between writes, and drops from memory
what was not in memory before. A block that is in memory is compared there: its disk is read when the kernel drops it.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from headrace.kernel.crash import crash_point
from headrace.media.cache.disk_files import DiskFiles, keeps_sent_bytes, open_files, write_whole
from headrace.media.cache.frame_table import PROVED, UNPROVED, Table, choose, table_bytes
from headrace.media.cache.layout import SET_BYTES, WAYS
from headrace.media.cache.linux import (
    has_shared,
    identity_of,
    is_in_memory,
    open_shared,
    punch_hole,
)
from headrace.media.cache.metrics import SUMS
from headrace.media.model import BLOCK_BYTES, DiskConfig

WRITES_WAITING_MAX: Final = 64
"""Fills that a disk may be behind with; more pass through, or a slow disk would fill the memory."""
HUNG_S: Final = 30.0
ROTTEN_MAX: Final = 10
ROTTEN_WITHIN_S: Final = 86_400.0
"""A disk with so many rotten blocks in this time is retired. A sound disk has none in years (its own code finds a bad sector and
gives EIO); of disks that gave wrong bytes once, most do again. ZFS faults a disk at 10 wrong sums in 10 minutes; a day,
since the background check of a large disk reads a block every 36 hours."""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
T = TypeVar("T")


class DiskState(enum.Enum):
    """What a disk is used for; the words are those that people see."""

    IN_USE = "in use"
    DRAINING = "draining"
    OUT = "out"


class Disk:
    """A disk that is open."""

    def __init__(
        self, config: DiskConfig, files: DiskFiles, table: Table, table_path: Path
    ) -> None:
        self.config = config
        self.files = files
        self.table = table
        self.table_path = table_path
        self.table_identity = identity_of(table_path)
        self.reader_identity = identity_of(files.reader)
        self.state = DiskState.IN_USE
        self.fault = ""
        self.is_copied = False
        self.busy: set[int] = set()
        """Frames that are being filled."""
        self.writes_waiting = 0
        self.rotten = 0
        """Blocks that changed on the disk after they were proved, since it was opened."""
        self._rotten_s: deque[float] = deque(maxlen=ROTTEN_MAX)
        self._moved_s = 0.0
        self._hands = array("I", bytes(4 * table.sets))
        self._changed_sets: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-disk")

    @property
    def id(self) -> str:
        return self.files.superblock.disk_id.hex()

    @property
    def frames(self) -> int:
        return self.files.superblock.frames

    @property
    def takes_blocks(self) -> bool:
        return self.state is DiskState.IN_USE and self.writes_waiting < WRITES_WAITING_MAX

    @property
    def is_changed(self) -> bool:
        """Whether the index on the disk is behind."""
        return bool(self._changed_sets)

    @property
    def is_hung(self) -> bool:
        """Whether what waits for it has waited without end."""
        return self.writes_waiting > 0 and time.monotonic() - self._moved_s > HUNG_S

    def choose_frame(self, number: int) -> int | None:
        """A frame of that set to fill: an empty one, or the one that SIEVE gives up; None: all are being filled."""
        first = number * WAYS
        busy = {frame - first for frame in self.busy if first <= frame < first + WAYS}
        generations = self.table.generations(number)
        for way, generation in enumerate(generations):
            if not generation and way not in busy:
                return first + way
        marks = self.table.visited[first : first + WAYS]
        choice = choose(generations, marks, hand=self._hands[number], busy=busy)
        if choice is None:
            return None
        for way in choice.unmarked:
            # Only the filler takes marks off, so there is one; a visit meanwhile may be lost.
            marks[way] -= 1
        self._hands[number] = choice.hand
        return first + choice.way

    def next_generation(self, frame: int) -> int:
        """What tells a frame's next block from all before it: one more than the highest of its set."""
        return 1 + max(self.table.generations(frame // WAYS))

    @property
    def is_rotting(self) -> bool:
        """Whether too many blocks of it rotted lately."""
        full = len(self._rotten_s) == ROTTEN_MAX
        return full and time.monotonic() - self._rotten_s[0] <= ROTTEN_WITHIN_S

    def hide_wrong(self, frame: int) -> None:
        """Hide a frame whose block failed its sum; it is rot if the block was right since the start."""
        if self.table.verified[frame] != UNPROVED:
            self.rotten += 1
            self._rotten_s.append(time.monotonic())
        self.table.hide(frame)
        self.note_changed(frame)

    def note_changed(self, frame: int) -> None:
        """The set of that frame is to be written to the index."""
        self._changed_sets.add(frame // WAYS)

    def write_block(self, frame: int, data: bytes) -> None:
        """Put a block into a frame that nobody can have. Raises: OSError."""
        self.files.require_whole()
        offset = self.files.offset_of(frame)
        crash_point("media.fill.waited")
        if not self.is_copied:
            punch_hole(self.files.blocks, offset, BLOCK_BYTES)
        crash_point("media.fill.punched")
        # Always one whole block, so that the page cache never joins it with a neighbour.
        whole = data if len(data) == BLOCK_BYTES else data.ljust(BLOCK_BYTES, b"\0")
        write_whole(self.files.blocks, whole, offset)
        crash_point("media.fill.written")

    def read_block(self, frame: int) -> bytes:
        """What is in a frame now. Raises: OSError."""
        return os.pread(self.files.reader, BLOCK_BYTES, self.files.offset_of(frame))

    def write_index(self) -> None:
        """Write the sets that changed since the last time. Raises: OSError."""
        changed, self._changed_sets = self._changed_sets, set()
        for number in sorted(changed):
            self.files.write_sets(number * SET_BYTES, self.table.set_bytes(number))

    async def call(self, work: Callable[..., T], *arguments: object) -> T:
        """Run blocking work in the disk's own thread, after what waits there."""
        loop = asyncio.get_running_loop()
        if not self.writes_waiting:
            self._moved_s = time.monotonic()
        self.writes_waiting += 1
        try:
            return await loop.run_in_executor(self._thread, work, *arguments)
        finally:
            self.writes_waiting -= 1
            self._moved_s = time.monotonic()

    def close_clean(self) -> None:
        """Leave blocks and index whole on the disk. Raises: OSError."""
        os.fdatasync(self.files.blocks)
        self.files.write_sets(0, self.table.index)
        os.fsync(self.files.index)
        self.files.write_head(is_clean=True)

    def close(self) -> None:
        """Close without a word; the thread ends after what it does."""
        self._thread.shutdown(wait=True)
        self.table.close()
        self.files.close()


def open_disk(config: DiskConfig, run: Path, *, is_same_boot: bool) -> Disk:
    """Open a disk with its table in shared memory. Raises: DiskRefused, DiskTooSmall, OSError.

    `is_same_boot`: workers of this very node go on with the table as it is, so it is newer than the index on the disk, and
    what was proved stays proved. Otherwise the table is read off the disk, and nothing is proved. 0.35 s for a table of
    4,194,304 frames, that is 1 TiB (2 cores beside other load, 2026-11-21).
    """
    files = open_files(config)
    try:
        superblock = files.superblock
        name, size_bytes = f"{superblock.disk_id.hex()}.table", table_bytes(superblock)
        is_kept = is_same_boot and has_shared(run, name, size_bytes)
        path, memory = open_shared(run, name, size_bytes)
        table = Table(memory, superblock)
        if not is_kept:
            table.hide_all()
            if files.was_clean is not None:
                files.read_index(table.index)
        disk = Disk(config, files, table, path)
        disk.is_copied = not keeps_sent_bytes(files, disk.write_block)
    except BaseException:
        files.close()
        raise
    return disk


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
