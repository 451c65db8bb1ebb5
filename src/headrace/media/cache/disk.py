"""One disk of the filler: its frame table, its files, the fills in progress, and its checks.

Each disk writes in a thread of its own, so a slow disk delays neither the other disks nor the
replies. Changed sets are written to the index several times per second; a crash loses the newest
ones, which causes cache misses.

    IN_USE    blocks are placed and served
    DRAINING  blocks are served but not placed: set by an operator, or the disk has no room
    OUT       nothing is served: the disk failed, corrupts blocks, or was retired

Blocks are compared with their checksums on request and in the background, at a bounded rate.
Workers verify each block that they read from a disk. The background check (scrub) covers the blocks
that no client requests, so a failing disk is found early. It reads in the disk's own thread and
drops pages that were not in memory before.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import math
import os
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from headrace.kernel.resilience import crash_point
from headrace.media.cache.disk_files import DiskFiles, keeps_sent_bytes, open_files, write_whole
from headrace.media.cache.filler_ipc import DiskState
from headrace.media.cache.frame_table import UNVERIFIED, VERIFIED, FrameTable, choose, table_bytes
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
"""Fills that may wait for one disk. Further blocks are passed through without being stored."""
HUNG_S: Final = 30.0
ROTTEN_MAX: Final = 10
ROTTEN_WITHIN_S: Final = 86_400.0
"""A disk with this many corrupt blocks in this time is retired.

