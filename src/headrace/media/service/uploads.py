"""Resumable uploads: parts are stored durably as they arrive, and joined to one object at the end.

An upload is a record in the object store and a chain of parts. A part is named after its offset and
is created only where no part is yet. So the chain is the state: the next offset is its end, also
after `kill -9` of any process; of two writers one gets the offset and the other a conflict. No lock
and no other state exists, and every process that reaches the object store may continue.

The last part joins them. The record of a finished upload stays until it would have expired, so a
client that did not receive the last answer learns that the object is stored.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from headrace.engines.blobs import BlobChanged, BlobInfo, BlobMissing, Blobs, require_key
from headrace.engines.joined_objects import BlobCorrupt
from headrace.kernel.errors import Conflict, LimitExceeded, NotFound, TooLarge
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import bound, counter
from headrace.kernel.resilience import wait_event
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cluster.cluster_config import PREFIX, is_reserved
from headrace.media.errors import InvalidObject, ReservedKey, WrongContentAddress
from headrace.media.model import MediaConfig, content_address
from headrace.media.service.objects import require_own_store

PART_BYTES: Final = 8 * 2**20
"""What a killed process loses at most of one request."""
EARLY_PART_BYTES: Final = 2**20
EARLY_PART_S: Final = 10.0
"""Bytes of a slow client are stored in smaller parts after this time."""
PARTS_MAX: Final = 10_000
WRITERS_MAX: Final = 16
"""Requests of a process that hold a part in memory; others wait."""
SWEEP_EVERY_S: Final = 600.0
OPEN, DONE, PARTS = f"{PREFIX}uploads", f"{PREFIX}uploads-done", f"{PREFIX}upload-parts"
_ID: Final = re.compile(r"[0-9a-f]{32}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
RECORD_MAX: Final = 64 * 1024
OUTCOMES: Final = ("created", "finished", "corrupt", "expired", "removed")
UPLOADS: Final = counter("media_uploads_total", "Resumable uploads, by event.", outcome=OUTCOMES)
_COUNTS: Final = {o: bound(UPLOADS, "media_uploads_total", outcome=o) for o in OUTCOMES}
_often: Final = SparseLogger(logger(__name__))


class UploadUnknown(NotFound):
    """No upload of this id exists: it expired, was removed, or never existed."""

    code = "media.upload_unknown"


class UploadConflict(Conflict):
    """The offset is not the end of the stored bytes, or another request writes to the upload."""

    code = "media.upload_conflict"


class UploadTooLarge(TooLarge):
    """The upload is over its length or over media.upload_max, or has too many small parts."""

    code = "media.upload_too_large"


class TooManyUploads(LimitExceeded):
    """As many uploads are unfinished as media.uploads_max allows."""

    code = "media.too_many_uploads"


class UploadAborted(Exception):
    """The client went away before the end of its request."""


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored about an upload."""

    key: str
    size_bytes: int
    sha256: str | None
    metadata: str


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload. `metadata` is the client's; `offset_bytes` of its bytes are stored."""

    id: str
    key: str
    size_bytes: int
    offset_bytes: int
    is_done: bool
    expires_at: datetime
    metadata: str


class _Found(NamedTuple):
    """A record, its object, and the stored bytes with their parts."""

    record: UploadRecord
    info: BlobInfo
    offset: int
    parts: list[str]
    is_done: bool


