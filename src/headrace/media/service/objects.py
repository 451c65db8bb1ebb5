"""Objects, their URLs, ID3 tags and purges.

Tags are rendered once and stored under their hash; nodes read them as any object.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, Unpack
from urllib.parse import quote

from headrace.engines.blobs import BlobInfo, BlobMissing, Blobs, InvalidBlobKey, require_key
from headrace.kernel.config import http_origin
from headrace.kernel.errors import FieldProblem, NotFound
from headrace.media import signing
from headrace.media.cluster.cluster_config import is_reserved
from headrace.media.cluster.purge import Purges
from headrace.media.errors import (
    InvalidObject,
    InvalidPurge,
    ObjectUnknown,
    ReservedKey,
    StoredAtHome,
    WrongContentAddress,
)
from headrace.media.id3 import TagCorrupt, Tags, read_tags, tag_bytes, tag_id, tag_key
from headrace.media.model import (
    LIST_OBJECTS_MAX,
    NAME_MARK,
    MediaConfig,
    MediaFolder,
    MediaObject,
    content_address,
    content_type,
)
from headrace.media.variants import (
    Variant,
    VariantOptions,
    make_variant,
    remove_variants,
    require_allowed,
)

TTL_S_MAX: Final = 366 * 86_400.0
GRID_S_MAX: Final = 7 * 86_400.0
TAGGED_TYPE: Final = "audio/mpeg"
_PREFERRED: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9_])?")
_ID: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SignedUrl:
    """A URL that allows one object until it expires."""

    key: str
    url: str
    expires_at: datetime


class SignOptions(VariantOptions, total=False):
    """Options of `Objects.sign`; None is the same as leaving one out."""

    ttl_s: float | None
    """Seconds for which the URL is valid; the default is `media.url_ttl`."""
    grid_s: float
    """Round the expiry up to a multiple, so that browsers can cache one URL longer."""
    address: str | None
    """Address or network of the clients that may use it."""
    rate: int | None
    """Maximum of bytes per second."""
    tag: str | None
    """Id of an ID3 tag (see `tags.put`) to send in front of the track."""
    trace: str | None
    """User and request of the URL, such as `user=42,request=r7`."""
    prefer: str | None
    """Node (see `entry.node_of`) or data center to name in `media.preferred_url`."""


class Objects:
    """Store, describe and remove objects, and make their URLs.

    `secret` returns the root secret; it is called when the first URL is signed.
    """

    def __init__(
        self,
        blobs: Blobs,
        config: MediaConfig,
        tags: TagStore,
        *,
        secret: Callable[[], str] | None,
    ) -> None:
        self._blobs = blobs
        self._config = config
        self._tags = tags
        self._secret = secret

    @cached_property
    def url_keys(self) -> signing.Keys:
        """The keys that sign URLs and verify them. Raises: WeakSecret."""
        assert self._secret is not None, "this Media has no secret"
        return signing.Keys.derive(self._secret(), self._config.accepted_secrets)

    def url(self, key: str, **options: Unpack[SignOptions]) -> str:
        """The URL of `key`, signed if options are given or `media.signed` requires it.

        The URL of a variant is signed unless its size is in `media.variants`. Does no I/O. The
        options are those of `sign`; a `tag` is not looked up, and `prefer` alone needs no
        signature. Raises: InvalidBlobKey, UnsignableUrl, InvalidVariant, VariantNotAllowed.
        """
        variant = self._variant(key, options)
        others = options.keys() - {"w", "h", "fit", "fm", "prefer"}
        is_listed = variant is None or variant.size in (self._config.variants or ())
        if is_listed and not others and self._config.signed == "off":
            plain = self._plain_url(key, options.get("prefer"))
            return plain + (f"?{variant.query}" if variant is not None else "")
        return self._sign(key, **options).url

    async def sign(self, key: str, **options: Unpack[SignOptions]) -> SignedUrl:
        """A URL that allows GET and HEAD of `key` for `ttl_s` seconds (default: `media.url_ttl`).

        The key need not be stored.

        Raises: InvalidBlobKey, UnsignableUrl with every problem, TagUnknown, InvalidVariant,
        VariantNotAllowed, BlobsDown; StoredAtHome for a `tag` at a site.
        """
        signed = self._sign(key, **options)
        if (tag := options.get("tag")) is not None:
            await self._tags.require(tag)
        return signed

    def target(self, key: str, **options: Unpack[SignOptions]) -> str:
        """The path and query under which every node of the cluster serves `key`."""
        return "/m/" + self.url(key, **options).partition("/m/")[2]

    async def put(self, key: str, data: bytes) -> MediaObject:
        """Store `data` durably, replacing an existing object.

        Raises: StoredAtHome, InvalidBlobKey, ReservedKey, WrongContentAddress, InvalidObject,
        BlobsDown.
        """
        require_own_store(self._config)
        _require_bytes(key, data)
        if is_reserved(require_key(key)):
            raise ReservedKey(f"key {key!r} is reserved: use one outside _headrace/")
        address = content_address(key)
        if address is not None and hashlib.sha256(data).hexdigest() != address:
            # Clients cache such keys for a year, so wrong bytes could not be recalled.
            raise WrongContentAddress(
                f"object {key}: its name is a SHA-256 that these {len(data)} bytes do not have;"
                " use the right hash, or a key outside photos/xx/"
            )
        await self._blobs.put(key, data)
        return await self.info(key)

    async def info(self, key: str) -> MediaObject:
        """Describe the object under `key`. Raises: StoredAtHome, ObjectUnknown, BlobsDown."""
        require_own_store(self._config)
        try:
            if not is_reserved(require_key(key)):
                return self._seen(await self._blobs.info(key))
            cause: Exception | None = None
        except (BlobMissing, InvalidBlobKey) as error:
            cause = error
        raise ObjectUnknown(
            f"no object {key[:80]!r} is stored: list what is with `headrace media ls`"
        ) from cause

    async def ls(self, prefix: str = "", *, objects_max: int = 100) -> list[MediaObject]:
        """The objects in the folder `prefix`, at most `objects_max` (to 1,000), in no order.

        Raises: StoredAtHome, InvalidBlobKey, BlobsDown.
        """
        require_own_store(self._config)
        folder = prefix.rstrip("/")
        if folder:
            require_key(folder)
        found: list[MediaObject] = []
        async for info in self._blobs.list(folder):
            if len(found) >= min(objects_max, LIST_OBJECTS_MAX):
                break
            if not is_reserved(info.key):
                found.append(self._seen(info))
        return found

    async def folder(
        self, prefix: str = "", *, after: str = "", entries_max: int = 100
    ) -> MediaFolder:
        """Subfolders and objects directly in the folder `prefix`, by name, behind the name `after`.

        At most `entries_max` (to 1,000). A folder of a bucket is read whole for each page.

        Raises: StoredAtHome, InvalidBlobKey, BlobsDown.
        """
        require_own_store(self._config)
        folder = prefix.strip("/")
        rows_max = min(max(1, entries_max), LIST_OBJECTS_MAX)
        found = await self._blobs.children(folder, after=after, children_max=rows_max + 1)
        shown = [
            one for one in found[:rows_max] if not is_reserved(f"{folder}/{one.name}".lstrip("/"))
        ]
        above = f"{folder}/" if folder else ""
        return MediaFolder(
            prefix=folder,
            folders=[above + one.name for one in shown if one.size_bytes is None],
            objects=[
                self._seen(BlobInfo(above + one.name, one.size_bytes, one.etag, one.modified_at))
                for one in shown
                if one.size_bytes is not None
            ],
            next_after=found[rows_max - 1].name if len(found) > rows_max else None,
        )

    async def rm(self, key: str) -> None:
        """Remove the object and its variants. Caches serve them until `purges.purge`, or for a
        minute at most.

        Raises: StoredAtHome, ObjectUnknown, BlobsDown.
        """
        await self.info(key)
        await self._blobs.delete(key)
        await remove_variants(self._blobs, [key])

    def _plain_url(self, key: str, prefer: str | None = None) -> str:
        """The unsigned URL of `key`. Raises: InvalidBlobKey, UnsignableUrl."""
        path = signing.PATH_PREFIX + quote(require_key(key), safe="/@~")
        if prefer is not None:
            return self._preferred_base(prefer) + path
        return (self._config.public_url or http_origin(self._config.listen)).rstrip("/") + path

    def _preferred_base(self, name: str) -> str:
        """The URL prefix that names a node or data center. Raises: UnsignableUrl."""
        text = "expected the name of a node or data center, and media.preferred_url to be set"
        template = self._config.preferred_url
        if template is None or _PREFERRED.fullmatch(name) is None:
            raise signing.UnsignableUrl(
                f"this URL cannot be made: prefer: {text}",
                problems=(FieldProblem("prefer", "invalid", text),),
            )
        return template.replace(NAME_MARK, name)

    def _variant(self, key: str, options: SignOptions) -> Variant | None:
        """The variant in `options`. Raises: InvalidVariant, VariantNotAllowed."""
        given = (options.get("w"), options.get("h"), options.get("fit"), options.get("fm"))
        if not any(given):
            return None
        variant = make_variant(*given)
        require_allowed(variant, key, self._config, is_signed=True)
        return variant

    def _sign(self, key: str, **options: Unpack[SignOptions]) -> SignedUrl:
        ttl_s, tag, variant = options.get("ttl_s"), options.get("tag"), self._variant(key, options)
        grid_s = options.get("grid_s", 1.0)
        kept_s = self._config.url_ttl_s if ttl_s is None else ttl_s
        problems = _problems(key, ttl_s=kept_s, grid_s=grid_s, tag=tag)
        signing.UnsignableUrl.require_none(problems, "this URL cannot be made")
        expires_at = signing.expiry_on_grid(time.time(), kept_s, grid_s)
        query = signing.sign(
            self.url_keys,
            signing.PATH_PREFIX + key,
            expires_at=expires_at,
            address=options.get("address"),
            rate=options.get("rate"),
            tag=tag,
            trace=options.get("trace"),
            variant=variant.query if variant is not None else None,
        )
        return SignedUrl(
            key,
            f"{self._plain_url(key, options.get('prefer'))}?{query}",
            datetime.fromtimestamp(expires_at, UTC),
        )

    def _seen(self, info: BlobInfo) -> MediaObject:
        return MediaObject(
            key=info.key,
            size_bytes=info.size_bytes,
            etag=content_address(info.key) or info.etag,
            modified_at=info.modified_at,
            content_type=content_type(info.key),
            url=self.url(info.key),
        )


def require_own_store(config: MediaConfig) -> None:
    """Check that nodes read this cluster's object store. Raises: StoredAtHome."""
    if config.upstream:
        raise StoredAtHome(
            "media.upstream is set, so the nodes here read objects and tags of that cluster"
            f" ({', '.join(config.upstream)}) and not of this object store: do this there"
        )


