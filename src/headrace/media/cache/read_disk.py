"""A disk opened by a worker, for lookups, reads and sends only."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.kernel.logs import logger
from headrace.media.cache.disk_files import open_reader
from headrace.media.cache.filler_ipc import OUT, ManifestDisk
from headrace.media.cache.frame_table import Entry, FrameTable, Hit, table_bytes
from headrace.media.cache.layout import Superblock
from headrace.media.cache.linux import identity_of, map_shared
from headrace.media.model import BLOCK_BYTES

log = logger(__name__)


class Frame(NamedTuple):
    """The location of a block, valid until the epoch ends."""

    fd: int
    offset: int
    length: int
    disk: int
    number: int
    generation: int


class ReadDisk:
    """Descriptor and frame table of a disk."""

    def __init__(self, disk: ManifestDisk, position: int) -> None:
        """Raises: OSError, also if the files are not those of the filler."""
        self.source = disk
        self.position = position
        self.id = disk.id
        self.is_copied = disk.is_copied
        self.reader = open_reader(Path(disk.reader_path))
        try:
            _require_same(identity_of(self.reader), disk.reader_identity)
            superblock = Superblock(bytes.fromhex(disk.id), disk.frames)
            memory, identity = map_shared(Path(disk.table_path))
            _require_same(
                f"{identity} {len(memory)}", f"{disk.table_identity} {table_bytes(superblock)}"
            )
        except BaseException:
            os.close(self.reader)
            raise
        self.table = FrameTable(memory, superblock)
        self._reads = 0
        self._is_given_up = False

    def offset_of(self, frame: int) -> int:
        """The offset of a frame's block."""
        return self.source.data_at + frame * BLOCK_BYTES

    def frame(self, hit: Hit) -> Frame:
        """The location of a hit."""
        number, generation, length = hit
        offset = self.source.data_at + number * BLOCK_BYTES
        return tuple.__new__(
            Frame, (self.reader, offset, length, self.position, number, generation)
        )

    def read(self, frame: int, entry: Entry) -> tuple[bytes, bool]:
        """The content of a frame, and whether it matches `entry`. Raises: OSError."""
        data = os.pread(self.reader, BLOCK_BYTES, self.offset_of(frame))
        return data, self.table.is_right(frame, entry, data)

    def is_same(self, disk: ManifestDisk) -> bool:
        """Whether `disk` of a newer manifest has the same files."""
        return _files_of(disk) == _files_of(self.source)

    def hold(self) -> None:
        """Keep the descriptor open while a thread uses it."""
        self._reads += 1

    def release(self) -> None:
        """Release the descriptor after a thread used it."""
        self._reads -= 1
        self._close_if_unused()

    def give_up(self) -> None:
        """Close the disk after the last read: its descriptor number could be reused."""
        self._is_given_up = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_given_up and not self._reads:
            os.close(self.reader)
            self.table.close()


def open_read_disk(
    disk: ManifestDisk, position: int, before: Mapping[int, ReadDisk]
) -> ReadDisk | None:
    """The disk, already open or opened now; None: out of use, or this process cannot open it."""
    if disk.state == OUT:
        return None
    for known in before.values():
        if known.is_same(disk):
            known.position = position
            return known
    try:
        return ReadDisk(disk, position)
    except OSError as error:
        # The filler, which can open it, sends its blocks as bytes.
        log.warning("disk_not_opened_here", disk=disk.id, error=str(error))
        return None


def _files_of(disk: ManifestDisk) -> tuple[object, ...]:
    files = (disk.reader_path, disk.reader_identity, disk.table_path, disk.table_identity)
    return disk.id, disk.frames, disk.data_at, disk.is_copied, *files


def _require_same(found: str, expected: str) -> None:
    if found != expected:
        raise OSError(errno.ESTALE, f"another file ({found}) than the filler's ({expected})")
