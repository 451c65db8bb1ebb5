"""The state shared by all requests of a worker, and the decisions before an object is read.

First hop or signature are checked (a forged one costs one HMAC), then the key, then the source is
chosen: files of a local store, the node's disks, a peer, or the object store.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from headrace.engines.blobs import BlobsDown
from headrace.kernel.signing import Key, derive_key
from headrace.media import signing, tracing
from headrace.media.answers import Cors
from headrace.media.cache import BlockCache
from headrace.media.cluster import Cluster, Generations, Hop
from headrace.media.cluster.cluster_config import FollowedDocument, is_reserved
from headrace.media.cluster.hop import KEY_USE
from headrace.media.errors import ObjectUnknown
from headrace.media.hottest import HOTTEST
from headrace.media.id3 import OwnTags
from headrace.media.model import Shape
from headrace.media.requests import Request, key_of
from headrace.media.service import Media
from headrace.media.sources import CacheSource, OriginSource, Source, store_down
from headrace.media.variants import (
    Variant,
    names_variant,
    negotiate,
    parse_hop_variant,
    parse_variant,
    require_allowed,
)
from headrace.media.worker.socket_io import Channel
from headrace.media.worker.variants import VariantMaker

READERS: Final = 4
GRANTED_MAX: Final = 4096
DISKS_WAIT_S: Final = 2.0
"""How long a worker waits for its filler to open the disks before it serves without them."""
TABLE_WAIT_S: Final = 5.0
"""How long it waits for the owners of keys, which take 0.4 to 0.8 s of an idle core."""
_ADDRESS_MARK: Final = "&a="


class Admitted(NamedTuple):
    """A request that may be answered."""

    key: str
    rights: signing.UrlRights
    hop: Hop | None
    trace: tracing.TraceTag | None
    variant: Variant | None = None
    is_direct: bool = False
    """Whether another cluster reads it, and needs the origin's present version of it."""


class Epoch:
    """A span in which frames may be looked up and sent, but not used after it."""

    def __init__(self, own: CacheSource | None) -> None:
        self._own = own

    def __enter__(self) -> None:
        if self._own is not None:
            self._own.enter_epoch()

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.leave_epoch()


class RequestContext:
    """Settings, keys and sources of one worker. Made by `open_request_context`."""

    def __init__(
        self,
        media: Media,
        own: Source,
        *,
        cluster: Cluster | None,
        traces: tracing.TraceLog,
        generations: Generations,
        run: Path | None,
    ) -> None:
        """Raises: ExtraMissing."""
        self.config = media.config
        self._generations = generations
        self.folder = served_folder(media)
        self._blobs = media.blobs
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="media-read")
        self.own_tags = OwnTags()
        self.cors = Cors(media.config.cors_origins)
        self.traces = traces
        self._gate = signing.Gate(
            lambda: media.objects.url_keys, is_required=media.config.signed == "required"
        )
        self._own = own
        self._origin = OriginSource(media.origin, timeout_s=media.config.origin_timeout_s)
        self.cache_source = own if isinstance(own, CacheSource) else None
        """The node's own disks, if there are any."""
        self.epoch = Epoch(self.cache_source)
        self.router = cluster.router if cluster is not None else None
        self.hop_gate = cluster.gate if cluster is not None else None
        """Admits requests of other nodes; None without a cluster, as `router`."""
        self._checked: dict[str, signing.UrlRights] = {}
        self.variants = VariantMaker(
            media,
            run=run,
            source=lambda key: own if self.router is None else self.router.source(key, None),
            router=self.router,
            generations=generations,
        )

    def require_store(self) -> None:
        """Check that the store's folder is mounted, if an object is missing.

        Raises: StoreUnavailable.
        """
        try:
            self._blobs.require_mounted()
        except BlobsDown as error:
            raise store_down(error) from error

    @property
    def purges_version(self) -> int:
        """The version of the purge list; it rises with every purge."""
        return self._generations.value.version

    def url_keys(self) -> Mapping[str, Key]:
        """The keys of signed URLs by id; none if no signature was checked nor is required yet."""
        return self._gate.known_keys()

    def admit(self, request: Request, channel: Channel | None) -> Admitted:
        """Check hop or signature, then the key. Without `channel` the client's address is unknown.

        Raises: HopRefused, SignatureInvalid, ObjectUnknown, InvalidVariant, VariantNotAllowed.
        """
        hop = self.hop_gate.hop_of(request) if self.hop_gate is not None else None
        rights = signing.OPEN
        if hop is None:
            rights = self._rights(request.target, channel)
        key = key_of(request.target)
        if hop is None and is_reserved(key) and not rights.is_tier:
            raise ObjectUnknown("no object of this key is stored")
        if hop is None:
            HOTTEST.note(key)
        is_direct = rights.is_tier and (is_reserved(key) or "if-match" in request.fields)
        variant = self._variant(request, key, rights, hop) if "?" in request.target else None
        return Admitted(key, rights, hop, self._trace(request, key, rights), variant, is_direct)

    def _variant(
        self, request: Request, key: str, rights: signing.UrlRights, hop: Hop | None
    ) -> Variant | None:
        """The requested variant of an image. Raises: InvalidVariant, VariantNotAllowed."""
        query = request.target.partition("?")[2]
        if hop is not None:
            if self.config.variants is None:
                raise ObjectUnknown("this node makes no variants")
            return parse_hop_variant(query)
        is_signed = rights.expires_at is not None
        fields = rights.variant if is_signed else query
        if not fields or not names_variant(fields):
            return None
        variant = parse_variant(fields)
        require_allowed(variant, key, self.config, is_signed=is_signed)
        return negotiate(variant, request.fields)

    def _rights(self, target: str, channel: Channel | None) -> signing.UrlRights:
        """The permissions of a target, cached because players repeat it for many ranges."""
        now_s = int(time.time())
        rights = self._checked.get(target)
        if rights is not None and (rights.expires_at is None or now_s < rights.expires_at):
            return rights
        is_bound = _ADDRESS_MARK in target
        address = channel.peer() if is_bound and channel is not None else ""
        rights = self._gate.admit(target, now_s=now_s, address=address)
        if not is_bound:
            if len(self._checked) >= GRANTED_MAX:
                self._checked.clear()
            self._checked[target] = rights
        return rights

    def source(self, key: str, admitted: Admitted) -> Source:
        """The source of `key` for an admitted request."""
        if admitted.is_direct:
            return self._origin
        if self.router is None:
            return self._own
        onward = tracing.onward_fields(admitted.trace) if admitted.trace is not None else ()
        return self.router.source(key, admitted.hop, onward=onward)

    def trace_fields(self, admitted: Admitted) -> tuple[tuple[str, str], ...]:
        """The trace fields for reads of the object store."""
        tag = admitted.trace
        return tracing.onward_fields(tag) if tag is not None and self.traces.is_wanted(tag) else ()

    def proof(
        self, hop: Hop | None, etag: str, start: int, length_bytes: int
    ) -> tuple[tuple[str, str], ...]:
        """The fields that sign an answer to another node; none for a client."""
        if hop is None or self.hop_gate is None:
            return ()
        return self.hop_gate.reply_fields(hop, etag, start, length_bytes)

    async def shape(self, source: Source, key: str, *, is_fresh: bool) -> Shape:
        """The shape; `is_fresh`: read from the object store now, as the cached one is outdated.

        Raises: ObjectUnknown, StoreUnavailable.
        """
        if is_fresh and isinstance(source, CacheSource):
            return await source.store.shape(key, is_fresh=True)
        return await source.shape(key)

    async def close(self) -> None:
        """End the reading threads and the work on variants."""
        await self.variants.close()
        self.readers.shutdown(wait=False)

    def _trace(
        self, request: Request, key: str, rights: signing.UrlRights
    ) -> tracing.TraceTag | None:
        is_carried = "traceparent" in request.fields or "baggage" in request.fields or rights.trace
        if not is_carried and not self.traces.is_on:
            return None
        return self.traces.follow(tracing.read_trace(request.fields, key, rights.trace))


