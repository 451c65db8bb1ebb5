"""The cache as one worker uses it: look up blocks, send them, request missing ones.

    enter_epoch; for each ready client: find(key) -> sendfile from the frame,
    or park the client and await block(key); leave_epoch

A frame is valid until `leave_epoch`: in the next epoch it may hold another block. So a body that is
half sent looks its block up again by key. `block` may wait, so it returns the bytes or a signal
that the block is stored.

A block that was not served since the node started, or that left the page cache, is read in a
thread, compared with its checksum and looked up again. The same entry for the same key in the same
frame proves that nothing was written meanwhile. So all pages that sendfile reads came from a fill
or from a verified read. Disks that fail the probe (`disk_files`) are served by copying, in threads,
with the same check after the read.

`find` reads shared memory only. Its cost is measured by `bench/media_store.py`.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from headrace.kernel import logs
from headrace.kernel.logs import logger
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cache.disk_files import Frame, ReadDisk, open_read_disk
from headrace.media.cache.epochs import WorkerEpochs
from headrace.media.cache.filler_ipc import (
    NO_DISK,
    BlockReply,
    DiskFault,
    FillerClient,
    GetBlock,
    GetShape,
    Manifest,
    ShapeReply,
    WrongBlock,
    read_manifest,
)
from headrace.media.cache.frame_table import MARKS_MAX, VERIFIED, Entry, Hit
from headrace.media.cache.layout import SLOTS, BlockKey, Digests, version_of
from headrace.media.cache.linux import is_in_memory
from headrace.media.cache.metrics import SUMS
from headrace.media.cache.origin import SHAPES_MAX
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.sources import KnownShape, ShapeCache

log = logger(__name__)
READERS: Final = 8
"""Threads that read blocks from disk."""
KEYS_MAX: Final = 10_000
"""Number of keys kept, since a digest costs more than the lookup itself."""
_LOOK_S: Final = 0.01
_ANSWER_S: Final = 1.0
"""Time limit of a reply beyond the origin's own time limit."""
Owners = list[ReadDisk | None]


class PlaneDisks(NamedTuple):
    """Disks, and their positions by slot: `owners` and, while blocks move, `owners_before`."""

    revision: int
    disks: Sequence[ReadDisk | None]
    owners: bytes
    owners_before: bytes | None
    hash_key: bytes


