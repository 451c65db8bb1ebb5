"""Where the bytes of objects come from: what a source is, and the two that ask the object store itself.

A source is asked for blocks of 256 KiB, and only for what its client's socket takes next. Two answers are
immediate and cost no task: `shape_now`, and the frames of our own disks. So a hot range is sent in the turn that
read its request; everything else is awaited.

- `open_object`: a regular file of a local folder, for a node without disks; it is sent as it is.
- `StoreSource`: the blocks that this node's disks keep, filled from the object store.
- `OriginSource`: range reads of an object store that is no folder, for a node without disks.
- The cluster has one more of the same shape: the node that keeps the object.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from headrace.engines.blobs import BlobInfo, BlobMissing, Blobs, BlobsDown, file_etag
from headrace.kernel.errors import HeadraceError
from headrace.media.errors import ObjectUnknown, SourceCut, StoreUnavailable
from headrace.media.model import BLOCK_BYTES, Shape, content_address

if TYPE_CHECKING:
    from headrace.media.cache import BlockCache

_FOLDER: Final = os.O_PATH | os.O_DIRECTORY
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NO_OBJECT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
RETRY_AFTER_S: Final = 5.0


class Span(NamedTuple):
    """Bytes of one block: from `start` up to `end`, counted from the block's own first byte."""

    start: int
    end: int