class Uploads:
    """Create uploads, append bytes, finish and remove them."""

    def __init__(self, blobs: Blobs, config: MediaConfig) -> None:
        self._blobs = blobs
        self._config = config
        self._writers = asyncio.Semaphore(WRITERS_MAX)
        self._finishing: SingleFlight[str, None] = SingleFlight()

    async def create(
        self,
        key: str,
        size_bytes: int,
        *,
        sha256: str | None = None,
        metadata: str = "",
    ) -> Upload:
        """Begin an upload of `size_bytes` to `key`; `sha256` is required of the whole.

        Raises: StoredAtHome, InvalidBlobKey, ReservedKey, InvalidObject, WrongContentAddress,
        UploadTooLarge, TooManyUploads, BlobsDown.
        """
        require_own_store(self._config)
        if is_reserved(require_key(key)):
            raise ReservedKey(f"key {key!r} is reserved: use one outside _headrace/")
        address = content_address(key)
        if sha256 is not None and _SHA256.fullmatch(sha256) is None:
            raise InvalidObject(f"sha256: expected 64 digits 0-9 a-f, got {sha256[:80]!r}")
        if address is not None and sha256 not in (None, address):
            raise WrongContentAddress(f"object {key}: its name is a SHA-256, not {sha256}")
        most = self._config.upload_max_bytes
        if size_bytes > most:
            raise UploadTooLarge(
                f"the upload has {size_bytes} bytes, at most {most} are accepted: send a smaller"
                " file, or raise media.upload_max"
            )
        await self._require_few()
        identifier = secrets.token_hex(16)
        record = UploadRecord(
            key=key, size_bytes=size_bytes, sha256=sha256 or address, metadata=metadata
        )
        await self._blobs.put(f"{OPEN}/{identifier}", msgspec.json.encode(record))
        _COUNTS["created"].inc()
        if not size_bytes:
            await self._finish(identifier, record, [])
        return await self.get(identifier)

    async def get(self, identifier: str) -> Upload:
        """An upload and its offset. If all bytes are stored, it is finished first.

        Raises: UploadUnknown, BlobCorrupt, BlobsDown.
        """
        found = await self._find(identifier)
        record, is_done = found.record, found.offset == found.record.size_bytes
        if is_done and not found.is_done:
            await self._finish(identifier, record, found.parts)
        expires_at = datetime.fromtimestamp(self._expiry_s(found.info), UTC)
        return Upload(
            identifier,
            record.key,
            record.size_bytes,
            found.offset,
            is_done,
            expires_at,
            record.metadata,
        )

    async def append(self, identifier: str, offset: int, chunks: AsyncIterator[bytes]) -> int:
        """Append bytes at `offset`, and return the new offset, up to which all bytes are durable.

        If `chunks` raise UploadAborted, what was received is stored. The last byte finishes the
        upload. Raises: UploadUnknown, UploadConflict, UploadTooLarge, BlobCorrupt, UploadAborted,
        BlobsDown.
        """
        found = await self._find(identifier)
        size_bytes, parts = found.record.size_bytes, found.parts
        if offset != found.offset:
            text = f"upload {identifier} has {found.offset} bytes, not {offset}: continue there"
            raise UploadConflict(text)
        async with self._writers:
            writer = _PartWriter(
                self._blobs, identifier, size_bytes, offset=offset, parts_count=len(parts)
            )
            try:
                async for chunk in chunks:
                    await writer.add(chunk)
            except UploadAborted:
                await writer.flush()
                raise
            await writer.flush()
        if writer.offset == size_bytes and not found.is_done:
            await self._finish(identifier, found.record, [*parts, *writer.parts])
        return writer.offset

    async def rm(self, identifier: str) -> None:
        """Remove an upload; a stored object stays. Raises: UploadUnknown, BlobsDown."""
        await self._find(identifier)
        await self._forget(identifier)
        await self._blobs.delete(f"{DONE}/{identifier}")
        _COUNTS["removed"].inc()

    async def sweep(self) -> int:
        """Remove uploads that expired, and parts without an upload. Return how many."""
        ended: set[str] = set()
        for folder in (OPEN, DONE):
            async for info in self._blobs.list(folder):
                if self._is_expired(info):
                    ended.add(info.key.rpartition("/")[2])
        async for info in self._blobs.list(PARTS):
            if self._is_expired(info):
                ended.add(info.key.split("/")[-2])
        for identifier in ended:
            await self._blobs.delete(f"{DONE}/{identifier}")
            await self._forget(identifier)
            _COUNTS["expired"].inc()
        return len(ended)

    async def run_sweeps(self, stop: asyncio.Event) -> None:
        """Sweep every ten minutes until `stop`."""
        while not stop.is_set():
            try:
                await self.sweep()
            except Exception as error:  # noqa: BLE001 - the store may be down; the next sweep repeats
                _often.warning("uploads_not_swept", error=repr(error))
            await wait_event(stop, SWEEP_EVERY_S)

    async def _require_few(self) -> None:
        count, most = 0, self._config.uploads_max
        async for info in self._blobs.list(OPEN):
            count += not self._is_expired(info)
        if count >= most:
            raise TooManyUploads(
                f"{count} uploads are not finished, at most {most} may be: remove some, or raise"
                " media.uploads_max",
                retry_after_s=60,
            )

    async def _find(self, identifier: str) -> _Found:
        """Raises: UploadUnknown, BlobsDown."""
        for folder in (OPEN, DONE) if _ID.fullmatch(identifier) else ():
            try:
                info, data = await self._blobs.read_part(f"{folder}/{identifier}", 0, RECORD_MAX)
            except BlobMissing:
                continue
            if self._is_expired(info):
                break
            record = msgspec.json.decode(data, type=UploadRecord)
            if folder == DONE:
                return _Found(record, info, record.size_bytes, [], is_done=True)
            return _Found(record, info, *await self._chain(identifier), is_done=False)
        raise UploadUnknown(f"no upload {identifier[:40]!r} exists now: begin a new one")

    async def _chain(self, identifier: str) -> tuple[int, list[str]]:
        """The end of the stored bytes and the keys of their parts."""
        found = [info async for info in self._blobs.list(f"{PARTS}/{identifier}")]
        end, parts = 0, list[str]()
        for info in sorted(found, key=lambda info: info.key):
            if int(info.key.rpartition("/")[2]) == end:
                end += info.size_bytes
                parts.append(info.key)
        return end, parts

    async def _finish(self, identifier: str, record: UploadRecord, parts: list[str]) -> None:
        await self._finishing.call(identifier, lambda: self._join(identifier, record, parts))

    async def _join(self, identifier: str, record: UploadRecord, parts: list[str]) -> None:
        """Join the parts; a crash at any line leaves an upload that is finished again."""
        try:
            await self._blobs.join(
                record.key, parts, size_bytes=record.size_bytes, sha256=record.sha256
            )
        except BlobCorrupt:
            await self._forget(identifier)
            _COUNTS["corrupt"].inc()
            raise
        except BlobMissing:
            # Another process may have finished it meanwhile.
            if not (await self._find(identifier)).is_done:
                raise
            return
        await self._blobs.put(f"{DONE}/{identifier}", msgspec.json.encode(record))
        await self._forget(identifier)
        _COUNTS["finished"].inc()

    async def _forget(self, identifier: str) -> None:
        await self._blobs.delete(f"{OPEN}/{identifier}")
        await self._blobs.clear(f"{PARTS}/{identifier}")

    def _expiry_s(self, info: BlobInfo) -> float:
        return info.modified_at.timestamp() + self._config.upload_ttl_s

    def _is_expired(self, info: BlobInfo) -> bool:
        return self._expiry_s(info) <= time.time()