@asynccontextmanager
async def open_request_context(
    media: Media, *, number: int, run: Path | None, boot: str, listen: tuple[str, int]
) -> AsyncIterator[RequestContext]:
    """Open the context of worker `number` of a node.

    `run` is the node's folder, `listen` its address, and `boot` identifies this start of the node.
    Without `run` there are neither disks nor a cluster. Raises: OSError, WeakSecret.
    """
    config = media.config
    own: Source = OriginSource(media.origin, timeout_s=config.origin_timeout_s)
    generations, watched = Generations(), FollowedDocument(tracing.TRACE)
    cluster: Cluster | None = None
    store: BlockCache | None = None
    if run is not None and config.disks:
        store = BlockCache(
            run,
            worker=number,
            boot=boot,
            timeout_s=config.origin_timeout_s,
            generation=generations.generation,
        )
        own = CacheSource(store)
    if run is not None:
        cluster = Cluster(
            config,
            media.blobs,
            own=own,
            keys=_hop_keys(media),
            folder=run,
            also=[watched],
            generations=generations,
            upstream=media.upstream,
        )
    traces = tracing.TraceLog(lambda: watched.value.watches, node=config.node or "")
    context = RequestContext(
        media, own, cluster=cluster, traces=traces, generations=generations, run=run
    )
    try:
        if cluster is not None:
            await cluster.start(listen)
        if store is not None:
            await store.wait_for_disks(within_s=DISKS_WAIT_S)
        if cluster is not None:
            await cluster.wait_for_table(within_s=TABLE_WAIT_S)
        yield context
    finally:
        await context.close()
        if cluster is not None:
            await cluster.close()
        if store is not None:
            await store.close()
        await media.close_upstream()


def served_folder(media: Media) -> Path | None:
    """The folder whose files are sent directly; None with disks, a cluster or a remote origin."""
    is_plain = not media.config.disks and media.config.node is None and media.upstream is None
    return media.blobs.folder if is_plain else None


def _hop_keys(media: Media) -> list[Key]:
    assert media.secret is not None, "a node of a cluster is given the root secret"
    secrets = [media.secret(), *media.config.accepted_secrets]
    return [derive_key(secret, KEY_USE) for secret in secrets]
