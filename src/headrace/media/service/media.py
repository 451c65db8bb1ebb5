"""`Media`: where an object is served and what is stored; the other verbs are its attributes.

app.media.url("tracks/a.mp3")          await app.media.put(key, data)
await app.media.purges.purge([key])    await app.media.warm([key])
await app.media.nodes.drain("n1")      await app.media.partitions.plan(lost=["n1"])
await app.media.disks.verify()         await app.media.hottest()     of the node whose data folder this is
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Unpack

from headrace.engines.blobs import BlobInfo, BlobMissing, Blobs, InvalidBlobKey, require_key
from headrace.media.cluster.documents import is_reserved
from headrace.media.errors import ReservedKey
from headrace.media.model import (
    LIST_OBJECTS_MAX,
    MediaConfig,
    MediaObject,
    ObjectUnknown,
    WrongContentAddress,
    content_address,
    content_type,
)
from headrace.media.service.disks import Disks
from headrace.media.service.hottest import HotObject, hottest_of
from headrace.media.service.nodes import Nodes
from headrace.media.service.partitions import Partitions
from headrace.media.service.purging import Purging
from headrace.media.service.tags import TagStore
from headrace.media.service.traces import Traces
from headrace.media.service.urls import SignedUrl, SignOptions, Urls
from headrace.media.service.warming import Warmed, Warming


class Media:
    """Objects served by range. Opens nothing by itself: `blobs` belongs to the caller.

    `secret` gives the root secret once it is needed; `folder` is where the node of this machine keeps
    its sockets.
    """

    keeps_rows: ClassVar[bool] = False
    """Nothing of this room is in PostgreSQL, so its commands need the object store alone."""

    def __init__(
        self,
        blobs: Blobs,
        config: MediaConfig,
        *,
        secret: Callable[[], str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.blobs = blobs
        self.config = config
        self.secret = secret
        self.folder = folder

    @cached_property
    def nodes(self) -> Nodes:
        """The cluster's nodes: who is there, their weight and state."""
        return Nodes(self.blobs)

    @cached_property
    def partitions(self) -> Partitions:
        """Who owns a key, and what a change would do to each node's load."""
        return Partitions(self.nodes)

    @cached_property
    def purges(self) -> Purging:
        """What the caches of all nodes must forget."""
        return Purging(self.blobs)

    @cached_property
    def warming(self) -> Warming:
        """Fetching before it is asked for; `warm` is its verb."""
        return Warming(self.blobs, self.nodes, self.config, self._target)

    @cached_property
    def disks(self) -> Disks:
        """The disks of the node whose data folder this is."""
        return Disks(self.folder)

    @cached_property
    def urls(self) -> Urls:
        """Makes and signs URLs; its `keys` are what nodes check them with."""
        return Urls(self.config, self.secret)

    @cached_property
    def tags(self) -> TagStore:
        """ID3 tags that signed URLs name."""
        return TagStore(self.blobs)

    @cached_property
    def traces(self) -> Traces:
        """What all nodes log the requests of."""
        return Traces(self.blobs)

    def url(self, key: str, **options: Unpack[SignOptions]) -> str:
        """Where `key` is served; signed if options are given or `media.signed` requires it. Does no I/O.

        Options as of `sign`; a `tag` is not looked up. Raises: InvalidBlobKey, UnsignableUrl.
        """
        if not options and self.config.signed == "off":
            return self.urls.plain(key)
        return self.urls.sign(key, **options).url

    async def sign(self, key: str, **options: Unpack[SignOptions]) -> SignedUrl:
        """A URL that allows GET and HEAD of `key` for `ttl_s` (`media.url_ttl`), whether the key is stored or not.

        `grid_s`: the end is rounded up to a multiple of it, so the same URL comes again for so long and browsers
        have it cached. `address`: only from this address or network. `rate`: at most so many bytes a second.
        `tag`: the id of an ID3 tag (`tags.put`) that the track begins with. `trace`: whom it is for, such as
        `user=42,request=r7`. Raises: InvalidBlobKey, UnsignableUrl with every fault, TagUnknown, BlobsDown.
        """
        signed = self.urls.sign(key, **options)
        if (tag := options.get("tag")) is not None:
            await self.tags.require(tag)
        return signed

    async def put(self, key: str, data: bytes) -> MediaObject:
        """Store `data`, durably; replaces an object of that key.

        Raises: InvalidBlobKey, ReservedKey, WrongContentAddress, BlobsDown.
        """
        if is_reserved(key):
            raise ReservedKey(f"key {key!r} is the product's own: use one outside _headrace/")
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
            if not is_reserved(key):
                return self._seen(await self.blobs.info(key))
            cause: Exception | None = None
        except (BlobMissing, InvalidBlobKey) as error:
            cause = error
        raise ObjectUnknown(
            f"no object {key[:80]!r} is stored: list what is with `headrace media ls`"
        ) from cause

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
            if not is_reserved(info.key):
                found.append(self._seen(info))
        return found

    async def rm(self, key: str) -> None:
        """Remove the object; what caches hold of it is served until `purges.purge`, at most a minute.

        Raises: ObjectUnknown, BlobsDown.
        """
        await self.info(key)
        await self.blobs.delete(key)

    async def warm(self, keys: Sequence[str]) -> Warmed:
        """Have every node that owns one of `keys` fetch it now, whole.

        Raises: ObjectUnknown, InvalidBlobKey, NoNodes, BlobsDown.
        """
        return await self.warming.warm(keys)

    async def hottest(self, *, objects_max: int = 20) -> Sequence[HotObject]:
        """What clients ask the node of this data folder for most, the hottest first; at most 100.

        Raises: NodeNotHere.
        """
        return await hottest_of(self.folder, objects_max=objects_max)

    def _target(self, key: str) -> str:
        """Path and query at which any node of the cluster serves `key` to us."""
        return "/m/" + self.url(key).partition("/m/")[2]

    def _seen(self, info: BlobInfo) -> MediaObject:
        return MediaObject(
            key=info.key,
            size_bytes=info.size_bytes,
            etag=content_address(info.key) or info.etag,
            modified_at=info.modified_at,
            content_type=content_type(info.key),
            url=self.url(info.key),
        )
