"""Bodies of answers: spans of a file or of blocks.

A body reads bytes only when its socket takes them, so nothing is read faster than it is sent. At
most one block is read ahead, and only if blocks have to be waited for.

- `FileBody` sends a file of a local store with sendfile. The first byte of each 256 KiB is probed
  with RWF_NOWAIT. If it is not in memory, a thread reads the block first, since a sendfile of an
  uncached block delays all other clients.
- `BlockBody` sends frames of the node's disks with sendfile, or bytes of a peer or the object store
  as they are received. A frame is looked up again by key in every epoch: between epochs it may be
  reused.

A source that ends early, changes or fails raises SourceCut. The connection must then be reset,
since a clean end would look like a complete answer.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, Protocol

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger, onward
from headrace.kernel.metrics import bound
from headrace.media.cache import Frame
from headrace.media.errors import SourceCut
from headrace.media.model import BLOCK_BYTES, BLOCKS, Shape
from headrace.media.sources import CacheSource, PartialBlock, Source, Span
from headrace.media.worker.socket_io import Channel

log = logger(__name__)
LOSSES_MAX: Final = 2
"""How often a block may be evicted between fill and send before it is requested as a copy."""
_BLOCKS: Final = {
    name: bound(BLOCKS, "media_blocks_total", outcome=name) for name in ("hit", "miss", "pass")
}


class Body(Protocol):
    """A body of an answer to one client."""

    source: str
    """The source of the bytes sent last: one of `model.SOURCES`."""
    left_bytes: int

    @property
    def is_waiting(self) -> bool:
        """Whether the source, not the client, delays the answer."""
        ...

    def send(self, channel: Channel, bytes_max: int) -> int:
        """Send up to `bytes_max` bytes; 0: the source is not ready and will wake the client.

        Raises: BlockingIOError (the socket is full), SourceCut, OSError (the client disconnected).
        """
        ...

    def close(self) -> None: ...


class FileBody:
    """A span of an open file. Owns the descriptor."""

    __slots__ = (
        "_descriptor",
        "_is_closed",
        "_offset",
        "_readers",
        "_reading",
        "_ready_end",
        "_wake",
        "left_bytes",
        "source",
    )

    def __init__(
        self,
        descriptor: int,
        start: int,
        length_bytes: int,
        *,
        readers: Executor,
        wake: Callable[[], None],
    ) -> None:
        self.source = "memory"
        self.left_bytes = length_bytes
        self._descriptor = descriptor
        self._offset = self._ready_end = start
        self._readers = readers
        self._wake = wake
        self._reading: asyncio.Future[int] | None = None
        self._is_closed = False

    @property
    def is_waiting(self) -> bool:
        return self._reading is not None

    def send(self, channel: Channel, bytes_max: int) -> int:
        if self._reading is not None:
            return 0
        if self._offset >= self._ready_end:
            if not is_in_memory(self._descriptor, self._offset):
                self._read_block()
                return 0
            self.source = "memory"
            self._ready_end = self._offset + BLOCK_BYTES
        count = min(self.left_bytes, bytes_max, self._ready_end - self._offset)
        try:
            sent = channel.send_file(self._descriptor, self._offset, count)
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
        """Close the descriptor after a read in progress: its number could be reused."""
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
        # After a failed read, sendfile fails too and reports the error.
        self._ready_end = self._offset + BLOCK_BYTES
        self.source = "disk"
        if not reading.cancelled():
            reading.exception()
        if self._is_closed:
            os.close(self._descriptor)
        else:
            self._wake()


class BlockBody:
    """A span of an object's blocks, from the node's disks or another source."""

    __slots__ = (
        "_ahead",
        "_asked",
        "_block_key",
        "_fault",
        "_found",
        "_held",
        "_is_begun",
        "_is_blocked",
        "_is_next_stored",
        "_is_opening",
        "_is_visited",
        "_key",
        "_losses",
        "_number",
        "_offset",
        "_origin",
        "_own",
        "_shape",
        "_store",
        "_trace_fields",
        "_wake",
        "_wanted",
        "_was_stored",
        "_work",
        "left_bytes",
        "source",
    )

    def __init__(
        self,
        origin: Source,
        key: str,
        shape: Shape,
        *,
        start: int,
        length_bytes: int,
        wake: Callable[[], None],
        trace_fields: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.source = "memory"
        self.left_bytes = length_bytes
        self._trace_fields = trace_fields
        self._origin, self._key, self._shape = origin, key, shape
        self._own = origin if isinstance(origin, CacheSource) else None
        self._store = self._own.store if self._own is not None else None
        self._found: tuple[int, Frame] | None = None
        """The epoch and the frame that it found."""
        self._wake = wake
        self._number, self._offset = divmod(start, BLOCK_BYTES)
        self._block_key = self._key_of(self._number)
        self._held: tuple[PartialBlock, int] | None = None
        """Bytes of the current block outside a frame, and their offset in the block."""
        self._ahead: tuple[PartialBlock, int] | None = None
        self._work: asyncio.Task[None] | None = None
        """The pending operation: a block of the source, or the verification of a stored one."""
        self._is_opening = False
        self._wanted: Callable[[], Coroutine[Any, Any, None]] | None = None
        """The operation to await before the first byte, so that it needs no task of its own."""
        self._is_blocked = False
        self._asked = -1
        """The block requested last."""
        self._was_stored = self._is_next_stored = False
        """Whether the requested block and the next one were stored already, only not verified."""
        self._losses = 0
        self._is_begun = False
        self._is_visited = False
        """Whether the current block was marked as visited."""
        self._fault: HeadraceError | None = None

    @property
    def is_waiting(self) -> bool:
        return self._is_blocked

    @property
    def outcome(self) -> str:
        """The cache result of the current block: `hit`, `miss` (filled for this), `pass` (not
        placed).
        """
        if self._held is not None:
            return "pass"
        return "miss" if self._is_filled else "hit"

    @property
    def _is_filled(self) -> bool:
        return self._asked == self._number and not self._was_stored

    def is_ready(self) -> bool:
        """Whether the first bytes can be sent in this epoch; otherwise await `wait_ready`."""
        if self._held is not None:
            return True
        self._is_opening = True
        try:
            return self._find() is not None
        finally:
            self._is_opening = False

    async def wait_ready(self) -> None:
        """Wait until the body is ready. Raises: StoreUnavailable, ObjectUnknown, SourceCut."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            await wanted()
        if self._fault is not None:
            raise self._fault

    def send(self, channel: Channel, bytes_max: int) -> int:
        if self._is_blocked:
            return 0
        count = min(self.left_bytes, bytes_max, BLOCK_BYTES - self._offset)
        if self._held is not None:
            coming, before = self._held
            part = coming.part(self._offset - before)
            if not part:
                self._is_blocked = True
                coming.call_at_more(self._go_on_sending)
                return 0
            if not self._is_begun:
                self._begin("peer" if self._origin.name == "peer" else "origin")
            sent = channel.send(part[:count])
        else:
            frame = self._find()
            if frame is None:
                return 0
            sent = self._send_frame(channel, frame, count)
        self.left_bytes -= sent
        self._offset += sent
        if self._offset == BLOCK_BYTES and self.left_bytes:
            self._go_on()
        return sent

    def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
        self._held = self._ahead = None

    def _go_on_sending(self) -> None:
        """Continue after more bytes were received or the block failed."""
        if self._held is not None and self._is_blocked:
            self._is_blocked = False
            self._wake()

    def _find(self) -> Frame | None:
        """The current block's frame, if its bytes are in memory; None: they are being read."""
        if self._found is not None and self._own is not None and self._found[0] == self._own.epoch:
            return self._found[1]
        frame = self._look_up()
        if frame is None:
            self._miss()
            return None
        assert self._store is not None
        assert self._own is not None
        count = self._wanted_bytes
        if frame.length < self._offset + count:
            raise SourceCut("a stored block is too short for its object")
        self._is_visited = True
        if not self._store.is_warm(frame, self._offset, count):
            self._miss()
            return None
        if not self._is_begun:
            found = "disk" if self._asked == self._number else "memory"
            self._begin("origin" if self._is_filled else found)
        self._found = (self._own.epoch, frame)
        return frame

    def _look_up(self) -> Frame | None:
        if self._store is None:
            return None
        # Once for each body, unless the block was filled for it or lost again meanwhile.
        is_again = self._is_begun or self._is_visited or self._is_filled
        return self._store.find(self._block_key, is_visit=not is_again or self._losses > 0)

    def _begin(self, source: str) -> None:
        """Record that the current block is sent from `source`."""
        self._is_begun = True
        self.source = source
        if self._store is not None:
            _BLOCKS[self.outcome].inc()
        if self._held is not None or self._asked == self._number:
            self._ask_ahead()

    def _send_frame(self, channel: Channel, frame: Frame, count: int) -> int:
        try:
            sent = channel.send_file(frame.fd, frame.offset + self._offset, count)
        except OSError as error:
            self._found = None
            if error.errno != errno.EIO:
                raise
            return self._lose_disk(frame, error)
        if sent == 0:
            return self._lose_disk(frame, OSError(errno.ESTALE, "it became shorter"))
        return sent

    def _lose_disk(self, frame: Frame, error: OSError) -> int:
        """Continue the block from another source after its disk failed."""
        assert self._store is not None, "a frame is a store's"
        self._store.report_fault(frame.disk, error)
        self._found = None
        self._miss()
        return 0

    def _go_on(self) -> None:
        """Move to the next block, which may have been requested already."""
        self._number += 1
        self._offset = 0
        self._block_key = self._key_of(self._number)
        self._is_begun, self._is_visited, self._losses = False, False, 0
        self._was_stored, self._is_next_stored = self._is_next_stored, False
        self._found = None
        self._held, self._ahead = self._ahead, None

    @property
    def _wanted_bytes(self) -> int:
        return min(self.left_bytes, BLOCK_BYTES - self._offset)

    def _key_of(self, number: int) -> Any:
        return self._store.key(self._key, self._shape, number) if self._store is not None else None

    def _miss(self) -> None:
        if self._fault is not None:
            raise _cut(self._fault)
        if self._work is not None:
            # The next block is being read; there is one pending operation at a time.
            self._is_blocked = True
            return
        if self._asked == self._number:
            self._losses += 1
        self._asked = self._number
        stored = self._store.stored_frame(self._block_key) if self._store is not None else None
        self._was_stored = stored is not None
        span = Span(self._offset, self._offset + self._wanted_bytes)
        self._wait_for(partial(self._fetch, self._number, span, stored))

    def _ask_ahead(self) -> None:
        """Request the next block while this one is sent, if blocks have to be waited for."""
        number = self._number + 1
        after = self.left_bytes - self._wanted_bytes
        if not after or self._work is not None or self._ahead is not None:
            return
        stored: Frame | None = None
        if self._store is not None:
            key = self._key_of(number)
            if self._store.find(key, is_visit=False) is not None:
                return
            stored = self._store.stored_frame(key)
            self._is_next_stored = stored is not None
        self._asked = number
        coming = self._fetch(number, Span(0, min(BLOCK_BYTES, after)), stored)
        self._work = asyncio.get_running_loop().create_task(coming)

    def _wait_for(self, wanted: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._is_blocked = True
        if self._is_opening:
            self._wanted = wanted
        else:
            self._work = asyncio.get_running_loop().create_task(wanted())

    async def _fetch(self, number: int, span: Span, stored: Frame | None) -> None:
        """Make a block available; `stored` is the frame found earlier."""
        onward.set(self._trace_fields)
        try:
            found = await self._request_block(number, span)
        except HeadraceError as error:
            if isinstance(error, SourceCut) and self._store is not None:
                # The object was replaced: the next request reads the shape again.
                self._store.forget_shape(self._key)
            self._fault = error
        except Exception as error:
            # Fail the body, so that the client does not wait forever.
            log.exception("block_not_read", number=number)
            self._fault = _cut(error)
        else:
            if isinstance(found, PartialBlock):
                self._take(number, found, span)
            else:
                self._note_stored(number, is_stored=found == stored)
                # Make the key again: it may be older than the filler's first manifest.
                self._block_key = self._key_of(self._number)
        self._come_back()

    def _note_stored(self, number: int, *, is_stored: bool) -> None:
        """Record whether a block was stored already or was filled for this body."""
        if number == self._number:
            self._was_stored = is_stored
        else:
            self._is_next_stored = is_stored

    async def _request_block(self, number: int, span: Span) -> Frame | PartialBlock:
        if self._store is None:
            return await self._origin.begin_block(self._key, self._shape, number, span)
        is_copy = self._losses >= LOSSES_MAX
        found = await self._store.block(self._key_of(number), is_copy=is_copy)
        return PartialBlock.of(found[span.start : span.end]) if isinstance(found, bytes) else found

    def _take(self, number: int, coming: PartialBlock, span: Span) -> None:
        if coming.length_bytes != span.end - span.start:
            self._fault = SourceCut("the source gave fewer bytes than the object has")
        elif number != self._number:
            self._ahead = coming, span.start
        else:
            self._held = coming, span.start

    def _come_back(self) -> None:
        self._is_blocked = False
        # Without a task the opening code awaits this and continues by itself.
        if self._work is not None:
            self._work = None
            self._wake()


def is_in_memory(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` can be sent without waiting for the disk."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without RWF_NOWAIT (EOPNOTSUPP) has no better check.
        return True
    return True


def _read_into_memory(descriptor: int, offset: int, count: int) -> int:
    return len(os.pread(descriptor, count, offset))


def _cut(error: Exception) -> SourceCut:
    if isinstance(error, SourceCut):
        return error
    cut = SourceCut("the source of the object failed while it was sent")
    cut.__cause__ = error
    return cut
