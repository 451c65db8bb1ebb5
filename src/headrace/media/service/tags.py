"""ID3 tags in the object store: rendered once, named by their bytes, read by nodes as any object."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Final

from headrace.engines.blobs import BlobMissing, Blobs
from headrace.kernel.errors import NotFound
from headrace.media.id3 import TagCorrupt, Tags, read_tags, tag_bytes, tag_id, tag_key

_ID: Final = re.compile(r"[0-9a-f]{64}")


class TagUnknown(NotFound):
    """No ID3 tag of that id is stored."""

    code = "media.tag_unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTag:
    """A tag as people see it; `size_bytes` is what it adds to a track."""

    id: str
    size_bytes: int
    title: str | None
    artist: str | None
    album: str | None
    buyer: str | None
    cover_bytes: int


class TagStore:
    """Tags to be written in front of tracks; `Media.tags`."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def put(
        self,
        *,
        title: str | None = None,
        artist: str | None = None,
        album: str | None = None,
        cover: bytes | None = None,
        buyer: str | None = None,
    ) -> StoredTag:
        """Store a tag, durably; one that is there already stays, so a call may be repeated.

        `cover` is a JPEG or PNG file, `buyer` an id of the caller's of at most 64 characters. Its id goes into
        `Media.sign(..., tag=id)`. Raises: TagInvalid, with every fault; BlobsDown.
        """
        tags = Tags(title=title, artist=artist, album=album, cover=cover, buyer=buyer)
        data = await asyncio.to_thread(tag_bytes, tags)
        identifier = tag_id(data)
        key = tag_key(identifier)
        if not await self._is_stored(key, len(data)):
            await self._blobs.put(key, data)
        return _seen(identifier, tags, len(data))

    async def get(self, identifier: str) -> StoredTag:
        """A stored tag. Raises: TagUnknown, TagCorrupt, BlobsDown."""
        data = await self._read(identifier)
        if tag_id(data) != identifier:
            raise TagCorrupt(f"tag {identifier}: the stored bytes have another hash; put it again")
        return _seen(identifier, read_tags(data), len(data))

    async def require(self, identifier: str) -> None:
        """Look whether it is stored. Raises: TagUnknown, BlobsDown."""
        if _ID.fullmatch(identifier) is None:
            raise _unknown(identifier)
        try:
            await self._blobs.info(tag_key(identifier))
        except BlobMissing as error:
            raise _unknown(identifier) from error

    async def rm(self, identifier: str) -> None:
        """Remove a tag: URLs that name it are answered 404 from then on. Raises: TagUnknown, BlobsDown."""
        await self.require(identifier)
        await self._blobs.delete(tag_key(identifier))

    async def _read(self, identifier: str) -> bytes:
        if _ID.fullmatch(identifier) is None:
            raise _unknown(identifier)
        try:
            return await self._blobs.get(tag_key(identifier))
        except BlobMissing as error:
            raise _unknown(identifier) from error

    async def _is_stored(self, key: str, size_bytes: int) -> bool:
        # Not put again: another file of the same bytes is another version to the caches.
        try:
            return (await self._blobs.info(key)).size_bytes == size_bytes
        except BlobMissing:
            return False


def _seen(identifier: str, tags: Tags, size_bytes: int) -> StoredTag:
    return StoredTag(
        id=identifier,
        size_bytes=size_bytes,
        title=tags.title,
        artist=tags.artist,
        album=tags.album,
        buyer=tags.buyer,
        cover_bytes=len(tags.cover or b""),
    )


def _unknown(identifier: str) -> TagUnknown:
    return TagUnknown(
        f"no tag {identifier[:80]!r} is stored: put it with `headrace media tag put`, which prints its id"
    )
