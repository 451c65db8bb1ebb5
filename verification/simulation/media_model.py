"""Models of the object store and of a node's disks, for the scenario `media`."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, TypeVar

from headrace.engines.blobs import BlobChanged, BlobInfo, BlobMissing, BlobsDown, require_key
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cache.disk_files import Frame
from headrace.media.cache.layout import BlockKey, Digests, version_of
from headrace.media.cache.origin import Origin
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.sources import KnownShape, ShapeCache
from verification.simulation.loop import CURRENT
from verification.simulation.world import BEGIN, Unreachable, World

T = TypeVar("T")
STORE: Final = "store"
STORE_TIMEOUT_S: Final = 15.0
SLOW_MAX_S: Final = 12.0
BLOCKS_KEPT: Final = 60
"""Blocks on the disk of a node."""


@lru_cache(maxsize=64)
def bytes_of(key: str, number: int, size_bytes: int) -> bytes:
    """The bytes of a version of an object."""
    return random.Random(f"{key}/{number}").randbytes(size_bytes)


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in the store."""

    data: bytes
    info: BlobInfo


class StoreModel:
    """An object store with compare-and-set: one copy, strict consistency, and faults of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects: dict[str, Stored] = {}
        self.is_down = False
        self.slow_s = 0.0
        self.lost_share = 0.0
        """The share of replies that are lost."""
        self.block_reads: Counter[tuple[str, str, int]] = Counter()
        """Reads of objects by key, ETag and number of the block."""
        self.on_change: Callable[[str, Stored | None], None] = lambda _key, _stored: None
        self._chance = world.stream("store")
        self._etags = 0

    async def reach(self, act: Callable[[], T]) -> T:
        """Run `act` in the store for the current process. Raises: BlobsDown."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await self._exchange(act)
        except (TimeoutError, Unreachable) as error:
            raise BlobsDown("the object store does not answer", retry_after_s=1) from error

    async def _exchange(self, act: Callable[[], T]) -> T:
        network, client = self.world.network, CURRENT.get().name
        await network.trip(client, STORE, timeout_s=STORE_TIMEOUT_S)
        await asyncio.sleep(self._chance.uniform(0, self.slow_s) + self._chance.uniform(0, 0.01))
        if self.is_down:
            raise BlobsDown("the object store fails", retry_after_s=1)
        try:
            result: T | Exception = act()
        except (BlobMissing, BlobChanged) as error:
            result = error
        if self._chance.random() < self.lost_share:
            raise BlobsDown("the reply was lost", retry_after_s=1)
        await network.trip(STORE, client, timeout_s=STORE_TIMEOUT_S)
        if isinstance(result, Exception):
            raise result
        return result

    def put(self, key: str, data: bytes) -> str:
        """Store an object. Return its ETag."""
        self._etags += 1
        modified_at = BEGIN + timedelta(seconds=self.world.now_s)
        info = BlobInfo(key, len(data), f"e{self._etags}", modified_at)
        stored = self.objects[key] = Stored(data, info)
        self.on_change(key, stored)
        return info.etag

    def delete(self, key: str) -> None:
        """Delete an object."""
        if self.objects.pop(key, None) is not None:
            self.on_change(key, None)

    def find(self, key: str) -> Stored:
        """Raises: BlobMissing."""
        found = self.objects.get(key)
        if found is None:
            raise BlobMissing(f"no object {key!r}")
        return found


