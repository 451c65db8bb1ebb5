"""Sources of objects: the protocol, and the sources that read the object store.

A source is read in blocks of 256 KiB, and only for what its client's socket takes next. `shape_now`
and the frames of the node's own disks are immediate and need no task, so a hot range is sent in the
epoch in which its request was read. Everything else is awaited.

- `open_object`: a regular file of a local folder, for a node without disks. It is sent as it is.
- `CacheSource`: the blocks on this node's disks, filled from the object store.
- `OriginSource`: range reads of a remote object store, for a node without disks.
- `cluster.routing.PeerSource`: the node that keeps the object.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from headrace.engines.blobs import (
    BlobChanged,
    BlobInfo,
    BlobMissing,
    BlobsDown,
    InvalidBlobKey,
)
from headrace.engines.stored_files import file_etag
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
    """Bytes of one block from `start` up to `end`, relative to the block."""

    start: int
    end: int


class PartialBlock:
    """A block being received in order; the received part can be sent on."""

    __slots__ = ("_calls", "fault", "filled_bytes", "length_bytes", "on_end", "view")

    def __init__(self, data: bytes | bytearray, filled_bytes: int = 0) -> None:
        """`data` is filled in place, from `filled_bytes` on."""
        self.view = memoryview(data)
        self.length_bytes = len(data)
        self.filled_bytes = filled_bytes
        self.fault: HeadraceError | None = None
        """The error that ended the block."""
        self.on_end: Callable[[HeadraceError | None], None] | None = None
        """Called once: with None when complete, or with the error, and must then provide the rest.
        """
        self._calls: list[Callable[[], None]] = []

    @classmethod
    def of(cls, data: bytes) -> PartialBlock:
        """A complete block."""
        return cls(data, len(data))

    @property
    def is_over(self) -> bool:
        """Whether the block is complete or failed."""
        return self.filled_bytes == self.length_bytes or self.fault is not None

    def part(self, start: int) -> memoryview:
        """The received bytes from `start` on; empty: none yet. Raises: SourceCut."""
        if start == self.filled_bytes and self.fault is not None:
            raise SourceCut("the source of the object failed while it was sent") from self.fault
        return self.view[start : self.filled_bytes]

    def call_at_more(self, call: Callable[[], None]) -> None:
        """Call `call` once, when more bytes are received or the block failed."""
        self._calls.append(call)

    def grow(self, count: int) -> None:
        """Record `count` more received bytes."""
        self.filled_bytes += count
        if self.on_end is not None and self.filled_bytes == self.length_bytes:
            on_end, self.on_end = self.on_end, None
            on_end(None)
        self._notify()

    def fill(self, data: bytes | bytearray) -> None:
        """Add all missing bytes."""
        self.view[self.filled_bytes :] = data
        self.grow(len(data))

    def fail(self, fault: HeadraceError) -> None:
        """End the block with an error."""
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end(fault)
            return
        self.fault = fault
        self._notify()

    async def whole(self) -> bytes:
        """The complete bytes. Raises: the fault."""
        while not self.is_over:
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call_at_more(partial(_end_wait, more))
            await more
        if self.fault is not None:
            raise self.fault
        return self.view.obj if isinstance(self.view.obj, bytes) else bytes(self.view)

    def _notify(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()


class UpstreamDown(BlobsDown):
    """No node of the cluster in `media.upstream` answers."""

    code = "media.upstream_down"


class ObjectReader(Protocol):
    """Where blocks come from: the object store, or another cluster (`cluster.upstream`)."""

    async def info(self, key: str) -> BlobInfo:
        """Size, ETag and time. Raises: BlobMissing, BlobsDown."""
        ...

    async def read_part(
        self, key: str, start: int, length_bytes: int, *, etag: str = ""
    ) -> tuple[BlobInfo, bytes]:
        """`length_bytes` bytes from `start`, with the metadata of the same version.

        `etag` is the expected version. Raises: BlobMissing, BlobChanged, BlobsDown.
        """
        ...


class Source(Protocol):
    """Gives shapes and bytes of objects; one for each worker, shared by its clients."""

    @property
    def name(self) -> str:
        """`own`, `peer` or `origin`: used in Cache-Status and metrics."""
        ...

    def shape_now(self, key: str) -> Shape | None:
        """The shape if it is available without waiting."""
        ...

    async def shape(self, key: str) -> Shape:
        """The shape. Raises: ObjectUnknown, StoreUnavailable."""
        ...

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """The bytes of `span` of a block. (Bodies look up frames of the node's own disks first.)

        Raises: StoreUnavailable, SourceCut (the object was replaced), ObjectUnknown.
        """
        ...

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """The bytes of `span`, returned once some of them can be sent. Raises: as `block`."""
        ...


def open_object(folder: Path, key: str) -> tuple[int, Shape]:
    """Open the regular file that holds `key`. Return its descriptor and shape.

    No symbolic link below `folder` is followed, so a planted link cannot expose other files. Size
    and ETag are those of the opened file, so a concurrent replacement cannot mix two versions.
    Raises: ObjectUnknown, StoreUnavailable.
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
            raise object_unknown() from error
        raise store_down(error) from error
    finally:
        os.close(at)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise object_unknown()
    address = content_address(key)
    # The ETag that `Blobs.info` returns, without a second look at a file that may be replaced.
    etag = address or file_etag(found.st_mtime_ns // 1000, found.st_size)
    return descriptor, Shape(found.st_size, etag, found.st_mtime_ns // 10**9, address is not None)


def shape_of(info: BlobInfo) -> Shape:
    """The shape of a described object."""
    address = content_address(info.key)
    modified_s = int(info.modified_at.timestamp())
    return Shape(info.size_bytes, address or info.etag, modified_s, address is not None)


class CacheSource:
    """The disks of this node, filled from the object store."""

    name: ClassVar[str] = "own"

    def __init__(self, store: BlockCache) -> None:
        self.store = store
        self.epoch = 0
        """The number of the current epoch. A frame is valid while this is unchanged."""

    def enter_epoch(self) -> None:
        """Begin an epoch, in which frames may be looked up and sent."""
        self.epoch += 1
        self.store.enter_epoch()

    def leave_epoch(self) -> None:
        """End the epoch. No frame of it may be used after it."""
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
        assert isinstance(found, bytes), "a copy was requested"
        return found[span.start : span.end]

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """See `Source`."""
        return PartialBlock.of(await self.block(key, shape, number, span))


class OriginSource:
    """The object store itself, without a cache. Each read is checked to be of one version."""

    name: ClassVar[str] = "origin"

    def __init__(
        self, blobs: ObjectReader, *, timeout_s: float, reads_max: int | None = None
    ) -> None:
        """Further reads than `reads_max` wait within the time limit."""
        self._blobs = blobs
        self._timeout_s = timeout_s
        self._limit = asyncio.Semaphore(reads_max) if reads_max else nullcontext()

    def shape_now(self, key: str) -> Shape | None:  # noqa: ARG002 - nothing is kept
        """See `Source`."""
        return None

    async def shape(self, key: str) -> Shape:
        """See `Source`."""
        async with self._reading():
            return shape_of(await self._blobs.info(key))

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """See `Source`."""
        start, count = number * BLOCK_BYTES + span.start, span.end - span.start
        return await self.read(key, (shape.size_bytes, shape.etag), start, count)

    async def read(self, key: str, version: tuple[int, str], start: int, count: int) -> bytes:
        """`count` bytes from `start` of the version of this size and ETag.

        Raises: ObjectUnknown, SourceCut, StoreUnavailable.
        """
        async with self._reading():
            info, data = await self._blobs.read_part(key, start, count, etag=version[1])
        if (info.size_bytes, shape_of(info).etag) != version:
            raise SourceCut(
                f"object {key!r} was replaced since this answer began: request it again"
            )
        if len(data) != count:
            raise SourceCut(
                f"the object store gave {len(data)} bytes of {count} of {key!r}: request it again"
            )
        return data

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """See `Source`. The client of the store returns complete bytes only."""
        return PartialBlock.of(await self.block(key, shape, number, span))

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        """Bound a read in time, and raise the errors of media."""
        try:
            async with asyncio.timeout(self._timeout_s), self._limit:
                yield
        except (BlobMissing, InvalidBlobKey) as error:
            raise object_unknown() from error
        except BlobChanged as error:
            raise SourceCut(
                "the object was replaced while it was read: request it again"
            ) from error
        except (BlobsDown, TimeoutError) as error:
            raise store_down(error) from error


class KnownShape(NamedTuple):
    """A shape, the purge generation of its key, and when it must be read again (monotonic)."""

    shape: Shape
    generation: int
    expires_s: float


class ShapeCache:
    """Shapes by name, at most `shapes_max`; the oldest are dropped first."""

    def __init__(self, shapes_max: int) -> None:
        self._shapes_max = shapes_max
        self._known: dict[str, KnownShape] = {}

    def get(self, name: str, generation: int) -> KnownShape | None:
        """The cached shape if it is still fresh, and not of an older purge generation."""
        known = self._known.get(name)
        is_good = (
            known is not None
            and time.monotonic() < known.expires_s
            and known.generation >= generation
        )
        return known if is_good else None

    def last(self, name: str, generation: int) -> KnownShape | None:
        """The cached shape, fresh or not, if it is not of an older purge generation."""
        known = self._known.get(name)
        return known if known is not None and known.generation >= generation else None

    def keep(self, name: str, known: KnownShape) -> None:
        """Cache this shape."""
        self._known.pop(name, None)
        self._known[name] = known
        if len(self._known) > self._shapes_max:
            del self._known[next(iter(self._known))]

    def forget(self, name: str) -> None:
        """Drop the cached shape."""
        self._known.pop(name, None)


def _end_wait(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)


def object_unknown() -> ObjectUnknown:
    """The error for a key without an object."""
    return ObjectUnknown("no object of this key is stored")


def store_down(error: BaseException) -> StoreUnavailable:
    """The error for a failed object store, or upstream cluster."""
    cause = f"the object store failed ({type(error).__name__})"
    if isinstance(error, UpstreamDown):
        cause = "no node of the upstream cluster answers"
    return StoreUnavailable(f"{cause}: try again later", retry_after_s=RETRY_AFTER_S)