class PartialBlock:
    """Bytes on their way, filled from their start: what is here may be sent on while the rest comes."""

    __slots__ = ("_calls", "fault", "filled_bytes", "length_bytes", "on_end", "view")

    def __init__(self, data: bytes | bytearray, filled_bytes: int = 0) -> None:
        """`data` is filled in place, from `filled_bytes` on."""
        self.view = memoryview(data)
        self.length_bytes = len(data)
        self.filled_bytes = filled_bytes
        self.fault: HeadraceError | None = None
        """Why nothing more will come."""
        self.on_end: Callable[[HeadraceError | None], None] | None = None
        """Told once: None when all is here; else why its source failed, and then it is to see to the rest."""
        self._calls: list[Callable[[], None]] = []

    @classmethod
    def of(cls, data: bytes) -> PartialBlock:
        """Bytes that are all here."""
        return cls(data, len(data))

    @property
    def is_over(self) -> bool:
        """Whether all is here, or nothing more will come."""
        return self.filled_bytes == self.length_bytes or self.fault is not None

    def part(self, start: int) -> memoryview:
        """What is here from `start` on; nothing: it is yet to come. Raises: SourceCut."""
        if start == self.filled_bytes and self.fault is not None:
            raise SourceCut("the object's source failed while it was sent") from self.fault
        return self.view[start : self.filled_bytes]

    def call_at_more(self, call: Callable[[], None]) -> None:
        """Call once, when more is here or nothing will be."""
        self._calls.append(call)

    def grow(self, count: int) -> None:
        """So many bytes more are here."""
        self.filled_bytes += count
        if self.on_end is not None and self.filled_bytes == self.length_bytes:
            on_end, self.on_end = self.on_end, None
            on_end(None)
        self._tell()

    def fill(self, data: bytes | bytearray) -> None:
        """All that was missing."""
        self.view[self.filled_bytes :] = data
        self.grow(len(data))

    def fail(self, fault: HeadraceError) -> None:
        """Nothing more will come of this source."""
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end(fault)
            return
        self.fault = fault
        self._tell()

    async def whole(self) -> bytes:
        """All of it. Raises: the fault."""
        while not self.is_over:
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call_at_more(partial(_end_wait, more))
            await more
        if self.fault is not None:
            raise self.fault
        return self.view.obj if isinstance(self.view.obj, bytes) else bytes(self.view)

    def _tell(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()


class Source(Protocol):
    """Gives shapes and bytes of objects; one a worker, shared by its clients."""

    @property
    def name(self) -> str:
        """`own`, `peer` or `origin`: told in Cache-Status and counted."""
        ...

    def shape_now(self, key: str) -> Shape | None:
        """The shape, where it is known without waiting."""
        ...

    async def shape(self, key: str) -> Shape:
        """The shape. Raises: ObjectUnknown, StoreUnavailable."""
        ...

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """The bytes of `span` of a block. (Bodies look for frames of our own disks first.)

        Raises: StoreUnavailable, SourceCut (the object is another version by now), ObjectUnknown.
        """
        ...

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """The same, as soon as some of it can be sent on. Raises: as `block`."""
        ...


def open_object(folder: Path, key: str) -> tuple[int, Shape]:
    """A descriptor of the regular file that holds `key`, and its shape.

    No symbolic link below `folder` is followed, at any level: whoever can plant one in the store must
    not read other files through it. Size and ETag are those of the very file that was opened, so a
    replacement in between cannot mix two versions. Raises: ObjectUnknown, StoreUnavailable.
    """
    try:
        at = os.open(folder, _FOLDER)
    except OSError as error:
        raise store_down(error) from error
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
        raise store_down(error) from error
    finally:
        os.close(at)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _unknown()
    address = content_address(key)
    # The same etag as `Blobs.info` gives, without a second look at a file that may be another by then.
    etag = address or file_etag(found.st_mtime_ns // 1000, found.st_size)
    return descriptor, Shape(found.st_size, etag, found.st_mtime_ns // 10**9, address is not None)


async def find_object(blobs: Blobs, key: str, *, timeout_s: float) -> Shape:
    """The shape of an object as the store tells it. Raises: ObjectUnknown, StoreUnavailable."""
    try:
        async with asyncio.timeout(timeout_s):
            info = await blobs.info(key)
    except BlobMissing as error:
        raise _unknown() from error
    except (BlobsDown, TimeoutError) as error:
        raise store_down(error) from error
    return shape_of(info)


def shape_of(info: BlobInfo) -> Shape:
    """The shape of what the store describes."""
    address = content_address(info.key)
    modified_s = int(info.modified_at.timestamp())
    return Shape(info.size_bytes, address or info.etag, modified_s, address is not None)


class CacheSource:
    """The disks of this node, filled from the object store."""

    name: ClassVar[str] = "own"

    def __init__(self, store: BlockCache) -> None:
        self.store = store
        self.epoch = 0
        """Which turn it is: a frame that was found is good while this stands still."""

    def enter_epoch(self) -> None:
        """Frames are looked at and sent until `leave_turn`."""
        self.epoch += 1
        self.store.enter_epoch()

    def leave_epoch(self) -> None:
        """No frame of this turn is used any more."""
        self.epoch += 1
        self.store.leave_epoch()

    def shape_now(self, key: str) -> Shape | None:
        """See `Source`."""
        return self.store.known_shape(key)

    async def shape(self, key: str) -> Shape:
        """See `Source`."""
        return await self.store.shape(key)

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """See `Source`."""
        found = await self.store.block(self.store.key(key, shape, number), is_copy=True)
        assert isinstance(found, bytes), "a copy was asked for"
        return found[span.start : span.end]

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """See `Source`."""
        return PartialBlock.of(await self.block(key, shape, number, span))


class OriginSource:
    """The object store itself, nothing kept. Each read is seen to be of one version before and after."""

    name: ClassVar[str] = "origin"

    def __init__(self, blobs: Blobs, *, timeout_s: float) -> None:
        self._blobs = blobs
        self._timeout_s = timeout_s

    def shape_now(self, key: str) -> Shape | None:  # noqa: ARG002 - nothing is kept
        """See `Source`."""
        return None

    async def shape(self, key: str) -> Shape:
        """See `Source`."""
        return await find_object(self._blobs, key, timeout_s=self._timeout_s)

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """See `Source`."""
        count = span.end - span.start
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await self._blobs.read_range(key, number * BLOCK_BYTES + span.start, count)
                # Seen unchanged after the read, as it was before: the bytes are of that version.
                if not shape.is_immutable and shape_of(await self._blobs.info(key)) != shape:
                    raise SourceCut("the object was replaced while it was sent")
        except BlobMissing as error:
            raise SourceCut("the object was removed while it was sent") from error
        except (BlobsDown, TimeoutError) as error:
            raise store_down(error) from error
        if len(data) != count:
            raise SourceCut("the object store gave fewer bytes than the object has")
        return data

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """See `Source`. The store's client gives bytes only when all are here."""
        return PartialBlock.of(await self.block(key, shape, number, span))


def _end_wait(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)


def _unknown() -> ObjectUnknown:
    return ObjectUnknown("no object of this key is stored")


def store_down(error: BaseException) -> StoreUnavailable:
    """The object store failed by `error`."""
    return StoreUnavailable(
        f"the object store failed ({type(error).__name__}): try again later",
        retry_after_s=RETRY_AFTER_S,
    )
