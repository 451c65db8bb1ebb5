"""The files of a disk: open them, claim an empty disk, refuse any other content.

`open_files` takes a folder, in which it keeps `blocks` and `index`, or a block device, which holds
both. It never writes to a file or device that has other content or is open in another filler. Space
is allocated at the start, so a full disk is detected then; a file of the right size is used as it
is.

`keeps_sent_bytes` probes each disk at the start. sendfile passes pages of the page cache to the
socket without a copy. Whether punching before writing keeps these pages intact depends on file
system and kernel: a folio that spans two blocks is zeroed in place. So two neighboring blocks are
sent to clients that do not read, both are overwritten, and then the clients read. A disk where they
receive anything else is served by copying. `ReadDisk` is a disk as a worker opens it, for lookups,
reads and sends only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from headrace.kernel.logs import logger
from headrace.media.cache.filler_ipc import DiskState, ManifestDisk
from headrace.media.cache.frame_table import Entry, FrameTable, Hit, table_bytes
from headrace.media.cache.layout import (
    BLANK_BYTES,
    DATA_AT,
    DISK_ID_BYTES,
    HEAD_BYTES,
    PROBE_BLOCKS,
    Superblock,
    data_at_in_device,
    frames_within,
    pack_head,
    pack_superblock,
    read_head,
    read_superblock,
)
from headrace.media.cache.linux import identity_of, map_shared
from headrace.media.errors import DiskRefused, InvalidDiskSize
from headrace.media.model import BLOCK_BYTES, SIZE_SETTING, DiskConfig

_CHUNK_BYTES: Final = 4 * 1024 * 1024
_CANNOT_ALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@dataclass(slots=True)
class DiskFiles:
    """The open files of a disk and the offsets in them."""

    superblock: Superblock
    blocks: int
    """Descriptor for writing; reads use `reader`."""
    index: int
    reader: int
    reader_path: Path
    index_at: int
    data_at: int
    was_clean: bool | None = None
    """Whether the index was closed in order; None: there was no index of this disk."""

    def offset_of(self, frame: int) -> int:
        """The offset of a frame's block in the blocks file."""
        return self.data_at + frame * BLOCK_BYTES

    def require_whole(self) -> None:
        """Check that the blocks file was not truncated or deleted since it was opened.

        Raises: OSError.

        Writing to it again would leave holes where blocks were, and holes are served as zeros.
        """
        found = os.fstat(self.blocks)
        if stat.S_ISREG(found.st_mode) and (
            found.st_size < self.needed_bytes or not found.st_nlink
        ):
            raise OSError(errno.ESTALE, "its file was truncated or deleted by another program")

    @property
    def needed_bytes(self) -> int:
        """The minimum size of the blocks file or device."""
        return self.data_at + (self.superblock.frames + PROBE_BLOCKS) * BLOCK_BYTES

    def read_index(self, into: memoryview) -> None:
        """Read the sets; unreadable parts stay empty, which causes cache misses."""
        for start in range(0, len(into), _CHUNK_BYTES):
            part = into[start : start + _CHUNK_BYTES]
            try:
                os.preadv(self.index, [part], self.index_at + HEAD_BYTES + start)
            except OSError:
                part[:] = bytes(len(part))

    def write_sets(self, offset: int, data: bytes | memoryview) -> None:
        """Write sets at `offset` of the index. Raises: OSError."""
        write_whole(self.index, data, self.index_at + HEAD_BYTES + offset)

    def write_head(self, *, is_clean: bool) -> None:
        """Store durably whether the index is closed in order. Raises: OSError."""
        write_whole(self.index, pack_head(self.superblock, is_clean=is_clean), self.index_at)
        os.fsync(self.index)

    def close(self) -> None:
        """Close all files, which releases the lock."""
        for descriptor in {self.blocks, self.index, self.reader}:
            os.close(descriptor)


