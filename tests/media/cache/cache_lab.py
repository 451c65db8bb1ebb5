"""A node's cache for tests: small disks, objects derived from their keys, in this process."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.media.cache import BlockCache, BlockKey, Filler, Frame
from headrace.media.cache.layout import DATA_AT, PROBE_BLOCKS, SET_BYTES, WAYS
from headrace.media.model import BLOCK_BYTES, DiskConfig, Shape

BOOT = "boot-1"
HASH_KEY = b"k" * 32
PAGE = 4096


def disk_bytes(sets: int) -> int:
    """The minimum size of a disk with this many sets."""
    return 2 * DATA_AT + PROBE_BLOCKS * BLOCK_BYTES + sets * (WAYS * BLOCK_BYTES + SET_BYTES)


@lru_cache(maxsize=512)
def block_data(name: str, number: int, length: int = BLOCK_BYTES) -> bytes:
    """The content of block `number`: each page has name, block and position."""
    pages = range(-(-length // PAGE))
    parts = [
        hashlib.blake2b(f"{name}/{number}/{page}".encode(), digest_size=64).digest() * (PAGE // 64)
        for page in pages
    ]
    return b"".join(parts)[:length]


def object_data(name: str, size_bytes: int) -> bytes:
    """All bytes of the object."""
    starts = range(0, size_bytes, BLOCK_BYTES)
    return b"".join(
        block_data(name, start // BLOCK_BYTES, min(BLOCK_BYTES, size_bytes - start))
        for start in starts
    )


async def put_object(blobs: Blobs, name: str, blocks: float = 4) -> Shape:
    """Store an object of this many blocks. Return its shape."""
    size_bytes = int(blocks * BLOCK_BYTES)
    await blobs.put(name, object_data(name, size_bytes))
    return await shape_in(blobs, name)


async def shape_in(blobs: Blobs, name: str) -> Shape:
    """The shape of a stored object."""
    info = await blobs.info(name)
    moment_s = int(info.modified_at.timestamp())
    return Shape(info.size_bytes, info.etag, moment_s, is_immutable=False)


@dataclass
class CacheNode:
    """One node's folders and its running parts."""

    folder: Path
    blobs: Blobs
    disks: list[DiskConfig]
    boot: str = BOOT
    stores: list[BlockCache] = field(default_factory=list)
    generation: Callable[[str], int] = lambda _name: 0
    filler: Filler | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _running: asyncio.Task[None] | None = None

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def socket(self) -> Path:
        return self.run / "filler.sock"

    @property
    def store(self) -> BlockCache:
        """The cache of the first worker."""
        return self.stores[0]

    async def start(self, *, workers: int = 1, **settings) -> None:
        """Start the filler and the missing caches."""
        self._stop = asyncio.Event()
        self.filler = Filler(
            self.blobs, self.disks, run=self.run, boot=self.boot, hash_key=HASH_KEY, **settings
        )
        ready = asyncio.Event()
        self._running = asyncio.create_task(self.filler.run(self._stop, ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([waiting, self._running], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            self._running.result()
        for worker in range(len(self.stores), workers):
            self.open_cache(worker)

    def open_cache(self, worker: int, **settings) -> BlockCache:
        """Open one more cache."""
        settings.setdefault("generation", self.generation)
        store = BlockCache(self.run, worker=worker, boot=self.boot, **settings)
        store.enter_epoch()
        store.leave_epoch()
        self.stores.append(store)
        return store

    async def stop_filler(self) -> None:
        """Stop the filler in order; the caches stay open."""
        if self._running is not None:
            self._stop.set()
            running, self._running = self._running, None
            await running

    async def stop(self) -> None:
        """Stop all in order, as a node does: workers first."""
        while self.stores:
            await self.stores.pop().close()
        await self.stop_filler()

    async def restart(self, *, boot: str = "boot-2", **settings) -> None:
        """Stop all and start again, as another boot of the node."""
        workers = len(self.stores)
        await self.stop()
        self.boot = boot
        await self.start(workers=workers, **settings)

    def disk(self, place: int = 0):
        """A disk of the filler."""
        return self.filler._disks.opened[place]


@asynccontextmanager
async def cache_node(tmp_path: Path, blobs: Blobs, *, disks: int = 1, sets: int = 1, **settings):
    """A running node with this many disks of this many sets."""
    configs = [DiskConfig(tmp_path / f"disk-{n}", disk_bytes(sets)) for n in range(disks)]
    node = CacheNode(tmp_path, blobs, configs)
    await node.start(**settings)
    try:
        yield node
    finally:
        await node.stop()


def look_up(store: BlockCache, key: BlockKey) -> bytes | None:
    """The bytes that a client would get from a frame in one epoch, or None."""
    store.enter_epoch()
    try:
        frame = store.find(key)
        return None if frame is None else os.pread(frame.fd, frame.length, frame.offset)
    finally:
        store.leave_epoch()


async def read_block(store: BlockCache, key: BlockKey) -> tuple[bytes, str]:
    """A block as a client gets it, and how: hit, stored or passed."""
    found = look_up(store, key)
    if found is not None:
        return found, "hit"
    ready = await store.block(key)
    if isinstance(ready, Frame):
        found = look_up(store, key)
        if found is not None:
            return found, "stored"
        ready = await store.block(key, is_copy=True)
    assert isinstance(ready, bytes)
    return ready, "passed"


def look_up_warm(store: BlockCache, key: BlockKey) -> bytes | None:
    """The bytes of a block if a worker would send them now, from memory."""
    store.enter_epoch()
    try:
        frame = store.find(key)
        if frame is None or not store.is_warm(frame, 0, frame.length):
            return None
        return os.pread(frame.fd, frame.length, frame.offset)
    finally:
        store.leave_epoch()


async def read_as_worker(
    store: BlockCache, key: BlockKey, *, is_copy: bool = False
) -> tuple[bytes, str]:
    """A block as a worker sends it, and how: hit, stored or passed."""
    found = None if is_copy else look_up_warm(store, key)
    if found is not None:
        return found, "hit"
    ready = await store.block(key, is_copy=is_copy)
    if isinstance(ready, Frame):
        found = look_up_warm(store, key)
        if found is not None:
            return found, "stored"
        ready = await store.block(key, is_copy=True)
    assert isinstance(ready, bytes)
    return ready, "passed"


def expected_block(key: BlockKey) -> bytes:
    """The expected content of a block."""
    size_bytes = int(key.version.split(":")[1])
    length = min(BLOCK_BYTES, size_bytes - key.number * BLOCK_BYTES)
    return block_data(key.object, key.number, length)


def is_block(data: bytes | None, key: BlockKey) -> bool:
    """Whether the data is correct. Not `==` in an assert: explaining differences takes minutes."""
    return data == expected_block(key)


def keys_of(store: BlockCache, shapes: dict[str, Shape]) -> list[BlockKey]:
    """The keys of every block of these objects."""
    return [
        store.key(name, shape, number)
        for name, shape in shapes.items()
        for number in range(-(-shape.size_bytes // BLOCK_BYTES))
    ]


async def read_all(store: BlockCache, keys: Iterable[BlockKey]) -> dict[str, int]:
    """Read every block, check every byte, and count the results."""
    counts = {"hit": 0, "stored": 0, "passed": 0}
    for key in keys:
        data, how = await read_block(store, key)
        assert is_block(data, key), f"wrong bytes of {key.object} block {key.number} ({how})"
        counts[how] += 1
    return counts


async def wait_indexed(node: CacheNode) -> None:
    """Wait until the index on every disk equals its table."""
    for disk in node.filler._disks.in_service():
        await wait_true(
            lambda disk=disk: not disk._changed_sets and not disk.writes_waiting,
            what="index written",
        )
