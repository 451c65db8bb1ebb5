"""The verbs of the media room: where an object is served, and what is stored."""

from __future__ import annotations

import hashlib
from typing import ClassVar
from urllib.parse import quote

from penstock.engines.blobs import BlobInfo, BlobMissing, Blobs, InvalidBlobKey, require_key
from penstock.media.model import (
    LIST_OBJECTS_MAX,
    MediaConfig,
    MediaObject,
    ObjectUnknown,
    WrongContentAddress,
    content_address,
    content_type,
)


class Media:
    """Objects served by range. Opens nothing by itself: `blobs` belongs to the caller."""

    keeps_rows: ClassVar[bool] = False
    """Nothing of this room is in PostgreSQL, so its commands need the object store alone."""

    def __init__(self, blobs: Blobs, config: MediaConfig) -> None:
        self.blobs = blobs
        self.config = config

    def url(self, key: str) -> str:
        """Where `key` is served. Raises: InvalidBlobKey."""
        host, port = self.config.listen
        own = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        base = (self.config.public_url or own).rstrip("/")
        return f"{base}/m/{quote(require_key(key), safe='/@~')}"

    async def put(self, key: str, data: bytes) -> MediaObject:
        """Store `data`, durably; replaces an object of that key.

        Raises: InvalidBlobKey, WrongContentAddress, BlobsDown.
        """
        address = content_address(key)
        if address is not None and hashlib.sha256(data).hexdigest() != address:
            # Such keys are cached by clients for a year: other bytes under them could not be recalled.
            raise WrongContentAddress(
                f"object {key}: its name is a SHA-256 that these {len(data)} bytes do not have;"
                " use the right hash, or a key outside photos/xx/yy/"
            )
        await self.blobs.put(key, data)
        return await self.info(key)

    async def info(self, key: str) -> MediaObject:
        """What is stored under `key`. Raises: ObjectUnknown, BlobsDown."""
        try:
            return self._seen(await self.blobs.info(key))
        except (BlobMissing, InvalidBlobKey) as error:
            raise ObjectUnknown(
                f"no object {key[:80]!r} is stored: list what is with `penstock media ls`"
            ) from error

    async def ls(self, prefix: str = "", *, objects_max: int = 100) -> list[MediaObject]:
        """Objects in the folder `prefix`, at most `objects_max` (to 1,000), in no order.

        Raises: InvalidBlobKey, BlobsDown.
        """
        folder = prefix.rstrip("/")
        if folder:
            require_key(folder)
        found: list[MediaObject] = []
        async for info in self.blobs.list(folder):
            if len(found) >= min(objects_max, LIST_OBJECTS_MAX):
                break
            found.append(self._seen(info))
        return found

    async def rm(self, key: str) -> None:
        """Remove the object. Raises: ObjectUnknown, BlobsDown."""
        await self.info(key)
        await self.blobs.delete(key)

    def _seen(self, info: BlobInfo) -> MediaObject:
        return MediaObject(
            key=info.key,
            size_bytes=info.size_bytes,
            etag=content_address(info.key) or info.etag,
            modified_at=info.modified_at,
            content_type=content_type(info.key),
            url=self.url(info.key),
        )
