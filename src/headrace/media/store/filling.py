"""The fill: a block of the origin into a frame, once for all who wait for it. The order of its steps is the store's promise.

    1 find it again             2 read the origin: length and ETag      3 choose a frame: empty, or SIEVE's
    4 hide it: tag 0            5 barrier; copy the turns               6 wait until those turns are over
    7 punch exactly this block  8 one write of exactly this block       9 fields, entry sum, verified
   10 barrier, show: the tag   11 answer all who wait

No fdatasync: what a power loss takes, the block's sum finds. Whoever dies between two steps leaves a hidden frame, which is
an empty one. Where nothing can be placed (no disk, all 16 frames being filled, a stuck worker, a disk that is full, slow or
broken) the bytes are passed through; no answer waits for a slow disk longer than PLACE_WAIT_S.

Tested with 320,000 live reads, kills at each point and a planted bug for each rule (prototypes of 2026-11-21, and here
`tests/media/store/`).
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from headrace.kernel.errors import HeadraceError
from headrace.kernel.resilience import crash_point
from headrace.media.store.disk import Disk, DiskState
from headrace.media.store.disks import Disks
from headrace.media.store.layout import BlockKey
from headrace.media.store.origin import Origin
from headrace.media.store.scrub import Verdict, check_frame
from headrace.media.store.series import EVICTIONS, FILLED, FILLED_BYTES, JOINED, STUCK
from headrace.media.store.sharing import Sharing
from headrace.media.store.table import PROVED
from headrace.media.store.turns import FillerTurns

PLACE_WAIT_S: Final = 1.0
END_S: Final = 2.0


class Filled(NamedTuple):
    """What came of a fill: the bytes, if they were read, and whether they are stored."""

    data: bytes
    is_stored: bool


class Fills:
    """All fills under way, by key."""

    def __init__(self, origin: Origin, disks: Disks, turns: FillerTurns) -> None:
        self._origin = origin
        self._disks = disks
        self._turns = turns
        self._under_way: Sharing[bytes, Filled] = Sharing()
        self._placing: set[asyncio.Task[bool]] = set()

    @property
    def count(self) -> int:
        """How many blocks are being filled."""
        return len(self._under_way)

    async def ask(self, key: BlockKey, *, wants_bytes: bool) -> bytes | None:
        """The block's bytes; None: it is stored and can be found. Many who ask at once share one read.

        Raises: ObjectUnknown, SourceCut, StoreUnavailable.
        """
        if key.digest not in self._under_way:
            stored = await self._find(key, wants_bytes=wants_bytes)
            if stored is not None:
                return stored.data if wants_bytes else None
        JOINED.inc(key.digest in self._under_way)
        filled = await self._under_way.call(key.digest, lambda: self._fill(key))
        return None if filled.is_stored and not wants_bytes else filled.data

    def hide_doubted(self, disk: Disk, frame: int, generation: int) -> None:
        """Hide a frame whose block a worker found to be wrong."""
        if disk.state is DiskState.OUT or not 0 <= frame < disk.frames or frame in disk.busy:
            return
        entry, is_proved = disk.table.entry(frame), disk.table.verified[frame] == PROVED
        if entry.tag and entry.generation == generation and not is_proved:
            disk.hide_wrong(frame)

    async def close(self) -> None:
        """End: fills under way have a moment, then their frames stay empty."""
        try:
            async with asyncio.timeout(END_S):
                await self._under_way.wait_ended()
                await asyncio.gather(*self._placing, return_exceptions=True)
        except TimeoutError:
            await self._under_way.cancel()

    async def _find(self, key: BlockKey, *, wants_bytes: bool) -> Filled | None:
        found = self._disks.find(key)
        if found is None:
            return None
        disk, hit = found
        if disk.table.verified[hit.frame] == PROVED and not wants_bytes:
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
        self._placing.add(placing)
        placing.add_done_callback(self._placing.discard)
        await asyncio.wait([placing], timeout=PLACE_WAIT_S)
        is_stored = placing.done() and placing.result()
        FILLED["stored" if is_stored else "pass"].inc()
        return Filled(data, is_stored)

    async def _place(self, key: BlockKey, data: bytes) -> bool:
        """Steps 3 to 10; whether the block can be found now."""
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
        if not await self._turns.wait_left():
            STUCK.inc()
            return False
        await disk.call(disk.write_block, frame, data)
        table.write_fields(frame, key, generation=generation, data=data)
        crash_point("media.fill.verified")
        await self._turns.fence()
        table.show(frame, key)
        crash_point("media.fill.shown")
        return disk.state is not DiskState.OUT
