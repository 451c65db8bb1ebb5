"""Where a body's bytes come from: a file of the local store, or an object store far away.

A body is asked for bytes only when its socket takes them, so nothing is read faster than it drains.

- `FileBody`: `os.sendfile` out of the page cache. Of each 256 KiB its first byte is probed with
  RWF_NOWAIT (0.8 us); when it is not in memory, a thread reads the block first, since a sendfile of a
  cold block holds up every other client (0.5 ms each, research of 2026-11-21). The open itself stays on
  the loop: it needs only folder entries and inodes, which stay cached, and a thread would cost more.
- `OriginBody`: blocks of 256 KiB by range reads, one being sent and at most one ahead.

A source that ends early, changes or fails while it is sent raises SourceCut: the connection must then be
cut, since a clean end would pass for the whole.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, Protocol

from penstock.engines.blobs import BlobInfo, BlobMissing, Blobs, BlobsDown
from penstock.media.model import (
    BLOCK_BYTES,
    ObjectUnknown,
    Shape,
    SourceCut,
    StoreUnavailable,
    content_address,
)
from penstock.media.ranges import Decision

_FOLDER: Final = os.O_PATH | os.O_DIRECTORY
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NO_OBJECT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
RETRY_AFTER_S: Final = 5.0


class Body(Protocol):
    """Bytes on their way to one client."""

    source: str
    left_bytes: int

    @property
    def is_waiting(self) -> bool:
        """Whether the source, not the client, holds things up."""
        ...

    def send(self, socket_fd: int, bytes_max: int) -> int:
        """Move up to `bytes_max` bytes; 0 while the source is not ready, which wakes the client later.

        Raises: BlockingIOError (the socket is full), SourceCut, OSError (the client is gone).
        """
        ...

    def close(self) -> None: ...


def open_object(folder: Path, key: str) -> tuple[int, Shape]:
    """A descriptor of the regular file that holds `key`, and its shape.

    No symbolic link below `folder` is followed, at any level: whoever can plant one in the store must
    not read other files through it. Size and ETag are those of the very file that was opened, so a
    replacement in between cannot mix two versions. Raises: ObjectUnknown, StoreUnavailable.
    """
    try:
        at = os.open(folder, _FOLDER)
    except OSError as error:
        raise _store_down(error) from error
    try:
        *folders, name = key.split("/")
        for part in folders:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        descriptor = os.open(name, _FILE, dir_fd=at)
    except OSError as error:
        if error.errno in _NO_OBJECT:
            raise _unknown() from error
        raise _store_down(error) from error
    finally:
        os.close(at)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _unknown()
    address = content_address(key)
    # The same etag as `Blobs.info` gives, without a second look at a file that may be another by then.
    etag = address or f"{found.st_ino:x}-{found.st_mtime_ns // 1000:x}-{found.st_size:x}"
    return descriptor, Shape(found.st_size, etag, found.st_mtime_ns // 10**9, address is not None)


async def find_object(blobs: Blobs, key: str, *, timeout_s: float) -> Shape:
    """The shape of an object in a store that is no folder. Raises: ObjectUnknown, StoreUnavailable."""
    try:
        async with asyncio.timeout(timeout_s):
            info = await blobs.info(key)
    except BlobMissing as error:
        raise _unknown() from error
    except (BlobsDown, TimeoutError) as error:
        raise _store_down(error) from error
    return shape_of(info)


def shape_of(info: BlobInfo) -> Shape:
    """The shape of what the store describes."""
    address = content_address(info.key)
    modified_s = int(info.modified_at.timestamp())
    return Shape(info.size_bytes, address or info.etag, modified_s, address is not None)


class FileBody:
    """A span of an open file; owns the descriptor."""

    source = "disk"

    def __init__(
        self, descriptor: int, decision: Decision, *, readers: Executor, wake: Callable[[], None]
    ) -> None:
        self.left_bytes = decision.length_bytes
        self._descriptor = descriptor
        self._offset = decision.start
        self._ready_end = decision.start
        self._readers = readers
        self._wake = wake
        self._reading: asyncio.Future[int] | None = None
        self._is_closed = False

    @property
    def is_waiting(self) -> bool:
        return self._reading is not None

    def send(self, socket_fd: int, bytes_max: int) -> int:
        if self._reading is not None:
            return 0
        if self._offset >= self._ready_end:
            if not is_in_memory(self._descriptor, self._offset):
                self._read_block()
                return 0
            self._ready_end = self._offset + BLOCK_BYTES
        count = min(self.left_bytes, bytes_max, self._ready_end - self._offset)
        try:
            sent = os.sendfile(socket_fd, self._descriptor, self._offset, count)
        except OSError as error:
            if error.errno == errno.EIO:
                raise SourceCut("the disk failed while the object was sent") from error
            raise
        if sent == 0:
            raise SourceCut("the file became shorter while it was sent")
        self._offset += sent
        self.left_bytes -= sent
        return sent

    def close(self) -> None:
        """Give the descriptor back, after the read under way: its number could be another's by then."""
        self._is_closed = True
        if self._reading is None:
            os.close(self._descriptor)

    def _read_block(self) -> None:
        loop = asyncio.get_running_loop()
        count = min(BLOCK_BYTES, self.left_bytes)
        self._reading = loop.run_in_executor(
            self._readers, _read_into_memory, self._descriptor, self._offset, count
        )
        self._reading.add_done_callback(self._on_read)

    def _on_read(self, reading: asyncio.Future[int]) -> None:
        self._reading = None
        # Whatever came of the read, sendfile goes next and meets the same fault itself, if there is one.
        self._ready_end = self._offset + BLOCK_BYTES
        if not reading.cancelled():
            reading.exception()
        if self._is_closed:
            os.close(self._descriptor)
        else:
            self._wake()


