"""Concatenate stored objects to one, in constant memory, and check its hash before it is stored.

A folder gets one durable file, a bucket one multipart upload. Both appear completely or not at all.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.store import from_url

from headrace.engines.bucket_endpoint import allows_http
from headrace.engines.durable_files import Check, rename_durably, write_durably
from headrace.kernel.errors import InvalidInput

CHUNK_BYTES_MIN: Final = 8 * 2**20
CHUNKS_MAX: Final = 9_000
"""S3 takes at most 10,000 parts of a multipart upload."""
CHUNKS_AT_ONCE: Final = 4
_MIB: Final = 2**20


class BlobCorrupt(InvalidInput):
    """The bytes do not have the SHA-256 that was given for them."""

    code = "blobs.corrupt"


def open_bucket(url: str, *, retry: Any = None, **options: Any) -> Any:
    """A client of a bucket with these options of its connections."""
    # They replace those of the environment, so this one is repeated.
    client: Any = {**options, "allow_http": allows_http()}
    return from_url(url, client_options=client, retry_config=retry)


def request_limit_s(size_bytes: int, timeout_s: float) -> float:
    """Longest time of one request of an upload of `size_bytes`."""
    return timeout_s + CHUNKS_AT_ONCE * _chunk_bytes(size_bytes) / _MIB


def _chunk_bytes(size_bytes: int) -> int:
    return max(CHUNK_BYTES_MIN, size_bytes // CHUNKS_MAX + 1)


class JoinedObjects:
    """The bytes of the objects `parts` of a store, one after the other.

    With `sha256`, storing them fails if their hash is another one.
    """

    def __init__(self, store: Any, parts: Sequence[str], sha256: str | None) -> None:
        self._store, self._parts, self._sha256 = store, parts, sha256
        self._digest = hashlib.sha256()
        self._is_read = False

    def put_to_folder(self, folder: Path, key: str, check: Check | None) -> None:
        """Store the bytes as a file; blocks. Raises: BlobCorrupt, OSError."""
        if not self._parts:
            write_durably(folder, key, self._pieces(), check=check)
            return
        # Beside the parts, so that what a crash leaves is removed with them.
        draft = f"{self._parts[0].rpartition('/')[0]}/.joined.{secrets.token_hex(4)}"
        write_durably(folder, draft, self._pieces(), check=check)
        try:
            rename_durably(folder, draft, key, check=check)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with (folder / draft).open("rb") as file:
                pieces = iter(partial(file.read, CHUNK_BYTES_MIN), b"")
                write_durably(folder, key, pieces, check=check)

    async def put_to_bucket(self, url: str, key: str, size_bytes: int, timeout_s: float) -> None:
        """Store the bytes by a multipart upload. Raises: BlobCorrupt, the errors of obstore.

        The client ends each request itself, because it removes the parts of an upload that failed,
        but not of one that is cancelled.
        """
        if not self._parts:
            self._require_hash()
            await obstore.put_async(self._store, key, b"", use_multipart=False)
            return
        limit = timedelta(seconds=request_limit_s(size_bytes, timeout_s))
        retry = {"retry_timeout": timedelta(seconds=timeout_s)}
        try:
            await obstore.put_async(
                open_bucket(url, retry=retry, timeout=limit),
                key,
                self._pieces_async(),
                use_multipart=True,
                chunk_size=_chunk_bytes(size_bytes),
                max_concurrency=CHUNKS_AT_ONCE,
            )
        except obstore.exceptions.BaseError:
            # obstore replaces the error of an iterator.
            if self._is_read:
                self._require_hash()
            raise

    def _pieces(self) -> Iterator[bytes]:
        for part in self._parts:
            data = bytes(obstore.get(self._store, part).bytes())
            self._digest.update(data)
            yield data
        self._require_hash()

    async def _pieces_async(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            found = await obstore.get_async(self._store, part)
            data = bytes(await found.bytes_async())
            await asyncio.to_thread(self._digest.update, data)
            yield data
        self._require_hash()

    def _require_hash(self) -> None:
        self._is_read = True
        found = self._digest.hexdigest()
        if self._sha256 is not None and found != self._sha256:
            raise BlobCorrupt(
                f"the stored bytes have the SHA-256 {found} instead of {self._sha256}: send them"
                " again"
            )
