"""A block that one client asks of another node, without a task.

The question goes out in the turn that the client's was read in, and its answer goes on in the turn that it comes in:
two turns of the loop, where a task that waits for a question that waits for a connection takes four. Others
who ask for the same block meanwhile wait for it as for any other. A task is made only where the first node does not give it.


[cluster/routing.py] Where a worker takes an object from: its own disks, or the node that keeps it; then the next, then the origin.

A key is ours when its partition's replicas (`media.partitions`) name us, when nobody is left to ask, or when
the request came by a hop. Everything else is asked of the replicas by one authenticated hop: first those of
our own data centre, then in the partition's order, leaving out whom `health` holds for dead, so the keys of
a dead node go to their second replicas, which are spread over all others. A hop that fails is
repeated with the next replica, the last one straight from the origin; a client sees none of it.

Of a peer nothing is kept but shapes, for two seconds and no longer than the key's generation: its bytes pass
through, as they come. What many clients ask for at once is asked once. Bytes are passed on only from an answer that
proves itself, of the version and span that was asked for (see `hop`). A peer that is lost half-way through a block costs
no client anything: the rest is asked of the next one, of the same version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from headrace.media.cluster.peers import Peer, PeerLost, PeerResponse
from headrace.media.model import Shape
from headrace.media.sources import PartialBlock, Span

if TYPE_CHECKING:
    pass
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.metrics import FINE_BUCKETS_S, bound, counter, histogram
from headrace.kernel.single_flight import SingleFlight
from headrace.media.cluster.hop import (
    NOTHING,
    REPLY_FIELD,
    AnswerSpan,
    Hop,
    HopSigner,
)
from headrace.media.cluster.peers import PeerRequest, target_of
from headrace.media.cluster.purge import Generations
from headrace.media.errors import ObjectUnknown, SourceCut
from headrace.media.model import BLOCK_BYTES, content_address
from headrace.media.partitions import PartitionTable, partition_of
from headrace.media.ranges import parse_http_date_s
from headrace.media.sources import Source


class BlockRequest(NamedTuple):
    """Which bytes are asked for."""

    key: str
    etag: str
    number: int
    span: Span


class PeerFetch(NamedTuple):
    """A flight that has begun: of which shape, from whom, since when."""

    request: BlockRequest
    shape: Shape
    peer: Peer
    began_s: float


class PeerReply(NamedTuple):
    """What a peer answered, or how it was lost, before anybody could wait for it."""

    peer: Peer
    answer: PeerResponse | PeerLost


class DirectFetch:
    """A block that is asked for without a task, as long as its first peer gives it; `is_begun`: a connection was free."""

    __slots__ = ("_asked", "_asking", "_flying", "_source", "_task", "_tell", "is_begun")

    def __init__(
        self, source: PeerSource, fetch: PeerFetch, tell: Callable[[PartialBlock | None], None]
    ) -> None:
        self._source = source
        self._flying = fetch
        self._tell = tell
        self._task: asyncio.Task[PartialBlock] | None = None
        self._asked = source.asked_for(fetch.request)
        self._asking = fetch.peer.request_now(self._asked, self._take)
        self.is_begun = self._asking is not None
        if self.is_begun:
            source.block_requests.begin(fetch.request)

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing once it was told."""
        self._tell = _nobody
        if self._task is not None:
            self._task.cancel()
        elif self._asking is not None:
            self._asking.cancel()
            self._source.block_requests.fail(self._flying.request, asyncio.CancelledError())

    def _take(self, answer: PeerResponse | PeerLost) -> None:
        self._asking = None
        fetch = self._flying
        if isinstance(answer, PeerLost) or not self._source.is_good(answer, self._asked):
            reply = PeerReply(fetch.peer, answer)
            going_on = self._source.fetch_block(fetch.request, fetch.shape, reply)
            self._task = self._source.begin_task(going_on)
            self._task.add_done_callback(self._end)
            return
        try:
            self._tell(answer.body)
        finally:
            # Last, since the client waits for its first byte.
            self._source.follow(answer.body, fetch)
            self._source.block_requests.finish(fetch.request, answer.body)

    def _end(self, task: asyncio.Task[PartialBlock]) -> None:
        """What came of the other nodes; a task may be cancelled before its first step, so this is no part of it."""
        request, block_requests = self._flying.request, self._source.block_requests
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            block_requests.finish(request, task.result())
            self._tell(task.result())
        else:
            block_requests.fail(request, error)
            self._tell(None)


def _nobody(_: PartialBlock | None) -> None:
    """Who asked is gone."""


