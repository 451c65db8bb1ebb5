"""From a received body to a stored photo: is it one, is it sound, are its bytes kept.

Bytes are stored durably before anybody writes a row about them, under their hash and once: a content that
is recorded already is neither decoded nor written again. Large bodies are read into memory a few at a
time; the others of a worker are bounded by its downloads.
"""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.engines.blobs import Blobs
from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.body import HELD_BYTES_MAX
from headrace.fetch.decoding import Decoder
from headrace.fetch.download import Download
from headrace.fetch.gathering import Gathering
from headrace.fetch.images import inspect_image
from headrace.fetch.model import photo_key
from headrace.fetch.outages import StoreWatch
from headrace.fetch.store.photos import NewPhoto

LARGE_AT_ONCE: Final = 4
"""Bodies over 1 MiB held in memory at once, while they are checked and stored."""


class Keeping:
    """Checks bodies and stores their bytes."""

    def __init__(self, postgres: Postgres, blobs: Blobs, *, decode_share: float) -> None:
        self._postgres = postgres
        self._store = StoreWatch(blobs)
        self._decoder = Decoder(decode_share)
        self._large: asyncio.Semaphore | None = None
        self._known: Gathering[str, bool] = Gathering(self._read_known)

    async def require_up(self) -> None:
        """Return when bytes can be stored, as far as known. Raises: BlobsDown with the wait."""
        await self._store.require_up()

    async def keep(self, found: Download) -> NewPhoto:
        """Check the body of `found` and store its bytes. Raises: NotAPhoto; BlobsDown, DecoderDown."""
        if found.size_bytes <= HELD_BYTES_MAX:
            return await self._keep(found)
        if self._large is None:
            self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        async with self._large:
            return await self._keep(found)

    async def close(self) -> None:
        """End the process that decodes."""
        await self._decoder.close()

    async def _keep(self, found: Download) -> NewPhoto:
        assert found.body is not None
        assert found.sha256 is not None
        data = found.body.read()
        image = inspect_image(data)
        key = photo_key(found.sha256, image.format)
        if not await self._known.ask(found.sha256):
            await self._decoder.check(data, image)
            await self._store.put(key, data)
        return NewPhoto(found.sha256, key, image.format, len(data), image.width, image.height)

    async def _read_known(self, hashes: list[str]) -> list[bool]:
        known = await store.photos.known_photos(self._postgres, hashes)
        return [sha256 in known for sha256 in hashes]