def write_whole(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`. Raises: OSError, also if the disk has no room for all of it."""
    if os.pwrite(descriptor, data, offset) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_reader(path: Path) -> int:
    """Open a descriptor to read and send blocks. Raises: OSError."""
    return _open_without_read_ahead(path, os.O_RDONLY)


def open_files(disk: DiskConfig) -> DiskFiles:
    """Open a disk and claim it if it is blank. Raises: DiskRefused, InvalidDiskSize, OSError."""
    frames = frames_within(disk.size_bytes)
    if not frames:
        raise InvalidDiskSize(
            f"disk {disk.path} of {disk.size_bytes} bytes is too small: give it 16MiB or more"
        )
    is_device = disk.path.exists() and stat.S_ISBLK(disk.path.stat().st_mode)
    if is_device:
        # Resolve links such as those in /dev/disk.
        path = index_path = disk.path.resolve()
        index_at, data_at = HEAD_BYTES, data_at_in_device(frames)
    else:
        _make_folder(disk.path)
        path, index_path = disk.path / "blocks", disk.path / "index"
        index_at, data_at = 0, DATA_AT
    made = 0 if is_device else os.O_CREAT
    opened: list[int] = []
    try:
        opened.append(_open_without_read_ahead(path, os.O_RDWR | made))
        _lock(opened[0], disk.path)
        superblock = _superblock_of(opened[0], disk.path, frames)
        _allocate(opened[0], disk.path, data_at + (frames + PROBE_BLOCKS) * BLOCK_BYTES)
        opened.append(
            opened[0] if is_device else _open_without_read_ahead(index_path, os.O_RDWR | made)
        )
        opened.append(open_reader(path))
        blocks, index, reader = opened
        found = DiskFiles(superblock, blocks, index, reader, path, index_at, data_at)
        _ready_index(found, disk.path, is_device=is_device)
        _name(found)
    except BaseException:
        for descriptor in set(opened):
            os.close(descriptor)
        raise
    return found


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise DiskRefused(
            f"disk {path} is neither a folder nor a block device: name one of these"
        ) from error


def _open_without_read_ahead(path: Path, flags: int) -> int:
    """Open a file for random access.

    Read-ahead, also after reading the superblock or the index of a device, would build folios that
    span two blocks. Punching one block would then change what a socket still sends of the other.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _ready_index(found: DiskFiles, path: Path, *, is_device: bool) -> None:
    head = os.pread(found.index, HEAD_BYTES, found.index_at)
    needed = HEAD_BYTES + found.superblock.index_bytes
    is_whole = is_device or os.fstat(found.index).st_size == needed
    if is_whole:
        found.was_clean = read_head(head, found.superblock)
    elif not is_device:
        os.ftruncate(found.index, 0)
        _allocate(found.index, path, needed)


def _name(found: DiskFiles) -> None:
    """Write superblock and index head where they differ. The index is open, so it is not clean."""
    name = pack_superblock(found.superblock)
    if os.pread(found.blocks, len(name), 0) != name:
        write_whole(found.blocks, name, 0)
        os.fsync(found.blocks)
    found.write_head(is_clean=False)


def _superblock_of(descriptor: int, path: Path, frames: int) -> Superblock:
    start = os.pread(descriptor, BLANK_BYTES, 0)
    found = read_superblock(start)
    if found is not None:
        # With another size the same disk has another index.
        return Superblock(found.disk_id, frames)
    if any(start):
        raise DiskRefused(
            f"disk {path} has other content: if it is no longer needed, empty it"
            " (remove the files, or wipefs -a and blkdiscard -z the device) and add the disk again"
        )
    return Superblock(secrets.token_bytes(DISK_ID_BYTES), frames)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DiskRefused(
            f"disk {path} is in use by another node of this machine: use separate disks"
        ) from error


MIB: Final = 2**20


def _allocate(descriptor: int, path: Path, needed_bytes: int) -> None:
    has_bytes = os.lseek(descriptor, 0, os.SEEK_END)
    if stat.S_ISBLK(os.fstat(descriptor).st_mode):
        if has_bytes < needed_bytes:
            raise InvalidDiskSize(
                f"disk {path} has {has_bytes} bytes: set a size of at most that many"
            )
        return
    if has_bytes == needed_bytes:
        return
    system, kept = os.fstatvfs(descriptor), os.fstat(descriptor)
    room_bytes = system.f_bavail * system.f_frsize + kept.st_blocks * 512
    if needed_bytes > room_bytes:
        raise InvalidDiskSize(
            f"disk {path} needs {needed_bytes / MIB:.0f} MiB, and its file system has"
            f" {room_bytes / MIB:.0f} MiB for it: mount the disk that is meant, or set a size that"
            f" fits in {SIZE_SETTING}"
        )
    os.ftruncate(descriptor, needed_bytes)
    try:
        os.posix_fallocate(descriptor, 0, needed_bytes)
    except OSError as error:
        if error.errno in _CANNOT_ALLOCATE:
            return
        os.ftruncate(descriptor, has_bytes)
        raise


def keeps_sent_bytes(files: DiskFiles, write_block: Callable[[int, bytes], None]) -> bool:
    """Whether bytes in sockets survive `write_block(frame, data)`. Writes probe blocks only."""
    first = files.superblock.frames
    try:
        return all(
            _is_kept(files, write_block, first, is_cold=is_cold) for is_cold in (False, True)
        )
    except OSError:
        # Punching or loopback is not available. Copying is correct everywhere.
        return False


def _is_kept(
    files: DiskFiles, write_block: Callable[[int, bytes], None], first: int, *, is_cold: bool
) -> bool:
    blocks = {frame: os.urandom(4096) * (BLOCK_BYTES // 4096) for frame in (first, first + 1)}
    for frame, data in blocks.items():
        write_block(frame, data)
    if is_cold:
        os.fdatasync(files.blocks)
        offset = files.offset_of(first)
        os.posix_fadvise(files.blocks, offset, 2 * BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    sent: list[tuple[socket.socket, bytes]] = []
    try:
        for frame, data in blocks.items():
            client, count = _send_unread(files.reader, files.offset_of(frame))
            sent.append((client, data[:count]))
        for frame in blocks:
            write_block(frame, b"\xaa" * BLOCK_BYTES)
        return all(_receive(client, len(data)) == data for client, data in sent)
    finally:
        for client, _ in sent:
            client.close()


def _send_unread(descriptor: int, offset: int) -> tuple[socket.socket, int]:
    """Send a block, or as much of it as fits, to a client that reads nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=5)
        server, _ = listener.accept()
    with closing(server):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BLOCK_BYTES)
        server.setblocking(False)
        count = 0
        try:
            while count < BLOCK_BYTES:
                moved = os.sendfile(
                    server.fileno(), descriptor, offset + count, BLOCK_BYTES - count
                )
                count += moved
                if not moved:
                    break
        except BlockingIOError:
            pass
    return client, count


def _receive(client: socket.socket, count: int) -> bytes:
    parts = []
    while count and (part := client.recv(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


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
    if disk.state is DiskState.OUT:
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