def _problems(key: str, *, ttl_s: float, grid_s: float, tag: str | None) -> list[FieldProblem]:
    faults = []
    if is_reserved(key):
        faults.append(FieldProblem("key", "invalid", "expected a key outside _headrace/"))
    if not 1 <= ttl_s <= TTL_S_MAX:
        text = f"expected 1 s to {TTL_S_MAX / 86_400:g} days, got {ttl_s:g} s"
        faults.append(FieldProblem("ttl_s", "invalid", text))
    if not 1 <= grid_s <= GRID_S_MAX:
        text = f"expected 1 s to {GRID_S_MAX / 86_400:g} days, got {grid_s:g} s"
        faults.append(FieldProblem("grid_s", "invalid", text))
    if tag is not None and content_type(key) != TAGGED_TYPE:
        text = f"expected none for a key that is no .mp3: {key[:80]!r}"
        faults.append(FieldProblem("tag", "invalid", text))
    return faults


class TagUnknown(NotFound):
    """No ID3 tag of this id is stored."""

    code = "media.tag_unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTag:
    """A tag as users see it; `size_bytes` is the size it adds to a track."""

    id: str
    size_bytes: int
    title: str | None
    artist: str | None
    album: str | None
    buyer: str | None
    cover_bytes: int


class TagStore:
    """Tags that signed URLs put in front of tracks."""

    def __init__(self, blobs: Blobs, config: MediaConfig) -> None:
        self._blobs = blobs
        self._config = config

    async def put(
        self,
        *,
        title: str | None = None,
        artist: str | None = None,
        album: str | None = None,
        cover: bytes | None = None,
        buyer: str | None = None,
    ) -> StoredTag:
        """Store a tag durably. An existing equal tag is kept, so the call is idempotent.

        `cover` is a JPEG or PNG file, `buyer` an id of the application with at most 64 characters.
        Pass the tag's id to `objects.sign(..., tag=id)`. Raises: StoredAtHome; TagInvalid, with
        every problem; BlobsDown.
        """
        require_own_store(self._config)
        tags = Tags(title=title, artist=artist, album=album, cover=cover, buyer=buyer)
        data = await asyncio.to_thread(tag_bytes, tags)
        identifier = tag_id(data)
        key = tag_key(identifier)
        if not await self._is_stored(key, len(data)):
            await self._blobs.put(key, data)
        return _seen(identifier, tags, len(data))

    async def get(self, identifier: str) -> StoredTag:
        """A stored tag. Raises: StoredAtHome, TagUnknown, TagCorrupt, BlobsDown."""
        require_own_store(self._config)
        try:
            data = await self._blobs.get(_key_of_tag(identifier))
        except BlobMissing as error:
            raise _unknown(identifier) from error
        if tag_id(data) != identifier:
            raise TagCorrupt(f"tag {identifier}: the stored bytes have another hash; put it again")
        return _seen(identifier, read_tags(data), len(data))

    async def require(self, identifier: str) -> None:
        """Check that a tag is stored. Raises: StoredAtHome, TagUnknown, BlobsDown."""
        require_own_store(self._config)
        try:
            await self._blobs.info(_key_of_tag(identifier))
        except BlobMissing as error:
            raise _unknown(identifier) from error

    async def rm(self, identifier: str) -> None:
        """Remove a tag; URLs with it get 404. Raises: as `require`."""
        await self.require(identifier)
        await self._blobs.delete(tag_key(identifier))

    async def _is_stored(self, key: str, size_bytes: int) -> bool:
        # Not stored again, because a new file of the same bytes is another version for the caches.
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


