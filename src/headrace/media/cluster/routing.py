"""Routing: where a worker gets an object from.

This node serves a key from its own disks if it is one of the replicas of the key's partition
(`media.partitions`), if no replica is usable, or if the request came by a hop. Otherwise it sends
one authenticated hop to a replica: first those of its own data center, then in the partition's
order, without peers that `health` excludes, doubted ones last. So the keys of a dead node go to
their second replicas, which are spread over all others. A failed hop is repeated with the next
replica and finally with the origin; clients notice nothing.

Of a peer only shapes are cached, for two seconds and only for the key's current generation. Its
bytes are passed through as they are received. Concurrent requests for the same bytes share one
request. Bytes are passed on only from a signed answer of the requested version and span (see
`hop`). If a peer is lost within a block, the rest is requested from the next one, in the same
version.

The native data plane requests blocks that it has descriptions of by itself (`native/peers.h`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.metrics import FINE_BUCKETS_S, bound, counter, histogram, observe_many
from headrace.kernel.resilience import BackgroundTasks
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cluster.hop import (
    REPLY_FIELD,
    Hop,
    HopSigner,
    PeerLost,
    PeerRequest,
    PeerResponse,
    answer_span,
    shape_of_answer,
    target_of,
)
from headrace.media.cluster.peers import Peer
from headrace.media.cluster.purge import Generations
from headrace.media.errors import ObjectUnknown, SourceCut, VariantRefused, VariantsBusy
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.partitions import PartitionTable, partition_of
from headrace.media.sources import KnownShape, PartialBlock, ShapeCache, Source, Span

log = logger(__name__)
T = TypeVar("T")
SHAPE_KEPT_S: Final = 2.0
SHAPES_MAX: Final = 20_000
AHEAD_TRIES: Final = 4
AHEAD_PAUSE_S: Final = 0.05
OUTCOMES: Final = (
    "ok",
    "missing",
    "changed",
    "ahead",
    "busy",
    "unproven",
    "refused",
    "failed",
)
_OTHER_OUTCOMES: Final = {403: "refused", 409: "ahead", 503: "busy"}
HOPS: Final = counter(
    "media_hops_total", "Requests made to other nodes, by outcome.", outcome=OUTCOMES
)
HOP_SECONDS: Final = histogram(
    "media_hop_seconds",
    "From a request to another node to its complete answer.",
    buckets_s=FINE_BUCKETS_S,
)
_COUNTED: Final = {o: bound(HOPS, "media_hops_total", outcome=o) for o in OUTCOMES}


class BlockRequest(NamedTuple):
    """The bytes of a block to fetch."""

    key: str
    etag: str
    number: int
    span: Span


class PeerFetch(NamedTuple):
    """A fetch in progress: its shape, its peer, its start."""

    request: BlockRequest
    shape: Shape
    peer: Peer
    began_s: float


class Router:
    """Where one worker gets objects from. The cluster keeps `table` and `peers` up to date."""

    def __init__(
        self,
        own: Source,
        origin: Source,
        generations: Generations,
        *,
        name: str,
        dc: str,
        signer: HopSigner,
        on_peer_out: Callable[[Peer], None],
    ) -> None:
        self.own = own
        self.origin = origin
        self.name = name
        self.table: PartitionTable | None = None
        self.peers: Mapping[str, Peer] = {}
        self.generations = generations
        self.copied: frozenset[str] = frozenset()
        """Hot objects of other nodes that this node caches too."""
        self.shapes = ShapeCache(SHAPES_MAX)
        self.shape_requests: SingleFlight[tuple[str, int], Shape] = SingleFlight()
        """By key and purge generation: a purge is not answered by an earlier request."""
        self.block_requests: SingleFlight[BlockRequest, PartialBlock] = SingleFlight()
        self.receiving: dict[BlockRequest, PartialBlock] = {}
        """Blocks being received, which concurrent requests share."""
        self.repairs = BackgroundTasks()
        """Rests of blocks whose peer was lost; the cluster cancels them at its end."""
        self.signer = signer
        self.on_peer_out = on_peer_out
        self._dc = dc
        self.peer_source = PeerSource(self)

    def source(self, key: str, hop: Hop | None, onward: Sequence[tuple[str, str]] = ()) -> Source:
        """The source of `key`. `onward` holds fields for hops made for this request."""
        if hop is not None or not self.others(key):
            return self.own
        return PeerSource(self, tuple(onward)) if onward else self.peer_source

    def is_replica(self, key: str) -> bool:
        """Whether this node is a replica of `key`, or keeps a copy because it is hot."""
        if self.table is None or key in self.copied:
            return True
        return self.name in self.table.owners(partition_of(key))

    def others(self, key: str) -> list[Peer]:
        """The usable replicas of `key` in the order of requests; none if this node is a replica."""
        if self.table is None or key in self.copied:
            return []
        names = self.table.owners(partition_of(key))
        if self.name in names:
            return []
        peers = [self.peers[name] for name in names if name in self.peers]
        usable = [peer for peer in peers if peer.health.is_usable]
        if len(usable) > 1:
            usable.sort(key=self._remoteness)
        return usable

    def _remoteness(self, peer: Peer) -> tuple[bool, bool]:
        return peer.health.is_doubted, bool(self._dc) and peer.dc != self._dc

    def first_owner(self, key: str) -> Peer | None:
        """The first usable replica of `key` on which all nodes agree; None: this node."""
        for name in self.table.owners(partition_of(key)) if self.table is not None else ():
            peer = self.peers.get(name)
            if name == self.name:
                return None
            if peer is not None and peer.health.is_usable:
                return peer
        return None

    def usable_names(self) -> tuple[str, ...]:
        """The names of the usable peers."""
        return tuple(name for name, peer in self.peers.items() if peer.health.is_usable)

    def is_used(self, peer: Peer) -> bool:
        """Whether requests may be sent to `peer`."""
        return peer.health.is_usable and self.peers.get(peer.name) is peer

    def is_trusted(self, peer: Peer) -> bool:
        """Whether `peer` is used and its last probe was answered."""
        return self.is_used(peer) and not peer.health.is_doubted

    def description(self, key: str, shape: Shape) -> tuple[int, float, Peer] | None:
        """The generation and expiry of a peer's `shape`, and the peer that requests are sent to.

        None: it is not the cached shape, or no trusted peer keeps the key.
        """
        known, peers = self.shapes.get(key, self.generations.generation(key)), self.others(key)
        if known is None or known.shape != shape or not peers or not self.is_trusted(peers[0]):
            return None
        return known.generation, known.expires_s, peers[0]

    def keep_shape(self, key: str, shape: Shape, generation: int) -> None:
        """Cache `shape`, requested at this generation, for a short time."""
        self.shapes.keep(key, KnownShape(shape, generation, time.monotonic() + SHAPE_KEPT_S))


class PeerSource:
    """Objects from the other nodes; implements `sources.Source`."""

    name = "peer"

    def __init__(self, router: Router, onward: tuple[tuple[str, str], ...] = ()) -> None:
        self._router = router
        self._onward = onward

    def shape_now(self, key: str) -> Shape | None:
        """See `Source`."""
        known = self._router.shapes.get(key, self._router.generations.generation(key))
        return known.shape if known is not None else None

    async def shape(self, key: str) -> Shape:
        """See `Source`. Raises: ObjectUnknown, StoreUnavailable."""
        known = self.shape_now(key)
        if known is not None:
            return known
        request = key, self._router.generations.generation(key)
        return await self._router.shape_requests.join(request, lambda: self._find_shape(key))

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """See `Source`. Raises: SourceCut, StoreUnavailable."""
        block = await self.begin_block(key, shape, number, span)
        return await block.whole()

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """The bytes of `span` of a block, returned once a peer's answer is verified.

        Raises: SourceCut, StoreUnavailable.
        """
        request = BlockRequest(key, shape.etag, number, span)
        block = self._router.receiving.get(request)
        if block is not None:
            return block
        return await self._router.block_requests.join(
            request, lambda: self.fetch_block(request, shape)
        )

    async def fetch_block(self, request: BlockRequest, shape: Shape) -> PartialBlock:
        """The bytes from the first replica that answers."""
        began_s = time.perf_counter()
        for peer in self._replicas(request.key):
            block = await self._request_block(peer, request)
            if block is not None and self.follow(block, PeerFetch(request, shape, peer, began_s)):
                return block
        key, _, number, span = request
        return PartialBlock.of(await self._router.origin.block(key, shape, number, span))

    def follow(self, block: PartialBlock, fetch: PeerFetch) -> bool:
        """Share a block being received, and handle its end. Return False if it is lost already."""
        if not block.is_over:
            self._router.receiving[fetch.request] = block
            block.on_end = partial(self._end_flight, block, fetch)
        elif block.fault is None:
            _note_whole(fetch.peer, fetch.began_s)
        else:
            self._note_lost(fetch.peer, block.fault)
            return False
        return True

    def _end_flight(
        self, block: PartialBlock, fetch: PeerFetch, fault: HeadraceError | None
    ) -> None:
        """Record the end of a block; if its peer was lost, request the rest from others."""
        del self._router.receiving[fetch.request]
        if fault is None:
            _note_whole(fetch.peer, fetch.began_s)
            return
        self._note_lost(fetch.peer, fault)
        self._router.repairs.start(self._repair(block, fetch))

    async def _repair(self, block: PartialBlock, fetch: PeerFetch) -> None:
        try:
            block.fill(await self._rest(block, fetch))
        except HeadraceError as error:
            block.fail(error)
        except BaseException as error:
            # Fail the block, so that its clients do not wait forever.
            cut = SourceCut("the source of the object failed while it was sent")
            cut.__cause__ = error
            block.fail(cut)
            raise

    async def _rest(self, block: PartialBlock, fetch: PeerFetch) -> bytes:
        """The missing bytes of the next peer or origin. Raises: SourceCut, StoreUnavailable."""
        key, _, number, span = fetch.request
        rest = Span(span.start + block.filled_bytes, span.end)
        for peer in self._router.others(key):
            if peer is fetch.peer:
                continue
            found = await self._request_block(peer, fetch.request._replace(span=rest))
            try:
                if found is not None:
                    return await found.whole()
            except PeerLost as error:
                self._note_lost(peer, error)
        return await self._router.origin.block(key, fetch.shape, number, rest)

    def _replicas(self, key: str) -> Iterator[Peer]:
        """The usable replicas of `key` in turn; one that was left as doubted comes again, last."""
        trusted = []
        for peer in self._router.others(key):
            if not peer.health.is_doubted:
                trusted.append(peer)
            yield peer
        for peer in trusted:
            if peer.health.is_doubted and self._router.is_used(peer):
                yield peer

    async def _find_shape(self, key: str) -> Shape:
        for peer in self._replicas(key):
            shape = await self._request_shape(peer, key)
            if shape is not None:
                return shape
        return await self._router.own.shape(key)

    async def _request_shape(self, peer: Peer, key: str) -> Shape | None:
        generation = self._router.generations.generation(key)
        request = PeerRequest("HEAD", target_of(key), fields=self._onward, generation=generation)
        answer = await self._request(peer, request)
        if answer is None:
            return None
        if answer.status == 404:
            raise ObjectUnknown("no object of this key is stored")
        shape = shape_of_answer(key, answer)
        self._router.keep_shape(key, shape, generation)
        return shape

    async def request_variant(self, peer: Peer, key: str, target: str) -> bool:
        """Have a peer make a variant of `key`. Return whether it is stored now.

        Raises: VariantRefused, VariantsBusy if the peer may still be making it.
        """
        generation = self._router.generations.generation(key)
        answer = await self._request(peer, PeerRequest("HEAD", target, generation=generation))
        if answer is None and self._router.is_used(peer):
            raise VariantsBusy(
                f"node {peer.name} has not made the variant yet: try again later", retry_after_s=1
            )
        if answer is not None and answer.status == 422:
            raise VariantRefused(f"node {peer.name} cannot make a variant of the original")
        return answer is not None and answer.status == 200

    def _request_for(self, request: BlockRequest) -> PeerRequest:
        """The request to a peer for the bytes of `request`."""
        key, etag, number, span = request
        start = number * BLOCK_BYTES
        bytes_asked = f"bytes={start + span.start}-{start + span.end - 1}"
        generation = self._router.generations.generation(key)
        return PeerRequest(
            "GET", target_of(key), bytes_asked, f'"{etag}"', self._onward, generation
        )

    async def _request_block(self, peer: Peer, request: BlockRequest) -> PartialBlock | None:
        """A peer's bytes of a block; None: try the next peer. Raises: SourceCut."""
        key = request.key
        answer = await self._request(peer, self._request_for(request))
        if answer is None:
            return None
        if answer.status in (404, 412):
            self._router.shapes.forget(key)
            if answer.status == 412:
                # This peer has just read the origin; other replicas may still have the old version.
                with suppress(ObjectUnknown):
                    await self._request_shape(peer, key)
            raise SourceCut("the object was replaced or removed while it was sent")
        return answer.body

    async def _request(self, peer: Peer, request: PeerRequest) -> PeerResponse | None:
        """A verified response of a peer; None: try the next peer."""
        for _ in range(AHEAD_TRIES):
            began_s = time.perf_counter()
            try:
                answer = await peer.request(request)
            except PeerLost as error:
                self._note_lost(peer, error)
                return None
            outcome = self._outcome_of(answer, request)
            _COUNTED[outcome].inc()
            if outcome != "ahead":
                break
            await asyncio.sleep(AHEAD_PAUSE_S)
        if outcome in ("ok", "missing", "changed"):
            if request.method == "HEAD" or outcome != "ok":
                _note_whole(peer, began_s)
            return answer
        if outcome not in ("ahead", "busy"):
            # A peer that is full, stopping or without its store reports so; its probes decide.
            self._count_failure(peer, f"{outcome}, status {answer.status}", is_refused=False)
        return None

    def _outcome_of(self, answer: PeerResponse, request: PeerRequest) -> str:
        """The outcome of one exchange, one of OUTCOMES."""
        if answer.status == 412 and request.method == "GET":
            return "changed"
        if answer.status in (200, 206, 404, 422):
            span = answer_span(answer, request)
            proof = answer.fields.get(REPLY_FIELD, "")
            if span is None or not self._router.signer.is_authentic(answer.mac, proof, span):
                return "unproven"
            return "missing" if answer.status in (404, 422) else "ok"
        return _OTHER_OUTCOMES.get(answer.status, "failed")

    def _note_lost(self, peer: Peer, fault: HeadraceError) -> None:
        _COUNTED["failed"].inc()
        lost = fault if isinstance(fault, PeerLost) else None
        if lost is None or lost.is_counted:
            is_refused = lost is not None and lost.is_refused
            self._count_failure(peer, fault.text, is_refused=is_refused)

    def _count_failure(self, peer: Peer, why: str, *, is_refused: bool) -> None:
        if peer.health.fail(is_refused=is_refused):
            log.warning("peer_out", node=peer.name, why=why)
            self._router.on_peer_out(peer)


def note_native_hops(counts: Sequence[int], total_s: float, *, faults_count: int) -> None:
    """Count requests of the native data plane: complete ones by time, and faults."""
    observe_many(HOP_SECONDS, counts, total_s)
    _COUNTED["ok"].inc(sum(counts))
    _COUNTED["failed"].inc(faults_count)


def _note_whole(peer: Peer, began_s: float) -> None:
    HOP_SECONDS.observe(time.perf_counter() - began_s)
    peer.health.succeed()
