"""What all clients of one worker share, and what is decided of a request before an object is touched.

The way of a request: hop or signature first (a forged one costs one HMAC and touches nothing), then the key,
then who has its bytes: files of a local store, our own disks, a peer, or the object store.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from headrace.engines.blobs import BlobsDown
from headrace.kernel.signing import Key, derive_key
from headrace.media import signing, tracing
from headrace.media.cluster import Cluster, Generations, Hop
from headrace.media.cluster.documents import is_reserved
from headrace.media.cluster.hop import KEY_USE
from headrace.media.cluster.polling import Polled
from headrace.media.cluster.routing import Router
from headrace.media.cors import Cors
from headrace.media.hottest import ASKED
from headrace.media.id3 import OwnTags
from headrace.media.model import ObjectUnknown, Shape
from headrace.media.requests import Request, key_of
from headrace.media.service import Media
from headrace.media.sources import OriginSource, Source, StoreSource, store_down
from headrace.media.store import Store
from headrace.media.worker.channels import Channel

READERS: Final = 4
GRANTED_MAX: Final = 4096
DISKS_WAIT_S: Final = 2.0
"""A worker waits so long for its filler to open the disks; then it serves without, and asks again."""
_ADDRESS_MARK: Final = "&a="


class Admitted(NamedTuple):
    """A request that may be answered."""

    key: str
    grant: signing.Grant
    hop: Hop | None
    trace: tracing.TraceTag | None


class Plane:
    """One worker's own: settings, keys, sources. Made by `open_plane`."""

    def __init__(
        self,
        media: Media,
        own: Source,
        *,
        cluster: Cluster | None = None,
        traces: tracing.TraceLog | None = None,
    ) -> None:
        self.config = media.config
        self.folder = files_of(media)
        self._blobs = media.blobs
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="media-read")
        self.own_tags = OwnTags()
        self.cors = Cors(media.config.cors_origins)
        self.traces = traces
        self._gate = signing.Gate(
            lambda: media.urls.keys, is_required=media.config.signed == "required"
        )
        self._own = own
        self._frames = own if isinstance(own, StoreSource) else None
        self._granted: dict[str, signing.Grant] = {}
        self._cluster = cluster

    def require_store(self) -> None:
        """Return if what is missing from the store's folder is missing indeed. Raises: StoreUnavailable."""
        try:
            self._blobs.require_mounted()
        except BlobsDown as error:
            raise store_down(error) from error

    @property
    def store_source(self) -> StoreSource | None:
        """Our own disks, if there are any."""
        return self._frames

    @property
    def placement(self) -> object:
        """What says who keeps which key: another object as soon as it says anything else."""
        return self._cluster.router.table if self._cluster is not None else None

    def is_kept_here(self, key: str) -> bool:
        """Whether this node is one of those that `placement` names for `key`."""
        return self._cluster is None or self._cluster.router.is_kept_here(key)

    @property
    def router(self) -> Router | None:
        """Who has which key, and how the nodes that ask prove themselves; None without a cluster."""
        return self._cluster.router if self._cluster is not None else None

    def admit(self, request: Request, channel: Channel | None) -> Admitted:
        """Judge hop or signature, then the key; without `channel`, as whoever asks from anywhere.

        Raises: HopRefused, SignatureInvalid, ObjectUnknown.
        """
        hop = self._cluster.router.is_internal(request) if self._cluster is not None else None
        grant = signing.OPEN
        if hop is None:
            grant = self._grant(request.target, channel)
        key = key_of(request.target)
        if hop is None and is_reserved(key):
            raise ObjectUnknown("no object of this key is stored")
        if hop is None:
            ASKED.note(key)
        return Admitted(key, grant, hop, self._trace(request, key, grant))

    def _grant(self, target: str, channel: Channel | None) -> signing.Grant:
        """What a target's signature allows; a player asks the same one for many ranges."""
        now_s = int(time.time())
        grant = self._granted.get(target)
        if grant is not None and (grant.expires_at is None or now_s < grant.expires_at):
            return grant
        is_bound = _ADDRESS_MARK in target
        address = channel.peer() if is_bound and channel is not None else ""
        grant = self._gate.admit(target, now_s=now_s, address=address)
        if not is_bound:
            if len(self._granted) >= GRANTED_MAX:
                self._granted.clear()
            self._granted[target] = grant
        return grant

    def source(self, key: str, admitted: Admitted) -> Source:
        """Who has the bytes of `key`, for a request that was admitted."""
        if self._cluster is None:
            return self._own
        onward = tracing.onward_fields(admitted.trace) if admitted.trace is not None else ()
        return self._cluster.router.source(key, admitted.hop, onward=onward)

    def told(self, admitted: Admitted) -> tuple[tuple[str, str], ...]:
        """What the object store is told of a request that somebody looks into."""
        tag = admitted.trace
        is_wanted = self.traces is not None and tag is not None and self.traces.is_wanted(tag)
        return tracing.onward_fields(tag) if is_wanted and tag is not None else ()

    def proof(
        self, hop: Hop | None, etag: str, start: int, length_bytes: int
    ) -> tuple[tuple[str, str], ...]:
        """The fields that prove an answer to the node that asked; none for a client."""
        if hop is None or self._cluster is None:
            return ()
        return self._cluster.router.reply_fields(hop, etag, start, length_bytes)

    async def fresh_shape(self, source: Source, key: str) -> Shape:
        """The shape as the object store tells it now: what was known was found to be over.

        Raises: ObjectUnknown, StoreUnavailable.
        """
        if isinstance(source, StoreSource):
            return await source.store.shape_now(key)
        return await source.shape(key)

    def enter_turn(self) -> None:
        """Frames are looked at and sent until `leave_turn`."""
        if self._frames is not None:
            self._frames.enter_turn()

    def leave_turn(self) -> None:
        """No frame of this turn is used any more."""
        if self._frames is not None:
            self._frames.leave_turn()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn of its own, for what happens outside the epoll's."""
        self.enter_turn()
        try:
            yield
        finally:
            self.leave_turn()

    def close(self) -> None:
        """End the threads that read."""
        self.readers.shutdown(wait=False)

    def _trace(self, request: Request, key: str, grant: signing.Grant) -> tracing.TraceTag | None:
        is_carried = "traceparent" in request.fields or "baggage" in request.fields or grant.trace
        if not is_carried and (self.traces is None or not self.traces.is_on):
            return None
        tag = tracing.read_trace(request.fields, key, grant.trace)
        return tag if self.traces is None else self.traces.follow(tag)


