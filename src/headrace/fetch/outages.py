"""The object store while it is away: asked itself, before a seller's host is asked for nothing.

A photo whose bytes cannot be stored is a request for nothing, and each later look would repeat it: 590
requests for 31 photos were seen in an outage of 70 s. So after a put that failed the next photo first
writes a probe object. While that fails too no photo is begun, for 5 s, then longer, up to 60 s. A put
that fails for its own sake costs the others a probe and no wait.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from headrace.engines.blobs import Blobs, BlobsDown
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

PROBE_KEY: Final = "headrace-probe/photos"
PROBE_BYTES: Final = 256 * 1024
"""As large as a photo: a full disk still takes an empty file."""
AWAY: Final = Backoff(first_s=5, max_s=60)
_LOG: Final = logger(__name__)


class StoreWatch:
    """Puts objects, and knows whether the store took the last one."""

    def __init__(self, blobs: Blobs, away: Backoff = AWAY) -> None:
        self._blobs = blobs
        self._away = away
        self._is_doubted = False
        self._closed_until_s = 0.0
        self._probes_failed = 0
        self._probing = asyncio.Lock()

    async def put(self, key: str, data: bytes) -> None:
        """Store `data`. Raises: BlobsDown."""
        try:
            await self._blobs.put(key, data)
        except BlobsDown:
            self._is_doubted = True
            raise

    async def require_up(self) -> None:
        """Return when the store can be written, as far as known. Raises: BlobsDown with the wait."""
        if not self._is_doubted:
            return
        async with self._probing:
            left_s = self._closed_until_s - time.monotonic()
            if left_s <= 0:
                left_s = await self._probe()
        if left_s > 0:
            raise BlobsDown(
                f"the object store took nothing at the last look: asked again in {left_s:.1f} s",
                retry_after_s=left_s,
            )

    async def _probe(self) -> float:
        """Write the probe object; seconds until the next look, 0 where the store took it."""
        if not self._is_doubted:
            # Another photo, whose probe this one waited for, found it up.
            return 0.0
        try:
            await self._blobs.put(PROBE_KEY, bytes(PROBE_BYTES))
        except BlobsDown as error:
            self._probes_failed += 1
            wait_s = self._away.delay_s(self._probes_failed)
            self._closed_until_s = time.monotonic() + wait_s
            _LOG.warning("photos_wait_for_store", wait_s=round(wait_s, 1), error=error.text)
            return wait_s
        self._is_doubted = False
        self._probes_failed = 0
        return 0.0
