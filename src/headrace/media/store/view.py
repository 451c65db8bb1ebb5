"""What a worker has of the store: it looks up, sends, and asks the filler for what is not there.

    turn:   enter_turn; for each ready client: find(key) -> sendfile from the frame, else park and `block(key)`; leave_turn

A frame is good until `leave_turn` and no longer: in the next turn it may hold another block. So a body that is half sent is
looked up again by its key. `block` may wait, so what it returns is a hint that the block is there, or its bytes.

A block that was not served since the node started, or that is not in memory any more, is read in a thread, compared with its
sum and looked up again: the same entry for the same key in the same frame means that nothing was written meanwhile. So what
sendfile takes from memory came there by a fill or by a read that was compared. Disks whose probe
failed (`probe`) are served by copying, in threads, with the same check after the read.

`find` reads shared memory only; its cost: `bench/media_store.py`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from headrace.kernel import logs
from headrace.kernel.logs import logger
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.store.kernel_calls import is_in_memory
from headrace.media.store.layout import SLOTS, BlockKey, Digests, version_of
from headrace.media.store.link import Link
from headrace.media.store.manifest import NOBODY, read_manifest
from headrace.media.store.origin import Known, Shapes
from headrace.media.store.series import SUMS
from headrace.media.store.served import Frame, ServedDisk, open_served
from headrace.media.store.sharing import Sharing
from headrace.media.store.sieve import MARKS_MAX
from headrace.media.store.table import PROVED, Entry, Hit
from headrace.media.store.turns import WorkerTurns
from headrace.media.store.wire import Ask, Doubt, Fault, Look, Passed, Shaped

log = logger(__name__)
READERS: Final = 8
"""Threads that read cold blocks; 16 of one process read 1.5 GB/s in prototypes, and a node has several."""
KEYS_MAX: Final = 10_000
"""Keys kept made: a digest costs four times what it costs to look a key up."""
_LOOK_S: Final = 0.01
_ANSWER_S: Final = 1.0
"""What an answer may take beyond the origin's time limit."""
Owners = list[ServedDisk | None]