log = logger(__name__)
T = TypeVar("T")
SHAPE_KEPT_S: Final = 2.0
SHAPES_MAX: Final = 20_000
AHEAD_TRIES: Final = 4
AHEAD_PAUSE_S: Final = 0.05
OUTCOMES: Final = (
    "ok", "missing", "changed", "ahead", "busy", "unproven", "refused", "failed",
)  # fmt: skip
_OTHER_OUTCOMES: Final = {403: "refused", 409: "ahead", 503: "busy"}
HOPS: Final = counter(
    "media_hops_total", "Requests made to other nodes, by outcome.", outcome=OUTCOMES
)
HOP_SECONDS: Final = histogram(
    "media_hop_seconds", "From asking another node to its whole answer.", buckets_s=FINE_BUCKETS_S
)
_COUNTED: Final = {o: bound(HOPS, "media_hops_total", outcome=o) for o in OUTCOMES}


class _Kept(NamedTuple):
    """A shape, until when it counts, and under which generation of its key."""

    shape: Shape
    until_s: float
    generation: int


def _nothing(*_: object) -> None:
    """Where nobody is to be told."""


class Router:
    """One worker's way to every object. `table` and `peers` are kept up to date by the cluster."""

    def __init__(
        self,
        own: Source,
        origin: Source,
        generations: Generations,
        *,
        name: str = "",
        dc: str = "",
        signer: HopSigner | None = None,
        on_peer_out: Callable[[Peer], None] = _nothing,
    ) -> None:
        self.own = own
        self.origin = origin
        self.name = name
        self.table: PartitionTable | None = None
        self.peers: Mapping[str, Peer] = {}
        self.generations = generations
        self.shapes: dict[str, _Kept] = {}
        self.shape_requests: SingleFlight[str, Shape] = SingleFlight()
        self.block_requests: SingleFlight[BlockRequest, PartialBlock] = SingleFlight()
        self.coming: dict[BlockRequest, PartialBlock] = {}
        """Blocks that come in: whoever asks for one of them meanwhile shares it."""
        self.repairs: set[asyncio.Task[Any]] = set()
        self.signer = signer
        self.on_peer_out = on_peer_out
        self._dc = dc
        self.peer_source = PeerSource(self)

    def source(self, key: str, hop: Hop | None, onward: Sequence[tuple[str, str]] = ()) -> Source:
        """Where to take `key` from; `onward` are fields that a hop made for this request carries."""
        if hop is not None or not self.others(key):
            return self.own
        return PeerSource(self, tuple(onward)) if onward else self.peer_source

    def is_replica(self, key: str) -> bool:
        """Whether this node is one of the replicas of `key`, whoever else lives."""
        return self.table is None or self.name in self.table.owners(partition_of(key))

    def others(self, key: str) -> list[Peer]:
        """The replicas of `key` to be asked, in order; none where it is ours or nobody is left."""
        if self.table is None:
            return []
        names = self.table.owners(partition_of(key))
        if self.name in names:
            return []
        peers = [self.peers[name] for name in names if name in self.peers]
        usable = [peer for peer in peers if peer.health.is_usable]
        if len(usable) > 1 and self._dc:
            usable.sort(key=lambda peer: peer.dc != self._dc)
        return usable

    def keep_shape(self, key: str, shape: Shape) -> None:
        """Remember `shape` for a moment; the oldest give way."""
        generation = self.generations.generation(key)
        self.shapes.pop(key, None)
        self.shapes[key] = _Kept(shape, time.monotonic() + SHAPE_KEPT_S, generation)
        if len(self.shapes) > SHAPES_MAX:
            del self.shapes[next(iter(self.shapes))]