class SimulatedBlobs:
    """Has the methods of `headrace.engines.blobs.Blobs` that media calls."""

    folder = None

    def __init__(self, model: StoreModel) -> None:
        self._model = model

    def require_mounted(self) -> None:
        """As `Blobs.require_mounted`: a bucket needs no mount."""

    async def put(self, key: str, data: bytes) -> None:
        """As `Blobs.put`."""
        require_key(key)
        await self._model.reach(lambda: self._model.put(key, data))

    async def put_if(self, key: str, data: bytes, *, etag: str | None) -> None:
        """As `Blobs.put_if`."""

        def act() -> None:
            found = self._model.objects.get(key)
            if (found.info.etag if found is not None else None) != etag:
                raise BlobChanged(f"object {key!r} has changed")
            self._model.put(key, data)

        await self._model.reach(act)

    async def delete(self, key: str) -> None:
        """As `Blobs.delete`."""
        await self._model.reach(lambda: self._model.delete(key))

    async def read(self, key: str, *, unless: str | None = None) -> tuple[bytes, str] | None:
        """As `Blobs.read`."""
        found = await self._model.reach(lambda: self._model.find(key))
        return None if found.info.etag == unless else (found.data, found.info.etag)

    async def read_part(
        self, key: str, start: int, length_bytes: int, **_: str
    ) -> tuple[BlobInfo, bytes]:
        """As `Blobs.read_part`."""

        def act() -> tuple[BlobInfo, bytes]:
            found = self._model.find(key)
            self._model.block_reads[key, found.info.etag, start // BLOCK_BYTES] += 1
            return found.info, found.data[start : start + length_bytes]

        return await self._model.reach(act)

    async def info(self, key: str) -> BlobInfo:
        """As `Blobs.info`."""
        return (await self._model.reach(lambda: self._model.find(key))).info


class NodeDisk:
    """The blocks that a node keeps; they survive its processes. The oldest are evicted."""

    def __init__(self, name: str) -> None:
        self.hash_key = name.encode().ljust(32, b".")
        self._frames: dict[bytes, Frame] = {}
        self._data: dict[int, bytes] = {}
        self._next = 0

    def find(self, digest: bytes) -> Frame | None:
        """The frame of a block."""
        return self._frames.get(digest)

    def data(self, fd: int) -> bytes:
        """The bytes of a frame."""
        return self._data[fd]

    def put(self, digest: bytes, data: bytes) -> Frame:
        """Store a block."""
        self._next += 1
        frame = Frame(self._next, 0, len(data), 0, self._next, 0)
        self._frames[digest], self._data[frame.fd] = frame, data
        if len(self._frames) > BLOCKS_KEPT:
            oldest = next(iter(self._frames))
            del self._data[self._frames.pop(oldest).fd]
        return frame


class CacheModel:
    """Has the methods of `headrace.media.cache.BlockCache` and its filler, in one process.

    The reads of the origin, their single-flight, block keys and cached shapes are the product's.
    """

    def __init__(self, disk: NodeDisk, origin: Origin, generation: Callable[[str], int]) -> None:
        self._disk, self._origin, self._generation = disk, origin, generation
        self._digests = Digests(disk.hash_key)
        self._shapes = ShapeCache(1000)
        self._fills: SingleFlight[bytes, bytes] = SingleFlight()
        self._looks: SingleFlight[Any, Shape] = SingleFlight()

    def key(self, name: str, shape: Shape, number: int) -> BlockKey:
        """As BlockCache."""
        return self._digests.key(name, version_of(shape, self._generation(name)), number)

    def enter_epoch(self) -> None:
        """As BlockCache; frames change between callbacks only."""

    leave_epoch = enter_epoch

    def find(self, key: BlockKey, *, is_visit: bool = True) -> Frame | None:
        """As BlockCache."""
        return self._disk.find(key.digest)

    stored_frame = find

    def is_warm(self, _frame: Frame, _offset: int, _length: int) -> bool:
        """As BlockCache."""
        return True

    async def block(self, key: BlockKey, *, is_copy: bool = False) -> Frame | bytes:
        """As BlockCache."""
        frame = self._disk.find(key.digest)
        if frame is None:
            data = await self._fills.call(key.digest, lambda: self._fill(key))
            frame = self._disk.find(key.digest)
            if frame is None:
                return data
        return self._disk.data(frame.fd) if is_copy else frame

    async def _fill(self, key: BlockKey) -> bytes:
        data = await self._origin.block(key)
        self._disk.put(key.digest, data)
        return data

    def known_shape(self, name: str) -> Shape | None:
        """As BlockCache."""
        known = self._shapes.get(name, self._generation(name))
        return known.shape if known is not None else None

    async def shape(self, name: str, *, is_fresh: bool = False) -> Shape:
        """As BlockCache."""
        known = None if is_fresh else self.known_shape(name)
        if known is not None:
            return known
        generation = self._generation(name)
        request = name, generation, is_fresh
        return await self._looks.call(request, lambda: self._look(name, generation, is_fresh))

    async def _look(self, name: str, generation: int, is_fresh: bool) -> Shape:  # noqa: FBT001
        found = await self._origin.shape(name, generation, is_fresh=is_fresh)
        fresh_s = found.expires_s - time.monotonic()
        self._shapes.keep(name, KnownShape(found.shape, generation, time.monotonic() + fresh_s))
        return found.shape

    def forget_shape(self, name: str) -> None:
        """As BlockCache."""
        self._shapes.forget(name)
