"""One disk as the filler has it: its table, its files, which frames are being filled, and how it is.

A disk writes in a thread of its own, so that a slow one holds up neither the others nor the answers. Sets that
changed are written to the index some times a second; what a crash takes with it costs misses.

    IN_USE    blocks are placed and served
    DRAINING  blocks are served, none is placed: a person's wish, or no room on a disk that is not ours alone
    OUT       nothing is served: it failed, it rots, or it was retired
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from headrace.kernel.resilience import crash_point
from headrace.media.model import BLOCK_BYTES, DiskConfig
from headrace.media.store.files import DiskFiles, open_files, write_whole
from headrace.media.store.kernel_calls import punch_hole
from headrace.media.store.layout import SET_BYTES, WAYS
from headrace.media.store.probe import keeps_sent_bytes
from headrace.media.store.shared import has_shared, identity_of, open_shared
from headrace.media.store.sieve import choose
from headrace.media.store.table import UNPROVED, Table, table_bytes

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
