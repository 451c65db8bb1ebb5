"""Read blocks and shapes from the object store, and check that they are of the requested version.

A range read whose reply has size and ETag is one request. A reply of another version than the key
raises SourceCut. Shapes are cached for 60 s, those of content-addressed names for an hour.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from headrace.engines.blobs import BlobChanged, BlobMissing, BlobsDown, InvalidBlobKey
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cache.layout import BlockKey, length_of_block, parts_of_version
from headrace.media.errors import SourceCut
from headrace.media.model import BLOCK_BYTES, Shape, content_address
from headrace.media.sources import ObjectReader, object_unknown, shape_of, store_down

SHAPE_KEPT_S: Final = 60.0
IMMUTABLE_SHAPE_KEPT_S: Final = 3600.0
"""Such an object never changes; the lookup only checks that it still exists."""
SHAPES_MAX: Final = 50_000
READS_MAX: Final = 64
"""Concurrent reads of the origin, 16 MiB of blocks. Further reads wait within the time limit."""


class KnownShape(NamedTuple):
    """A shape, its purge generation, and when it was read (monotonic)."""

    shape: Shape
    generation: int
    seen_s: float

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.seen_s

    @property
    def expires_s(self) -> float:
        """When it must be read again, in monotonic seconds."""
        kept_s = IMMUTABLE_SHAPE_KEPT_S if self.shape.is_immutable else SHAPE_KEPT_S
        return self.seen_s + kept_s

    def is_good(self, generation: int) -> bool:
        """Whether it may be used for a request of this purge generation."""
        return time.monotonic() < self.expires_s and self.generation >= generation


class ShapeCache:
    """Shapes by name, at most SHAPES_MAX; the oldest are dropped first."""

    def __init__(self) -> None:
        self._known: dict[str, KnownShape] = {}

    def get(self, name: str, generation: int) -> KnownShape | None:
        """The cached shape if it is still fresh."""
        known = self._known.get(name)
        return known if known is not None and known.is_good(generation) else None

    def keep(self, name: str, known: KnownShape) -> None:
        """Cache this shape."""
        self._known.pop(name, None)
        self._known[name] = known
        if len(self._known) > SHAPES_MAX:
            del self._known[next(iter(self._known))]

    def forget(self, name: str) -> None:
        """Drop the cached shape."""
        self._known.pop(name, None)


class Origin:
    """The object store, or the upstream cluster, as the filler reads it."""

    def __init__(self, blobs: ObjectReader, *, timeout_s: float) -> None:
        self._blobs = blobs
        self._timeout_s = timeout_s
        self._reads = asyncio.Semaphore(READS_MAX)
        self._shapes = ShapeCache()
        self._looks: SingleFlight[tuple[str, int], KnownShape] = SingleFlight()

    async def block(self, key: BlockKey) -> bytes:
        """The bytes of a block. Raises: ObjectUnknown, SourceCut, StoreUnavailable."""
        size_bytes, etag = parts_of_version(key.version)
        length = length_of_block(size_bytes, key.number)
        if not length:
            raise SourceCut(
                f"object {key.object!r} of {size_bytes} bytes has no block {key.number}"
            )
        try:
            async with asyncio.timeout(self._timeout_s), self._reads:
                start = key.number * BLOCK_BYTES
                info, data = await self._blobs.read_part(key.object, start, length, etag=etag)
        except (BlobMissing, InvalidBlobKey) as error:
            self._shapes.forget(key.object)
            raise object_unknown() from error
        except BlobChanged as error:
            self._shapes.forget(key.object)
            raise _replaced(key.object) from error
        except (BlobsDown, TimeoutError) as error:
            raise store_down(error) from error
        if (info.size_bytes, content_address(key.object) or info.etag) != (size_bytes, etag):
            self._shapes.forget(key.object)
            raise _replaced(key.object)
        if len(data) != length:
            raise SourceCut(
                f"the object store gave {len(data)} bytes of {length} of {key.object!r}: ask again"
            )
        return data

    async def shape(self, name: str, generation: int, *, is_fresh: bool = False) -> KnownShape:
        """The shape at this purge generation. Concurrent callers share one lookup.

        Raises: ObjectUnknown, StoreUnavailable.
        """
        if is_fresh:
            self._shapes.forget(name)
        known = self._shapes.get(name, generation)
        if known is not None:
            return known
        return await self._looks.call((name, generation), lambda: self._look(name, generation))

    async def _look(self, name: str, generation: int) -> KnownShape:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s), self._reads:
                info = await self._blobs.info(name)
        except (BlobMissing, InvalidBlobKey) as error:
            raise object_unknown() from error
        except (BlobsDown, TimeoutError) as error:
            raise store_down(error) from error
        known = KnownShape(shape_of(info), generation, began_s)
        self._shapes.keep(name, known)
        return known


def _replaced(name: str) -> SourceCut:
    return SourceCut(f"object {name!r} was replaced since this answer began: ask again")