@asynccontextmanager
async def open_plane(
    media: Media, *, number: int, run: Path | None, boot: str, listen: tuple[str, int]
) -> AsyncIterator[Plane]:
    """What worker `number` of a node needs, open; `run` is the node's folder, `listen` what it serves on, `boot`
    names this start of the node to its store.

    Without `run` there are neither disks nor a cluster: files, or the object store. Raises: OSError, WeakSecret.
    """
    config = media.config
    own: Source = OriginSource(media.blobs, timeout_s=config.origin_timeout_s)
    if run is None:
        plane = Plane(media, own)
        try:
            yield plane
        finally:
            plane.close()
        return
    generations, watched = Generations(), Polled(tracing.TRACE)
    store: Store | None = None
    if config.disks:
        store = Store.open(
            run,
            worker=number,
            boot=boot,
            timeout_s=config.origin_timeout_s,
            generation=generations.generation,
        )
        own = StoreSource(store)
    cluster = Cluster(
        config, media.blobs,
        own=own, keys=_hop_keys(media), folder=run, also=[watched], generations=generations,
    )  # fmt: skip
    traces = tracing.TraceLog(lambda: watched.value.watches, node=config.node or "")
    plane = Plane(media, own, cluster=cluster, traces=traces)
    try:
        await cluster.start(listen)
        if store is not None:
            await store.wait_told(within_s=DISKS_WAIT_S)
        yield plane
    finally:
        await cluster.close()
        if store is not None:
            await store.close()
        plane.close()


def files_of(media: Media) -> Path | None:
    """The folder whose files are sent as they are; None where a node keeps blocks or the store is no folder."""
    is_plain = not media.config.disks and media.config.node is None
    return media.blobs.folder if is_plain else None


def _hop_keys(media: Media) -> list[Key]:
    assert media.secret is not None, "a node of a cluster is given the root secret"
    secrets = [media.secret(), *media.config.accepted_secrets]
    return [derive_key(secret, KEY_USE) for secret in secrets]