class OriginBody:
    """A span of an object in a store that is no folder; at most two blocks are held."""

    source = "origin"

    def __init__(
        self,
        blobs: Blobs,
        key: str,
        shape: Shape,
        decision: Decision,
        *,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        self.left_bytes = decision.length_bytes
        self._blobs, self._key, self._shape = blobs, key, shape
        self._timeout_s = timeout_s
        self._wake = wake
        self._offset = decision.start
        self._end = decision.start + decision.length_bytes
        self._blocks: deque[memoryview] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._fault: SourceCut | None = None

    @property
    def is_waiting(self) -> bool:
        return not self._blocks

    async def start(self) -> None:
        """Read the first block, so that a store that is down is answered 503. Raises: StoreUnavailable."""
        try:
            await self._read_block()
        except SourceCut as error:
            raise _store_down(error) from error

    def send(self, socket_fd: int, bytes_max: int) -> int:
        self._read_ahead()
        if not self._blocks:
            if self._fault is not None:
                raise self._fault
            return 0
        block = self._blocks[0]
        sent = os.write(socket_fd, block[:bytes_max])
        self.left_bytes -= sent
        if sent == len(block):
            self._blocks.popleft()
        else:
            self._blocks[0] = block[sent:]
        return sent

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._blocks.clear()

    def _read_ahead(self) -> None:
        idle = self._reading is None and self._fault is None
        if idle and self._offset < self._end and len(self._blocks) < 2:
            self._reading = asyncio.get_running_loop().create_task(self._read_one())

    async def _read_one(self) -> None:
        try:
            await self._read_block()
        except SourceCut as error:
            self._fault = error
        self._reading = None
        self._wake()

    async def _read_block(self) -> None:
        count = min(BLOCK_BYTES, self._end - self._offset)
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await self._blobs.read_range(self._key, self._offset, count)
                if not self._shape.is_immutable:
                    # Seen unchanged after the read, as it was before: the block is of that version.
                    await self._require_same_version()
        except (BlobMissing, BlobsDown, TimeoutError) as error:
            raise SourceCut("the object store failed while the object was sent") from error
        if len(data) != count:
            raise SourceCut("the object store gave fewer bytes than the object has")
        self._offset += count
        self._blocks.append(memoryview(data))

    async def _require_same_version(self) -> None:
        if shape_of(await self._blobs.info(self._key)) != self._shape:
            raise SourceCut("the object was replaced while it was sent")


def is_in_memory(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` can be sent without waiting for the disk."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        # A filesystem that knows no RWF_NOWAIT (EOPNOTSUPP) has no better way to tell.
        return True
    return True


def _read_into_memory(descriptor: int, offset: int, count: int) -> int:
    return len(os.pread(descriptor, count, offset))


def _unknown() -> ObjectUnknown:
    return ObjectUnknown("no object of this key is stored")


def _store_down(error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(
        f"the object store failed ({type(error).__name__}): try again later",
        retry_after_s=RETRY_AFTER_S,
    )
