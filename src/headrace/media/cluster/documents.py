"""Small shared truths of the media cluster: versioned JSON documents in the object store.

The object store is the only thing that all nodes see, and it can compare and set (If-Match; for a folder a
lock file), so it holds what they must agree on: who is a member, what was purged, what is traced. Each
document counts its versions; a change reads, changes, and puts back only if nobody did so in between. A
change must give the same result when it is made twice: a put whose answer was lost is made again.

These keys are never served, listed or put by users.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from headrace.engines.blobs import BlobChanged, BlobMissing, Blobs
from headrace.kernel.errors import Corrupt, Unavailable

RESERVED: Final = "_headrace"
PREFIX: Final = f"{RESERVED}/media/"
TRIES_MAX: Final = 12
PAUSE_S: Final = 0.05
DOCUMENT_BYTES_MAX: Final = 4 * 2**20


class DocumentDamaged(Corrupt):
    """A document that the cluster shares is no such document."""

    code = "media.document_damaged"


class DocumentContended(Unavailable):
    """Others changed a shared document each time this change was about to be stored."""

    code = "media.document_contended"


class Versioned(Protocol):
    """What a document holds: a frozen msgspec struct that counts its versions."""

    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=Versioned)


def is_reserved(key: str) -> bool:
    """Whether `key` is the cluster's own and none of the users'."""
    return key == RESERVED or key.startswith(f"{RESERVED}/")


@dataclass(frozen=True, slots=True)
class Kind(Generic[V]):
    """A document's name, its type, and what it is before anybody wrote it."""

    name: str
    type: type[V]
    empty: V

    @property
    def key(self) -> str:
        """Where it is stored."""
        return f"{PREFIX}{self.name}.json"

    def decode(self, data: bytes) -> V:
        """Raises: DocumentDamaged."""
        try:
            if len(data) > DOCUMENT_BYTES_MAX:
                raise msgspec.ValidationError(f"{len(data)} bytes are too many")
            return msgspec.json.decode(data, type=self.type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DocumentDamaged(
                f"{self.key}: not a valid document ({error}): remove it from the object store, and"
                " the nodes put back what they knew last"
            ) from error


class Document(Generic[V]):
    """A document in the object store, to be read and changed."""

    def __init__(self, blobs: Blobs, kind: Kind[V]) -> None:
        self._blobs = blobs
        self.kind = kind

    async def read(self) -> V:
        """What is stored now. Raises: DocumentDamaged, BlobsDown."""
        return (await self._find())[0]

    async def restore(self, newer: V) -> V:
        """Put back `newer` where the store has an older version or none, as after a restored backup.

        Raises: as `change`.
        """
        return await self.change(
            lambda old: newer if old.version <= newer.version else old, after=newer.version
        )

    async def change(self, change: Callable[[V], V], *, after: int = 0) -> V:
        """Store `change` of the newest version as the next one; unchanged contents store nothing.

        The version stored is higher than `after` as well.

        Raises: DocumentDamaged, DocumentContended, BlobsDown, and what `change` raises.
        """
        for attempt in range(TRIES_MAX):
            old, etag = await self._find()
            new = change(old)
            if new == old:
                return old
            new = with_version(new, max(old.version, after) + 1)
            try:
                await self._blobs.put_if(self.kind.key, msgspec.json.encode(new), etag=etag)
            except BlobChanged:
                await asyncio.sleep(random.uniform(0, PAUSE_S * (attempt + 1)))
            else:
                return new
        raise DocumentContended(
            f"{self.kind.key}: {TRIES_MAX} changes of others came first: try again", retry_after_s=1
        )

    async def _find(self) -> tuple[V, str | None]:
        try:
            found = await self._blobs.read(self.kind.key)
        except BlobMissing:
            return self.kind.empty, None
        assert found is not None
        data, etag = found
        return self.kind.decode(data), etag


def with_version(value: V, version: int) -> V:
    """A copy of `value` that is this version."""
    changed: Any = msgspec.structs.replace(value, version=version)  # type: ignore[type-var]
    copy: V = changed
    return copy