A healthy disk has none in years: its own error correction reports a bad sector as EIO. The window
is a day because the scrub of a large disk visits a block every 36 hours.
"""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
T = TypeVar("T")
SCRUB_BYTES_PER_S: Final = 8 * 1024 * 1024
"""Scrub rate of a disk: 1 TiB in 36 hours, about 2 % of a core."""
ROUND_S: Final = 3600.0
"""Minimum time between two scrubs of a small disk."""
_IDLE_S: Final = 0.1
_EMPTY_AT_ONCE: Final = 512


class Disk:
    """An open disk."""

    def __init__(
        self, config: DiskConfig, files: DiskFiles, table: FrameTable, table_path: Path
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
        """Blocks that changed on the disk after they were verified, since the disk was opened."""
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
        """Whether the index on the disk is out of date."""
        return bool(self._changed_sets)

    @property
    def is_hung(self) -> bool:
        """Whether a queued operation makes no progress."""
        return self.writes_waiting > 0 and time.monotonic() - self._moved_s > HUNG_S

    def choose_frame(self, number: int) -> int | None:
        """A frame of this set to fill: an empty one or the SIEVE victim; None: all are being
        filled.
        """
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
            # Only the filler removes marks, so there is one to remove. A concurrent visit may be
            # lost.
            marks[way] -= 1
        self._hands[number] = choice.hand
        return first + choice.way

    def next_generation(self, frame: int) -> int:
        """The generation of the frame's next block: one more than the highest of its set."""
        return 1 + max(self.table.generations(frame // WAYS))

    @property
    def is_rotting(self) -> bool:
        """Whether too many blocks became corrupt recently."""
        full = len(self._rotten_s) == ROTTEN_MAX
        return full and time.monotonic() - self._rotten_s[0] <= ROTTEN_WITHIN_S

    def hide_wrong(self, frame: int) -> None:
        """Hide a frame with a wrong checksum.

        It counts as corrupt if the block was verified before.
        """
        if self.table.verified[frame] != UNVERIFIED:
            self.rotten += 1
            self._rotten_s.append(time.monotonic())
        self.table.hide(frame)
        self.note_changed(frame)

    def note_changed(self, frame: int) -> None:
        """Mark the set of this frame to be written to the index."""
        self._changed_sets.add(frame // WAYS)

    def write_block(self, frame: int, data: bytes) -> None:
        """Write a block into a frame that no process uses. Raises: OSError."""
        self.files.require_whole()
        offset = self.files.offset_of(frame)
        crash_point("media.fill.waited")
        if not self.is_copied:
            punch_hole(self.files.blocks, offset, BLOCK_BYTES)
        crash_point("media.fill.punched")
        # Always one whole block, so that the page cache never joins it with a neighbor.
        whole = data if len(data) == BLOCK_BYTES else data.ljust(BLOCK_BYTES, b"\0")
        write_whole(self.files.blocks, whole, offset)
        crash_point("media.fill.written")

    def read_block(self, frame: int, is_cold: bool) -> bytes:  # noqa: FBT001 - called by a pool
        """The content of a frame, of which a cold one leaves memory again. Raises: OSError."""
        reader, offset = self.files.reader, self.files.offset_of(frame)
        data = os.pread(reader, BLOCK_BYTES, offset)
        if is_cold:
            os.posix_fadvise(reader, offset, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
        return data

    def write_index(self) -> None:
        """Write the sets that changed since the last call. Raises: OSError."""
        changed, self._changed_sets = self._changed_sets, set()
        for number in sorted(changed):
            self.files.write_sets(number * SET_BYTES, self.table.set_bytes(number))

    async def call(self, work: Callable[..., T], *arguments: object) -> T:
        """Run blocking work in the disk's thread, after the work queued before it."""
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
        """Write blocks and index durably and mark the index as clean. Raises: OSError."""
        os.fdatasync(self.files.blocks)
        self.files.write_sets(0, self.table.index)
        os.fsync(self.files.index)
        self.files.write_head(is_clean=True)

    def close(self) -> None:
        """Close the files without marking the index as clean. Waits for the running operation."""
        self._thread.shutdown(wait=True)
        self.table.close()
        self.files.close()


def open_disk(config: DiskConfig, run: Path, *, is_same_boot: bool) -> Disk:
    """Open a disk with its table in shared memory. Raises: DiskRefused, InvalidDiskSize, OSError.

    With `is_same_boot` the workers of this node still use the table, so it is newer than the index
    on the disk and verified marks stay. Otherwise the table is read from the disk and no block
    counts as verified.
    """
    files = open_files(config)
    try:
        superblock = files.superblock
        name, size_bytes = f"{superblock.disk_id.hex()}.table", table_bytes(superblock)
        is_kept = is_same_boot and has_shared(run, name, size_bytes)
        path, memory = open_shared(run, name, size_bytes)
        table = FrameTable(memory, superblock)
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


class Verdict(enum.Enum):
    """The result of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    EMPTY = "empty"
    CHANGED = "changed"


class CheckResult(NamedTuple):
    """The content of a frame, if it was read."""

    verdict: Verdict
    generation: int = 0
    data: bytes = b""


@dataclass(slots=True)
class CheckCounts:
    """The results of several checks."""

    blocks: int = 0
    right: int = 0
    wrong: int = 0
    unread: int = 0


async def check_frame(disk: Disk, frame: int) -> CheckResult:
    """Compare a frame's block with its checksum;

    hide the frame or mark it as verified. Raises: OSError.
    """
    table = disk.table
    entry = table.entry(frame)
    if not entry.tag or frame in disk.busy:
        return CheckResult(Verdict.EMPTY)
    is_cold = not is_in_memory(disk.files.reader, disk.files.offset_of(frame), BLOCK_BYTES)
    if is_cold:
        # Before the read, because workers find the pages in memory before they are verified.
        table.note_cold(frame)
    data = await disk.call(disk.read_block, frame, is_cold)
    if disk.state is DiskState.OUT or frame in disk.busy or table.entry(frame) != entry:
        return CheckResult(Verdict.CHANGED)
    is_right = table.is_right(frame, entry, data)
    SUMS["scrub", is_right].inc()
    if not is_right:
        disk.hide_wrong(frame)
        return CheckResult(Verdict.WRONG)
    table.verified[frame] = VERIFIED
    return CheckResult(Verdict.RIGHT, entry.generation, data[: entry.length])


async def check_frames(
    disk: Disk, frames: Iterable[int], counts: CheckCounts, *, bytes_per_s: float = math.inf
) -> None:
    """Check frames in turn, at most at this rate, until the disk is out of use. Count the results.

    Raises: OSError at the first unreadable frame.
    """
    began_s, checked_bytes, empty = time.monotonic(), 0, 0
    idle_s = 0.0 if bytes_per_s == math.inf else _IDLE_S
    for frame in frames:
        if disk.state is DiskState.OUT:
            return
        try:
            verdict = (await check_frame(disk, frame)).verdict
        except OSError:
            counts.unread += 1
            raise
        if verdict is Verdict.EMPTY:
            empty += 1
            if empty % _EMPTY_AT_ONCE == 0:
                await asyncio.sleep(idle_s)
            continue
        counts.blocks += verdict is not Verdict.CHANGED
        counts.right += verdict is Verdict.RIGHT
        counts.wrong += verdict is Verdict.WRONG
        checked_bytes += BLOCK_BYTES
        due_s = began_s + checked_bytes / bytes_per_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def scrub(disk: Disk, *, bytes_per_s: float = SCRUB_BYTES_PER_S) -> None:
    """Check all blocks of the disk, round after round, until it is out of use. Raises: OSError."""
    start = random.randrange(disk.frames)
    while True:
        began_s = time.monotonic()
        frames = chain(range(start, disk.frames), range(start))
        await check_frames(disk, frames, CheckCounts(), bytes_per_s=bytes_per_s)
        if disk.state is DiskState.OUT:
            return
        await asyncio.sleep(max(0.0, began_s + ROUND_S - time.monotonic()))