def _key_of_tag(identifier: str) -> str:
    """Raises: TagUnknown."""
    if _ID.fullmatch(identifier) is None:
        raise _unknown(identifier)
    return tag_key(identifier)


def _unknown(identifier: str) -> TagUnknown:
    return TagUnknown(f"no tag {identifier[:80]!r} is stored: `headrace media tag put` stores one")


def _require_bytes(key: str, data: object) -> None:
    """Raises: InvalidObject."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidObject(
            f"object {key!r}: expected bytes, got a {type(data).__name__}: pass the content of a"
            " file as bytes, or text.encode()"
        )


@dataclass(frozen=True, slots=True)
class Purged:
    """The purged keys and their new generation; 0: no changes."""

    keys: tuple[str, ...]
    prefix: str | None
    generation: int


class Purging:
    """Purges on all nodes of the cluster."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._purges = Purges(blobs)

    async def purge(
        self, keys: Sequence[str] = (), *, prefix: str | None = None, is_dry_run: bool = False
    ) -> Purged:
        """Purge `keys`, or all keys that begin with `prefix`, from all caches, with their variants.

        Nodes poll every 2 s; a node without access to the object store purges later. No blocks are
        deleted: under the new generation objects are read again and variants made again. The stored
        variants are removed. Raises: InvalidPurge, InvalidBlobKey, BlobsDown.
        """
        if bool(keys) == (prefix is not None):
            given = "both were given" if keys else "neither was given"
            raise InvalidPurge(f"purge: expected keys or one prefix, {given}: pass one of them")
        for key in keys:
            require_key(key)
        if is_dry_run:
            generation = 0
        elif prefix is not None:
            generation = await self._purges.purge_prefix(prefix)
            await remove_variants(self._blobs, [prefix], is_prefix=True)
        else:
            generation = max([await self._purges.purge(key) for key in keys])
            await remove_variants(self._blobs, keys)
        return Purged(tuple(keys), prefix, generation)
