"""Read blocks and shapes from the object store for the filler.

A range read whose reply has size and ETag is one request. A reply of another version than the key
raises SourceCut. Shapes are cached for 60 s, those of content-addressed names for an hour.

While the store does not answer, the last shape of an object is used for longer, so that its stored
blocks are served. Purges need the store too, so none is missed.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from headrace.kernel.single_flight import SingleFlight
from headrace.media.cache.layout import BlockKey, length_of_block, parts_of_version
from headrace.media.errors import ObjectUnknown, SourceCut, StoreUnavailable
from headrace.media.model import BLOCK_BYTES
from headrace.media.sources import KnownShape, ObjectReader, OriginSource, ShapeCache

SHAPE_KEPT_S: Final = 60.0
IMMUTABLE_SHAPE_KEPT_S: Final = 3600.0
"""Such an object never changes; the lookup only checks that it still exists."""
STALE_S: Final = 5.0
"""For how long an old shape is used after the store did not answer; then it is requested again."""
STALE_WAIT_S: Final = 1.0
"""How long a request with an old shape waits for the store."""
SHAPES_MAX: Final = 50_000
READS_MAX: Final = 64
"""Concurrent reads of the origin, 16 MiB of blocks."""


class Origin:
    """The object store, or the upstream cluster, as the filler reads it."""

    def __init__(self, blobs: ObjectReader, *, timeout_s: float) -> None:
        self._source = OriginSource(blobs, timeout_s=timeout_s, reads_max=READS_MAX)
        self._shapes = ShapeCache(SHAPES_MAX)
        self._looks: SingleFlight[tuple[str, int], KnownShape] = SingleFlight()
        self._down_until_s = 0.0
        """Until then old shapes are used without a request (monotonic)."""

    async def block(self, key: BlockKey) -> bytes:
        """The bytes of a block. Raises: ObjectUnknown, SourceCut, StoreUnavailable."""
        version = parts_of_version(key.version)
        length = length_of_block(version[0], key.number)
        if not length:
            raise SourceCut(
                f"object {key.object!r} of {version[0]} bytes has no block {key.number}"
            )
        try:
            return await self._source.read(key.object, version, key.number * BLOCK_BYTES, length)
        except (ObjectUnknown, SourceCut):
            self._shapes.forget(key.object)
            raise

    async def shape(self, name: str, generation: int, *, is_fresh: bool = False) -> KnownShape:
        """The shape at this purge generation, or the last one if the store does not answer.

        Concurrent callers share one lookup. Raises: ObjectUnknown, StoreUnavailable.
        """
        if is_fresh:
            self._shapes.forget(name)
        known = self._shapes.get(name, generation)
        if known is not None:
            return known
        old = self._shapes.last(name, generation)
        if old is not None and time.monotonic() < self._down_until_s:
            return self._stale(old)
        wait_s = None if old is None else STALE_WAIT_S
        try:
            async with asyncio.timeout(wait_s):
                request = name, generation
                return await self._looks.call(request, lambda: self._look(name, generation))
        except (StoreUnavailable, TimeoutError):
            if old is None:
                raise
        self._down_until_s = time.monotonic() + STALE_S
        return self._stale(old)

    def _stale(self, old: KnownShape) -> KnownShape:
        return old._replace(expires_s=time.monotonic() + STALE_S)

    async def _look(self, name: str, generation: int) -> KnownShape:
        began_s = time.monotonic()
        shape = await self._source.shape(name)
        kept_s = IMMUTABLE_SHAPE_KEPT_S if shape.is_immutable else SHAPE_KEPT_S
        known = KnownShape(shape, generation, began_s + kept_s)
        self._shapes.keep(name, known)
        return known