class _PartWriter:
    """Cuts the bytes of one request into parts and stores them."""

    def __init__(
        self, blobs: Blobs, identifier: str, size_bytes: int, *, offset: int, parts_count: int
    ) -> None:
        self._blobs = blobs
        self._id = identifier
        self._size_bytes = size_bytes
        self._parts_before = parts_count
        self._stored_s = time.monotonic()
        self.offset = offset
        self._held = bytearray()
        self.parts: list[str] = []

    async def add(self, chunk: bytes) -> None:
        """Take bytes; store them once they are enough.

        Raises: UploadConflict, UploadTooLarge, BlobsDown.
        """
        self._held += chunk
        if self.offset + len(self._held) > self._size_bytes:
            raise UploadTooLarge(
                f"the request goes beyond the {self._size_bytes} bytes of the upload"
            )
        is_slow = time.monotonic() - self._stored_s > EARLY_PART_S
        least = EARLY_PART_BYTES if is_slow else PART_BYTES
        if len(self._held) >= least:
            await self.flush()

    async def flush(self) -> None:
        """Store what is held. Raises: UploadConflict, UploadTooLarge, BlobsDown."""
        if not self._held:
            return
        if self._parts_before + len(self.parts) >= PARTS_MAX:
            raise UploadTooLarge(
                f"the upload has {PARTS_MAX} parts: begin a new one, and send larger chunks"
            )
        key = f"{PARTS}/{self._id}/{self.offset:015d}"
        try:
            await self._blobs.put_if(key, bytes(self._held), etag=None)
        except BlobChanged as error:
            raise UploadConflict(
                f"another request writes to upload {self._id}: read its offset and continue there"
            ) from error
        self.parts.append(key)
        self.offset += len(self._held)
        self._held.clear()
        self._stored_s = time.monotonic()
