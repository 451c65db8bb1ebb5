"""A fill: read a block from the origin into a frame, once for all waiting callers.

The order of the steps ensures the promise of the cache:

    1 look the block up again       2 read the origin, check length and ETag
    3 choose a frame (SIEVE)        4 hide it: tag 0
    5 barrier, copy the epochs      6 wait until those epochs are over
    7 punch exactly this block      8 one write of exactly this block
    9 fields, checksum, verified   10 barrier, publish the tag
   11 reply to all waiting callers

The origin is read before a frame is given up, because an unavailable origin would otherwise empty
the cache. There is no fdatasync: the checksum detects blocks that a power loss damaged. A process
that dies between two steps leaves a hidden frame, which counts as empty.

If a block cannot be placed (no disk, all 16 frames being filled, a stuck worker, a full, slow or
broken disk), its bytes are passed through. No reply waits for a slow disk longer than PLACE_WAIT_S:
while the disk still writes, callers get the bytes from memory, so the origin is not read again.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from headrace.kernel.errors import HeadraceError
from headrace.kernel.resilience import crash_point
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cache.disk import Disk, Verdict, check_frame
from headrace.media.cache.disks import Disks
from headrace.media.cache.epochs import FillerEpochs
from headrace.media.cache.filler_ipc import DiskState
from headrace.media.cache.frame_table import VERIFIED
from headrace.media.cache.layout import BlockKey
from headrace.media.cache.metrics import EVICTIONS, FILLED, FILLED_BYTES, JOINED, STUCK
from headrace.media.cache.origin import Origin

PLACE_WAIT_S: Final = 1.0
END_S: Final = 2.0


class Filled(NamedTuple):
    """The result of a fill: the bytes, if they were read, and whether they are stored."""

    data: bytes
    is_stored: bool


class Placing(NamedTuple):
    """A block that is being written."""

    task: asyncio.Task[bool]
    data: bytes


class Fills:
    """All fills in progress, by key."""

    def __init__(self, origin: Origin, disks: Disks, epochs: FillerEpochs) -> None:
        self._origin = origin
        self._disks = disks
        self._epochs = epochs
        self._under_way: SingleFlight[bytes, Filled] = SingleFlight()
        self._placing: dict[bytes, Placing] = {}

    async def block(self, key: BlockKey, *, wants_bytes: bool) -> bytes | None:
        """The block's bytes; None: it is stored. Concurrent callers share one read.

        Raises: ObjectUnknown, SourceCut, StoreUnavailable.
        """
        if key.digest not in self._under_way:
            stored = await self._find(key, wants_bytes=wants_bytes)
            if stored is not None:
                return stored.data if wants_bytes else None
            if (placing := self._placing.get(key.digest)) is not None:
                return placing.data
        JOINED.inc(key.digest in self._under_way)
        filled = await self._under_way.call(key.digest, lambda: self._fill(key))
        return None if filled.is_stored and not wants_bytes else filled.data

    def hide_wrong_block(self, disk: Disk, frame: int, generation: int) -> None:
        """Hide a frame whose block a worker found to be wrong."""
        if disk.state is DiskState.OUT or not 0 <= frame < disk.frames or frame in disk.busy:
            return
        entry, is_proved = disk.table.entry(frame), disk.table.verified[frame] == VERIFIED
        if entry.tag and entry.generation == generation and not is_proved:
            disk.hide_wrong(frame)

    async def close(self) -> None:
        """Let fills in progress finish within END_S, then cancel them; their frames stay empty."""
        try:
            async with asyncio.timeout(END_S):
                await self._under_way.wait_idle()
                await asyncio.gather(
                    *(placing.task for placing in self._placing.values()), return_exceptions=True
                )
        except TimeoutError:
            await self._under_way.cancel()

    async def _find(self, key: BlockKey, *, wants_bytes: bool) -> Filled | None:
        found = self._disks.find(key)
        if found is None:
            return None
        disk, hit = found
        if disk.table.verified[hit.frame] == VERIFIED and not wants_bytes:
            return Filled(b"", is_stored=True)
        try:
            checked = await check_frame(disk, hit.frame)
        except OSError as error:
            self._disks.fail(disk, error)
            return None
        is_it = checked.verdict is Verdict.RIGHT and checked.generation == hit.generation
        return Filled(checked.data, is_stored=True) if is_it else None

    async def _fill(self, key: BlockKey) -> Filled:
        try:
            data = await self._origin.block(key)
        except HeadraceError:
            FILLED["failed"].inc()
            raise
        FILLED_BYTES.inc(len(data))
        placing = asyncio.get_running_loop().create_task(self._place(key, data))
        self._placing[key.digest] = Placing(placing, data)
        placing.add_done_callback(lambda _: self._placing.pop(key.digest))
        await asyncio.wait([placing], timeout=PLACE_WAIT_S)
        is_stored = placing.done() and placing.result()
        FILLED["stored" if is_stored else "pass"].inc()
        return Filled(data, is_stored)

    async def _place(self, key: BlockKey, data: bytes) -> bool:
        """Steps 3 to 10. Return whether the block can be found now."""
        disk = self._disks.owner(key)
        if disk is None or not disk.takes_blocks:
            return False
        frame = disk.choose_frame(disk.table.set_of(key))
        if frame is None:
            return False
        disk.busy.add(frame)
        try:
            return await self._put(disk, frame, key, data)
        except OSError as error:
            self._disks.fail(disk, error)
            return False
        finally:
            disk.busy.discard(frame)

    async def _put(self, disk: Disk, frame: int, key: BlockKey, data: bytes) -> bool:
        table = disk.table
        generation = disk.next_generation(frame)
        if table.entry(frame).tag:
            EVICTIONS.inc()
        crash_point("media.fill.chosen")
        table.hide(frame)
        disk.note_changed(frame)
        crash_point("media.fill.hidden")
        if not await self._epochs.wait_for_workers():
            STUCK.inc()
            return False
        await disk.call(disk.write_block, frame, data)
        table.write_fields(frame, key, generation=generation, data=data)
        crash_point("media.fill.verified")
        await self._epochs.fence()
        table.show(frame, key)
        crash_point("media.fill.shown")
        return disk.state is not DiskState.OUT