class PeerSource:
    """Objects as the other nodes have them; implements `sources.Source`."""

    name = "peer"

    def __init__(self, router: Router, onward: tuple[tuple[str, str], ...] = ()) -> None:
        self._router = router
        self._onward = onward

    @property
    def block_requests(self) -> SingleFlight[BlockRequest, PartialBlock]:
        """Blocks that are being asked for."""
        return self._router.block_requests

    def shape_now(self, key: str) -> Shape | None:
        """See `Source`."""
        kept = self._router.shapes.get(key)
        if kept is None or kept.until_s < time.monotonic():
            return None
        return kept.shape if kept.generation == self._router.generations.generation(key) else None

    async def shape(self, key: str) -> Shape:
        """See `Source`. Raises: ObjectUnknown, StoreUnavailable."""
        known = self.shape_now(key)
        if known is not None:
            return known
        return await self._router.shape_requests.join(key, lambda: self._find_shape(key))

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """See `Source`. Raises: SourceCut, StoreUnavailable."""
        coming = await self.begin_block(key, shape, number, span)
        return await coming.whole()

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> PartialBlock:
        """The bytes of `span` of a block, as soon as a peer's answer has proved itself; they come in meanwhile.

        Raises: SourceCut, StoreUnavailable.
        """
        request = BlockRequest(key, shape.etag, number, span)
        coming = self._router.coming.get(request)
        if coming is not None:
            return coming
        return await self._router.block_requests.join(
            request, lambda: self.fetch_block(request, shape)
        )

    def request_now(
        self, request: BlockRequest, shape: Shape, tell: Callable[[PartialBlock | None], None]
    ) -> DirectFetch | None:
        """`begin_block` without a task: `tell` hears what comes in, or None: it is to be asked for in the usual way.

        None: nothing was done, since others ask for the same or no kept connection is free.
        """
        router = self._router
        if request in router.coming or request in router.block_requests:
            return None
        for peer in router.others(request.key):
            solo = DirectFetch(self, PeerFetch(request, shape, peer, time.perf_counter()), tell)
            return solo if solo.is_begun else None
        return None

    async def fetch_block(
        self, request: BlockRequest, shape: Shape, reply: PeerReply | None = None
    ) -> PartialBlock:
        """The bytes of whoever of the replicas gives them; `heard` is what one of them said already."""
        began_s = time.perf_counter()
        for peer in self._router.others(request.key):
            coming = await self._request_block(peer, request, reply)
            if coming is not None and self.follow(coming, PeerFetch(request, shape, peer, began_s)):
                return coming
        key, _, number, span = request
        return PartialBlock.of(await self._router.origin.block(key, shape, number, span))

    def follow(self, coming: PartialBlock, fetch: PeerFetch) -> bool:
        """Let others share what comes in, and see to its end; False: it is lost already."""
        if not coming.is_over:
            self._router.coming[fetch.request] = coming
            coming.on_end = partial(self._end_flight, coming, fetch)
        elif coming.fault is None:
            _note_whole(fetch.peer, fetch.began_s)
        else:
            self._note_lost(fetch.peer, coming.fault)
            return False
        return True

    def _end_flight(
        self, coming: PartialBlock, fetch: PeerFetch, fault: HeadraceError | None
    ) -> None:
        """All is here; or the peer was lost on the way, and the rest is taken from others."""
        del self._router.coming[fetch.request]
        if fault is None:
            _note_whole(fetch.peer, fetch.began_s)
            return
        self._note_lost(fetch.peer, fault)
        self.begin_task(self._repair(coming, fetch))

    def begin_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do it beside, as long as the cluster is followed."""
        task = asyncio.get_running_loop().create_task(work)
        self._router.repairs.add(task)
        task.add_done_callback(self._router.repairs.discard)
        return task

    async def _repair(self, coming: PartialBlock, fetch: PeerFetch) -> None:
        try:
            coming.fill(await self._rest(coming, fetch))
        except HeadraceError as error:
            coming.fail(error)
        except BaseException as error:
            # Told, and the clients are cut: they must not wait for ever.
            cut = SourceCut("the object's source failed while it was sent")
            cut.__cause__ = error
            coming.fail(cut)
            raise

    async def _rest(self, coming: PartialBlock, fetch: PeerFetch) -> bytes:
        """What is missing, of the next peer or the origin. Raises: SourceCut, StoreUnavailable."""
        key, _, number, span = fetch.request
        rest = Span(span.start + coming.filled_bytes, span.end)
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

    async def _find_shape(self, key: str) -> Shape:
        for peer in self._router.others(key):
            shape = await self._request_shape(peer, key)
            if shape is not None:
                return shape
        return await self._router.own.shape(key)

    async def _request_shape(self, peer: Peer, key: str) -> Shape | None:
        generation = self._router.generations.generation(key)
        asked = PeerRequest("HEAD", target_of(key), fields=self._onward, generation=generation)
        answer = await self._ask(peer, asked)
        if answer is None:
            return None
        if answer.status == 404:
            raise ObjectUnknown("no object of this key is stored")
        shape = _shape_of(key, answer)
        self._router.keep_shape(key, shape)
        return shape

    def asked_for(self, request: BlockRequest) -> PeerRequest:
        """What a peer is asked for the bytes of `flight`."""
        key, etag, number, span = request
        start = number * BLOCK_BYTES
        bytes_asked = f"bytes={start + span.start}-{start + span.end - 1}"
        generation = self._router.generations.generation(key)
        return PeerRequest(
            "GET", target_of(key), bytes_asked, f'"{etag}"', self._onward, generation
        )

    async def _request_block(
        self, peer: Peer, request: BlockRequest, reply: PeerReply | None = None
    ) -> PartialBlock | None:
        """What `peer` gives of a block, on its way; None: ask the next. Raises: SourceCut."""
        key = request.key
        answer = await self._ask(peer, self.asked_for(request), reply)
        if answer is None:
            return None
        if answer.status in (404, 412):
            self._router.shapes.pop(key, None)
            if answer.status == 412:
                # It has just looked at the origin; the other replicas may know the old version still.
                with suppress(ObjectUnknown):
                    await self._request_shape(peer, key)
            raise SourceCut("the object was replaced or removed while it was sent")
        return answer.body

    async def _ask(
        self, peer: Peer, asked: PeerRequest, reply: PeerReply | None = None
    ) -> PeerResponse | None:
        """A peer's answer that can be believed, or None: ask the next."""
        known = reply.answer if reply is not None and reply.peer is peer else None
        for _ in range(AHEAD_TRIES):
            began_s = time.perf_counter()
            try:
                answer = await _on_response(peer, asked, known)
            except PeerLost as error:
                self._note_lost(peer, error)
                return None
            known = None
            outcome = self._outcome_of(answer, asked)
            _COUNTED[outcome].inc()
            if outcome != "ahead":
                break
            await asyncio.sleep(AHEAD_PAUSE_S)
        if outcome in ("ok", "missing", "changed"):
            if asked.method == "HEAD" or outcome != "ok":
                _note_whole(peer, began_s)
            return answer
        if outcome not in ("ahead", "busy"):
            # One that is full, stops or misses its store says so at once, and its probes judge it.
            self._count_failure(peer, f"{outcome}, status {answer.status}", is_gone=False)
        return None

    def _outcome_of(self, answer: PeerResponse, asked: PeerRequest) -> str:
        """The outcome of one exchange, out of OUTCOMES."""
        if answer.status == 412 and asked.method == "GET":
            return "changed"
        if answer.status in (200, 206, 404):
            told = _told_by(answer, asked)
            signer = self._router.signer
            assert signer is not None
            proof = answer.fields.get(REPLY_FIELD, "")
            if told is None or not signer.is_authentic(answer.mac, proof, told):
                return "unproven"
            return "missing" if answer.status == 404 else "ok"
        return _OTHER_OUTCOMES.get(answer.status, "failed")

    def is_good(self, answer: PeerResponse, asked: PeerRequest) -> bool:
        """Whether it is the bytes that were asked for; counted if so."""
        is_ok = self._outcome_of(answer, asked) == "ok"
        if is_ok:
            _COUNTED["ok"].inc()
        return is_ok

    def _note_lost(self, peer: Peer, fault: HeadraceError) -> None:
        _COUNTED["failed"].inc()
        self._count_failure(peer, fault.text, is_gone=isinstance(fault, PeerLost) and fault.is_gone)

    def _count_failure(self, peer: Peer, why: str, *, is_gone: bool) -> None:
        if peer.health.fail(is_gone=is_gone):
            log.warning("peer_out", node=peer.name, why=why)
            self._router.on_peer_out(peer)


