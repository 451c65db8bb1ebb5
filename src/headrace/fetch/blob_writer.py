"""From a received body to a stored photo: check the format, decode a sample, store the bytes once.

Bytes are stored durably under their hash before any row refers to them. A content that is already
recorded is neither decoded nor written again. Large bodies are read into memory a few at a time;
the downloads of a worker bound the others.

A photo whose bytes cannot be stored is a wasted request to a seller's host. After a failed put,
the circuit breaker writes a probe object before the next photo. While the probe fails, no photo is
requested: for 5 s, then longer, up to 60 s. A put that fails for its own reasons costs the other
photos one probe and no wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from headrace.engines.blobs import Blobs, BlobsDown
from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.curl import HELD_BYTES_MAX
from headrace.fetch.decoding import Decoder
from headrace.fetch.download import Download
from headrace.fetch.images import inspect_image
from headrace.fetch.model import photo_key
from headrace.fetch.store.outcomes import NewPhoto
from headrace.kernel.batching import Batcher
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

LARGE_AT_ONCE: Final = 4
"""Bodies over 1 MiB in memory at once while they are checked and stored."""
PROBE_KEY: Final = "headrace-probe/photos"
PROBE_BYTES: Final = 256 * 1024
"""Size of a photo: a full disk still accepts an empty file."""
PROBE_BACKOFF: Final = Backoff(first_s=5, max_s=60)
_LOG: Final = logger(__name__)


class BlobWriter:
    """Checks bodies and stores their bytes."""

    def __init__(self, postgres: Postgres, blobs: Blobs, *, decode_share: float) -> None:
        self._postgres = postgres
        self._store = StoreBreaker(blobs)
        self._decoder = Decoder(decode_share)
        self._large: asyncio.Semaphore | None = None
        self._known: Batcher[str, bool] = Batcher(self._read_known)

    async def require_up(self) -> None:
        """Return if the object store accepts writes, as far as known.

        Raises: BlobsDown with the wait.
        """
        await self._store.require_up()

    async def write(self, found: Download) -> NewPhoto:
        """Check a downloaded body and store its bytes.

        Raises: NotAPhoto, BlobsDown, DecoderDown.
        """
        if found.size_bytes <= HELD_BYTES_MAX:
            return await self._write(found)
        if self._large is None:
            self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        async with self._large:
            return await self._write(found)

    async def close(self) -> None:
        """Stop the decoder process."""
        await self._decoder.close()

    async def _write(self, found: Download) -> NewPhoto:
        assert found.body is not None
        assert found.sha256 is not None
        data = found.body.read()
        image = inspect_image(data)
        key = photo_key(found.sha256, image.format)
        if not await self._known.submit(found.sha256):
            await self._decoder.check(data, image)
            await self._store.put(key, data)
        return NewPhoto(found.sha256, key, image.format, len(data), image.width, image.height)

    async def _read_known(self, hashes: list[str]) -> list[bool]:
        known = await store.outcomes.known_photos(self._postgres, hashes)
        return [sha256 in known for sha256 in hashes]


class StoreBreaker:
    """Circuit breaker of the object store: a failed put is followed by probes."""

    def __init__(self, blobs: Blobs, probe_backoff: Backoff = PROBE_BACKOFF) -> None:
        self._blobs = blobs
        self._probe_backoff = probe_backoff
        self._is_suspect = False
        self._closed_until_s = 0.0
        self._probes_failed = 0
        self._probing = asyncio.Lock()

    async def put(self, key: str, data: bytes) -> None:
        """Store `data`. Raises: BlobsDown."""
        try:
            await self._blobs.put(key, data)
        except BlobsDown:
            self._is_suspect = True
            raise

    async def require_up(self) -> None:
        """Return if the store accepts writes, as far as known. Raises: BlobsDown with the wait."""
        if not self._is_suspect:
            return
        async with self._probing:
            left_s = self._closed_until_s - time.monotonic()
            if left_s <= 0:
                left_s = await self._probe()
        if left_s > 0:
            raise BlobsDown(
                f"the object store failed the last probe write: next probe in {left_s:.1f} s",
                retry_after_s=left_s,
            )

    async def _probe(self) -> float:
        """Write the probe object; return the seconds until the next probe, 0 on success."""
        if not self._is_suspect:
            # The probe of another photo, for which this one waited, succeeded.
            return 0.0
        try:
            await self._blobs.put(PROBE_KEY, bytes(PROBE_BYTES))
        except BlobsDown as error:
            self._probes_failed += 1
            wait_s = self._probe_backoff.delay_s(self._probes_failed)
            self._closed_until_s = time.monotonic() + wait_s
            _LOG.warning("object_store_down", wait_s=round(wait_s, 1), error=error.text)
            return wait_s
        self._is_suspect = False
        self._probes_failed = 0
        return 0.0