class Store:
    """One process's view of the store; everything of it in the thread of its event loop."""

    def __init__(
        self,
        run: Path,
        *,
        worker: int,
        boot: str,
        timeout_s: float,
        generation: Callable[[str], int],
    ) -> None:
        self._run = run
        self._boot = boot
        self._generation = generation
        self._turns = WorkerTurns(run, worker)
        self._link = Link(run, timeout_s=timeout_s + _ANSWER_S)
        self._shapes = Shapes()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="media-store")
        self._digests = Digests(b"")
        self._keys: dict[tuple[str, str, int, int, int], BlockKey] = {}
        self._revision = 0
        self._is_told = False
        """Whether the filler of this start has said which disks there are."""
        self._disks: list[ServedDisk | None] = []
        self._owners: Owners = [None] * SLOTS
        self._owners_before: Owners = []
        self._asks: Sharing[tuple[bytes, bool], Frame | bytes] = Sharing()
        self._looks: Sharing[tuple[str, int, bool], Shape] = Sharing()

    @classmethod
    def open(
        cls,
        run: Path,
        *,
        worker: int,
        boot: str,
        timeout_s: float = 10.0,
        generation: Callable[[str], int] = lambda _name: 0,
    ) -> Store:
        """The store of the node with that run folder, whether its filler is there yet or not.

        Call it in the process that uses it (after a fork), with a number that no other live process of the node
        has. `boot` as the filler got it; `generation` gives an object's purge generation.
        """
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(run, worker=worker, boot=boot, timeout_s=timeout_s, generation=generation)

    async def wait_told(self, *, within_s: float) -> bool:
        """Wait until the filler of this start has said which disks there are; whether it did.

        A process that serves before that takes what stands on the disks for missing.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        while True:
            self.enter_turn()
            self.leave_turn()
            if self._is_told or loop.time() >= ends_s:
                return self._is_told
            await asyncio.sleep(_LOOK_S)

    def key(self, name: str, shape: Shape, number: int) -> BlockKey:
        """The key of block `number` of that version of an object, as of its purge generation now."""
        generation = self._generation(name)
        asked = name, shape.etag, shape.size_bytes, number, generation
        key = self._keys.get(asked)
        if key is None:
            key = self._digests.key(name, version_of(shape, generation), number)
            if len(self._keys) >= KEYS_MAX:
                self._keys.clear()
            self._keys[asked] = key
        return key

    def enter_turn(self) -> None:
        """Begin a turn, in which frames may be looked up."""
        assert not self._turns.is_inside, "a turn ends before the next one begins"
        if self._turns.revision != self._revision:
            self._refresh()
        self._turns.enter()

    def leave_turn(self) -> None:
        """End it: every frame that was found is forgotten."""
        self._turns.leave()

    def find(self, key: BlockKey, *, is_visit: bool = True) -> Frame | None:
        """The frame that holds that block, proved, for this turn; None: ask `block`.

        `is_visit` is False for whoever the block was filled for, and for whoever looks again while it sends: a block
        that only one client ever wants must not look wanted, or SIEVE is worse than LRU.
        """
        assert self._turns.is_inside, "frames are looked up between enter_turn and leave_turn"
        found = self._find(key)
        if found is None:
            return None
        disk, hit = found
        table, number = disk.table, hit[0]
        if table.verified[number] != PROVED or disk.is_copied:
            return None
        if is_visit:
            # Looked at first: a store would take the line from the other processors each time.
            marks = table.visited[number]
            if marks < MARKS_MAX:
                table.visited[number] = marks + 1
        return disk.frame(hit)

    def stored_frame(self, key: BlockKey) -> Frame | None:
        """The frame that holds the block, proved or not, so that no origin is read for it. Within a turn."""
        found = self._find(key)
        return found[0].frame(found[1]) if found is not None else None

    async def block(self, key: BlockKey, *, is_copy: bool = False) -> Frame | bytes:
        """Have the block ready: a frame (a hint: find it again in a turn), or its bytes.

        `is_copy`: bytes in any case, for a block that is evicted faster than it can be sent. Many who ask for one
        block share one question. Raises: ObjectUnknown, SourceCut, StoreUnavailable.
        """
        asked = key.digest, is_copy
        return await self._asks.call(asked, lambda: self._obtain(key, is_copy=is_copy))

    def known_shape(self, name: str) -> Shape | None:
        """The shape, if it is known and good: for the way of a request that must not wait."""
        known = self._shapes.get(name, self._generation(name))
        return known.shape if known is not None else None

    async def shape(self, name: str) -> Shape:
        """Size, ETag and time, at most 60 s old. Raises: ObjectUnknown, StoreUnavailable."""
        return self.known_shape(name) or await self._shared_look(name, is_fresh=False)

    async def shape_now(self, name: str) -> Shape:
        """The same, asked of the origin now: after a block said that the object was replaced."""
        return await self._shared_look(name, is_fresh=True)

    def forget_shape(self, name: str) -> None:
        """Ask the filler for it the next time."""
        self._shapes.forget(name)

    def is_warm(self, frame: Frame, offset: int, length: int) -> bool:
        """Whether that part of the frame's block can be sent from memory; False: ask `block`, which compares it again.

        The proof is looked at after the memory: it is taken away before anybody reads the block from the disk again,
        so bytes that a read has brought and nobody has compared yet are not sent.
        """
        disk = self._disks[frame.disk]
        assert disk is not None, "a frame is of a disk of this turn"
        if is_in_memory(frame.fd, frame.offset + offset, length):
            return disk.table.verified[frame.number] == PROVED
        disk.table.note_cold(frame.number)
        return False

    def read_now(self, frame: Frame, offset: int, into: memoryview) -> bool:
        """Copy that part of the frame's block, if it is in memory and proved; else `into` is of no use.

        Memory is probed first: a read that may not wait still starts to bring the pages, and the next one would find
        them, not compared yet, beside a proof of earlier bytes.
        """
        if not self.is_warm(frame, offset, len(into)):
            return False
        disk = self._disks[frame.disk]
        assert disk is not None, "a frame is of a disk of this turn"
        try:
            count = os.preadv(frame.fd, (into,), frame.offset + offset, os.RWF_NOWAIT)
        except BlockingIOError:
            count = 0
        except OSError:
            # Also where the file system cannot answer; a fault shows when the frame is sent.
            return False
        if count < len(into):
            disk.table.note_cold(frame.number)
        return count == len(into) and disk.table.verified[frame.number] == PROVED

    def report_fault(self, place: int, error: OSError) -> None:
        """A disk failed while a frame of it was sent: nothing more is looked up there, and the filler is told."""
        disk = self._disks[place]
        if disk is None:
            return
        log.warning("disk_failed_here", disk=disk.id, error=str(error))
        self._owners = [None if owner is disk else owner for owner in self._owners]
        self._owners_before = [None if owner is disk else owner for owner in self._owners_before]
        self._link.tell(Fault(disk.id, error.errno or errno.EIO))

    async def close(self) -> None:
        """Give everything back."""
        await self._link.close()
        await self._asks.cancel()
        await self._looks.cancel()
        self._readers.shutdown(wait=True)
        for disk in self._disks:
            if disk is not None:
                disk.give_up()
        self._turns.close()

    def _find(self, key: BlockKey) -> tuple[ServedDisk, Hit] | None:
        slot = key.place & (SLOTS - 1)
        disk = self._owners[slot]
        hit = disk.table.find(key) if disk is not None else None
        if hit is None and self._owners_before:
            disk = self._owners_before[slot]
            hit = disk.table.find(key) if disk is not None else None
        return (disk, hit) if disk is not None and hit is not None else None

    def _find_in_turn(self, key: BlockKey) -> tuple[ServedDisk, Hit] | None:
        self.enter_turn()
        try:
            return self._find(key)
        finally:
            self.leave_turn()

    async def _obtain(self, key: BlockKey, *, is_copy: bool) -> Frame | bytes:
        own = await self._prove(key, is_copy=is_copy)
        if own is not None:
            return own
        data = await self._ask(key, wants_bytes=is_copy)
        if data is not None:
            return data
        # A key made before the filler's first manifest has another digest: make it again.
        self._find_in_turn(key)
        own = await self._prove(self._digests.key(*key[:3]), is_copy=is_copy)
        if own is not None:
            return own
        # Gone again already, or on a disk that this process cannot open.
        data = await self._ask(key, wants_bytes=True)
        assert data is not None, "who wants bytes gets them"
        return data

    async def _ask(self, key: BlockKey, *, wants_bytes: bool) -> bytes | None:
        """The block's bytes; None: it is stored."""
        told = logs.onward.get()
        reply = await self._link.ask(
            lambda call: Ask(call, key.object, key.version, key.number, wants_bytes, told)
        )
        return reply.data if isinstance(reply, Passed) else None

    async def _prove(self, key: BlockKey, *, is_copy: bool) -> Frame | bytes | None:
        """A stored block: compared with its sum if it was not yet, read if it is to be copied."""
        found = self._find_in_turn(key)
        if found is None:
            return None
        disk, hit = found
        is_copy = is_copy or disk.is_copied
        table = disk.table
        if table.verified[hit.frame] == PROVED and not is_copy:
            return disk.frame(hit)
        if not is_in_memory(disk.reader, disk.offset_of(hit.frame), BLOCK_BYTES):
            table.note_cold(hit.frame)
        entry = table.entry(hit.frame)
        read = await self._read(disk, hit.frame, entry)
        is_same = read is not None and self._find_in_turn(key) == (disk, hit)
        if read is None or not is_same or table.entry(hit.frame) != entry:
            return None
        data, is_right = read
        SUMS["worker", is_right].inc()
        if not is_right:
            table.note_cold(hit.frame)
            log.info("block_wrong", disk=disk.id, frame=hit.frame)
            self._link.tell(Doubt(disk.id, hit.frame, hit.generation))
            return None
        table.verified[hit.frame] = PROVED
        return data[: hit.length] if is_copy else disk.frame(hit)

    async def _read(self, disk: ServedDisk, frame: int, entry: Entry) -> tuple[bytes, bool] | None:
        """Read and compare in a thread; None: the disk failed, which is reported to the filler."""
        disk.hold()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._readers, disk.read, frame, entry)
        except OSError as error:
            self.report_fault(disk.place, error)
            return None
        finally:
            disk.release()

    async def _shared_look(self, name: str, *, is_fresh: bool) -> Shape:
        generation = self._generation(name)
        asked = name, generation, is_fresh
        return await self._looks.call(
            asked, lambda: self._look(name, generation, is_fresh=is_fresh)
        )

    async def _look(self, name: str, generation: int, *, is_fresh: bool) -> Shape:
        reply = await self._link.ask(lambda call: Look(call, name, generation, is_fresh))
        assert isinstance(reply, Shaped), f"a look is answered by a shape, not {reply}"
        shape = Shape(reply.size_bytes, reply.etag, reply.modified_s, reply.is_immutable)
        self._shapes.keep(name, Known(shape, generation, time.monotonic() - reply.age_s))
        return shape

    def _refresh(self) -> None:
        """Take over the filler's newest manifest, between two turns. Another boot's is none."""
        self._revision = self._turns.revision
        manifest = read_manifest(self._run)
        is_ours = manifest is not None and manifest.boot == self._boot
        self._is_told = is_ours
        before = {disk.place: disk for disk in self._disks if disk is not None}
        if manifest is None or not is_ours:
            self._disks, self._owners, self._owners_before = [], [None] * SLOTS, []
        else:
            self._digests = Digests(manifest.hash_key)
            self._keys.clear()
            self._disks = [
                open_served(disk, place, before) for place, disk in enumerate(manifest.disks)
            ]
            self._owners = self._map(manifest.owners)
            self._owners_before = self._map(manifest.owners_before)
        for disk in before.values():
            if disk not in self._disks:
                disk.give_up()

    def _map(self, places: Sequence[int]) -> Owners:
        return [None if place == NOBODY else self._disks[place] for place in places]