async def _on_response(
    peer: Peer, asked: PeerRequest, known: PeerResponse | PeerLost | None
) -> PeerResponse:
    """What `peer` said, or its answer now. Raises: PeerLost."""
    if isinstance(known, PeerLost) and not (known.is_unheard and peer.health.is_usable):
        raise known
    return known if isinstance(known, PeerResponse) else await peer.request(asked)


def _note_whole(peer: Peer, began_s: float) -> None:
    HOP_SECONDS.observe(time.perf_counter() - began_s)
    peer.health.succeed()


def _told_by(answer: PeerResponse, asked: PeerRequest) -> AnswerSpan | None:
    """What a believable answer to `asked` carries; None if it says something else."""
    if answer.status == 404:
        return NOTHING
    etag = answer.fields.get("etag", "").strip('"')
    length_bytes = int(answer.fields["content-length"])
    if asked.method == "HEAD":
        return AnswerSpan(etag, 0, length_bytes) if answer.status == 200 else None
    part = asked.span[len("bytes=") :]
    start, _, last = part.partition("-")
    is_right = (
        answer.status == 206
        and answer.fields.get("content-range", "").startswith(f"bytes {part}/")
        and f'"{etag}"' == asked.if_match
        and length_bytes == int(last) - int(start) + 1
    )
    return AnswerSpan(etag, int(start), length_bytes) if is_right else None


def _shape_of(key: str, answer: PeerResponse) -> Shape:
    etag = answer.fields.get("etag", "").strip('"')
    modified_s = parse_http_date_s(answer.fields.get("last-modified", "")) or 0
    size_bytes = int(answer.fields["content-length"])
    return Shape(size_bytes, etag, modified_s, content_address(key) is not None)