class BlockCache:
    """The cache of one worker process. Use it in the thread of the event loop only."""

    def __init__(
        self,
        run: Path,
        *,
        worker: int,
        boot: str,
        timeout_s: float = 10.0,
        generation: Callable[[str], int] = lambda _name: 0,
    ) -> None:
        """Open the cache of the node with this run folder, whether or not its filler runs yet.

        Call it in the process that uses it, after any fork. `worker` is a number that no other live
        process of the node has. `boot` is the value that the filler got. `generation` returns the
        purge generation of an object.
        """
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run = run
        self._boot = boot
        self._generation = generation
        self._epochs = WorkerEpochs(run, worker)
        self._filler = FillerClient(run, timeout_s=timeout_s + _ANSWER_S)
        self._shapes = ShapeCache(SHAPES_MAX)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="media-store")
        self._digests = Digests(b"")
        self._keys: dict[tuple[str, str, int, int, int], BlockKey] = {}
        self._revision = 0
        self._manifest: Manifest | None = None
        """The disks that the filler of this start has published."""
        self._disks: list[ReadDisk | None] = []
        self._owners: Owners = [None] * SLOTS
        self._owners_before: Owners = []
        self._requests: SingleFlight[tuple[bytes, bool], Frame | bytes] = SingleFlight()
        self._looks: SingleFlight[tuple[str, int, bool], Shape] = SingleFlight()

    async def wait_for_disks(self, *, within_s: float) -> bool:
        """Wait until the filler of this start has published its disks. Return whether it did.

        A worker that serves earlier treats all stored blocks as missing.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        while True:
            self.enter_epoch()
            self.leave_epoch()
            if self._manifest is not None or loop.time() >= ends_s:
                return self._manifest is not None
            await asyncio.sleep(_LOOK_S)

    def key(self, name: str, shape: Shape, number: int) -> BlockKey:
        """The key of block `number` of this version of an object, at its purge generation."""
        generation = self._generation(name)
        request = name, shape.etag, shape.size_bytes, number, generation
        key = self._keys.get(request)
        if key is None:
            key = self._digests.key(name, version_of(shape, generation), number)
            if len(self._keys) >= KEYS_MAX:
                self._keys.clear()
            self._keys[request] = key
        return key

    def enter_epoch(self) -> None:
        """Begin an epoch, in which frames may be looked up."""
        assert not self._epochs.is_inside, "an epoch ends before the next one begins"
        if self._epochs.revision != self._revision:
            self._refresh()
        self._epochs.enter()

    def leave_epoch(self) -> None:
        """End the epoch. No frame that was found may be used after it."""
        self._epochs.leave()

    def find(self, key: BlockKey, *, is_visit: bool = True) -> Frame | None:
        """The frame with a verified copy of the block, valid in this epoch; None: use `block`.

        `is_visit` is False for the caller that the block was filled for and for repeated lookups of
        one body. Otherwise blocks that one client reads once look popular, and SIEVE is worse than
        LRU.
        """
        assert self._epochs.is_inside, "frames are looked up between enter_epoch and leave_epoch"
        found = self._find(key)
        if found is None:
            return None
        disk, hit = found
        table, number = disk.table, hit[0]
        if table.verified[number] != VERIFIED or disk.is_copied:
            return None
        if is_visit:
            # Read before writing: a store would invalidate the cache line of other processors each
            # time.
            marks = table.visited[number]
            if marks < MARKS_MAX:
                table.visited[number] = marks + 1
        return disk.frame(hit)

    def stored_frame(self, key: BlockKey) -> Frame | None:
        """The frame with the block, verified or not, valid in this epoch.

        It saves a read of the origin.
        """
        found = self._find(key)
        return found[0].frame(found[1]) if found is not None else None

    async def block(self, key: BlockKey, *, is_copy: bool = False) -> Frame | bytes:
        """Make the block available: a frame as a signal to look it up again, or its bytes.

        With `is_copy` the bytes are returned in any case, for blocks that are evicted faster than
        they are sent. Concurrent callers for one block share one request. Raises: ObjectUnknown,
        SourceCut, StoreUnavailable.
        """
        request = key.digest, is_copy
        return await self._requests.call(request, lambda: self._obtain(key, is_copy=is_copy))

    def description(self, name: str, shape: Shape) -> tuple[str, float] | None:
        """The version in the block keys of `shape` and when it expires (monotonic seconds).

        None: it is not the cached shape.
        """
        generation = self._generation(name)
        known = self._shapes.get(name, generation)
        if known is None or known.shape != shape:
            return None
        return version_of(shape, generation), known.expires_s

    def open_epochs(self, cell: int) -> WorkerEpochs:
        """The epochs of another thread of this worker, in a cell that nothing else uses."""
        return WorkerEpochs(self._run, cell)

    def disks_for_plane(self) -> PlaneDisks:
        """The disks of the newest manifest that was read, for the native data plane."""
        found = self._manifest
        if found is None:
            return PlaneDisks(self._revision, (), bytes([NO_DISK]) * SLOTS, None, b"")
        before = found.owners_before or None
        return PlaneDisks(self._revision, self._disks, found.owners, before, found.hash_key[:64])

    def known_shape(self, name: str) -> Shape | None:
        """The shape if it is cached and fresh, without waiting."""
        known = self._shapes.get(name, self._generation(name))
        return known.shape if known is not None else None

    async def shape(self, name: str, *, is_fresh: bool = False) -> Shape:
        """Size, ETag and time of the object, at most 60 s old.

        With `is_fresh` they are read from the origin now, after a block showed that the object was
        replaced. Raises: ObjectUnknown, StoreUnavailable.
        """
        known = None if is_fresh else self.known_shape(name)
        if known is not None:
            return known
        generation = self._generation(name)
        request = name, generation, is_fresh
        return await self._looks.call(
            request, lambda: self._look(name, generation, is_fresh=is_fresh)
        )

    def forget_shape(self, name: str) -> None:
        """Drop the cached shape: the next call requests it from the filler."""
        self._shapes.forget(name)

    def is_warm(self, frame: Frame, offset: int, length: int) -> bool:
        """Whether this part of the block can be sent from memory;

        False: use `block`, which verifies it.

        The verified mark is checked after the page cache. It is removed before any process reads
        the block from the disk again, so pages that were read but not yet verified are not sent.
        """
        disk = self._disks[frame.disk]
        assert disk is not None, "a frame is of a disk of this epoch"
        if is_in_memory(frame.fd, frame.offset + offset, length):
            return disk.table.verified[frame.number] == VERIFIED
        disk.table.note_cold(frame.number)
        return False

    def report_fault(self, position: int, error: OSError) -> None:
        """Stop using a disk that failed while a frame of it was sent, and notify the filler."""
        disk = self._disks[position]
        if disk is None:
            return
        log.warning("disk_failed_here", disk=disk.id, error=str(error))
        self._owners = [None if owner is disk else owner for owner in self._owners]
        self._owners_before = [None if owner is disk else owner for owner in self._owners_before]
        self._filler.notify(DiskFault(disk.id, error.errno or errno.EIO))

    async def close(self) -> None:
        """Cancel pending requests and close files and memory."""
        await self._filler.close()
        await self._requests.cancel()
        await self._looks.cancel()
        self._readers.shutdown(wait=True)
        for disk in self._disks:
            if disk is not None:
                disk.give_up()
        self._epochs.close()

    def _find(self, key: BlockKey) -> tuple[ReadDisk, Hit] | None:
        slot = key.hash_bits & (SLOTS - 1)
        disk = self._owners[slot]
        hit = disk.table.find(key) if disk is not None else None
        if hit is None and self._owners_before:
            disk = self._owners_before[slot]
            hit = disk.table.find(key) if disk is not None else None
        return (disk, hit) if disk is not None and hit is not None else None

    def _find_in_epoch(self, key: BlockKey) -> tuple[ReadDisk, Hit] | None:
        self.enter_epoch()
        try:
            return self._find(key)
        finally:
            self.leave_epoch()

    async def _obtain(self, key: BlockKey, *, is_copy: bool) -> Frame | bytes:
        own = await self._prove(key, is_copy=is_copy)
        if own is not None:
            return own
        data = await self._request(key, wants_bytes=is_copy)
        if data is not None:
            return data
        # A key made before the filler's first manifest has another digest: make it again.
        self._find_in_epoch(key)
        own = await self._prove(self._digests.key(*key[:3]), is_copy=is_copy)
        if own is not None:
            return own
        # Evicted again already, or on a disk that this process cannot open.
        data = await self._request(key, wants_bytes=True)
        assert data is not None, "bytes were requested"
        return data

    async def _request(self, key: BlockKey, *, wants_bytes: bool) -> bytes | None:
        """The block's bytes; None: it is stored."""
        trace_fields = logs.onward.get()
        reply = await self._filler.request(
            lambda call: GetBlock(
                call, key.object, key.version, key.number, wants_bytes, trace_fields
            )
        )
        assert isinstance(reply, BlockReply), f"a block is answered by a block, not {reply}"
        return reply.data

    async def _prove(self, key: BlockKey, *, is_copy: bool) -> Frame | bytes | None:
        """Verify a stored block if necessary; read it if it is to be copied."""
        found = self._find_in_epoch(key)
        if found is None:
            return None
        disk, hit = found
        is_copy = is_copy or disk.is_copied
        table = disk.table
        if table.verified[hit.frame] == VERIFIED and not is_copy:
            return disk.frame(hit)
        if not is_in_memory(disk.reader, disk.offset_of(hit.frame), BLOCK_BYTES):
            table.note_cold(hit.frame)
        entry = table.entry(hit.frame)
        read = await self._read(disk, hit.frame, entry)
        is_same = read is not None and self._find_in_epoch(key) == (disk, hit)
        if read is None or not is_same or table.entry(hit.frame) != entry:
            return None
        data, is_right = read
        SUMS["worker", is_right].inc()
        if not is_right:
            table.note_cold(hit.frame)
            log.info("block_corrupt", disk=disk.id, frame=hit.frame)
            self._filler.notify(WrongBlock(disk.id, hit.frame, hit.generation))
            return None
        table.verified[hit.frame] = VERIFIED
        return data[: hit.length] if is_copy else disk.frame(hit)

    async def _read(self, disk: ReadDisk, frame: int, entry: Entry) -> tuple[bytes, bool] | None:
        """Read and verify in a thread.

        Return None if the disk failed; that is reported to the filler.
        """
        disk.hold()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._readers, disk.read, frame, entry)
        except OSError as error:
            self.report_fault(disk.position, error)
            return None
        finally:
            disk.release()

    async def _look(self, name: str, generation: int, *, is_fresh: bool) -> Shape:
        reply = await self._filler.request(lambda call: GetShape(call, name, generation, is_fresh))
        assert isinstance(reply, ShapeReply), f"a look is answered by a shape, not {reply}"
        known = KnownShape(reply.shape, generation, time.monotonic() + reply.fresh_s)
        self._shapes.keep(name, known)
        return known.shape

    def _refresh(self) -> None:
        """Load the filler's newest manifest between two epochs.

        A manifest of another boot is ignored.
        """
        self._revision = self._epochs.revision
        manifest = read_manifest(self._run)
        if manifest is not None and manifest.boot != self._boot:
            manifest = None
        self._manifest = manifest
        before = {disk.position: disk for disk in self._disks if disk is not None}
        if manifest is None:
            self._disks, self._owners, self._owners_before = [], [None] * SLOTS, []
        else:
            self._digests = Digests(manifest.hash_key)
            self._keys.clear()
            self._disks = [
                open_read_disk(disk, position, before)
                for position, disk in enumerate(manifest.disks)
            ]
            self._owners = self._map(manifest.owners)
            self._owners_before = self._map(manifest.owners_before)
        for disk in before.values():
            if disk not in self._disks:
                disk.give_up()

    def _map(self, positions: Sequence[int]) -> Owners:
        return [None if position == NO_DISK else self._disks[position] for position in positions]
