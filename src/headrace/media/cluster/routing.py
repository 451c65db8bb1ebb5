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

from headrace.media.cluster.peers import Answer, Peer, PeerLost
from headrace.media.model import Shape
from headrace.media.sources import Coming, Span

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
    Hop,
    HopSigner,
    Told,
)
from headrace.media.cluster.peers import Asked, target_of
from headrace.media.cluster.purge import Generations
from headrace.media.errors import ObjectUnknown, SourceCut
from headrace.media.model import BLOCK_BYTES, content_address
from headrace.media.partitions import Table, partition_of
from headrace.media.ranges import parse_http_date_s
from headrace.media.sources import Source


class Flight(NamedTuple):
    """Which bytes are asked for."""

    key: str
    etag: str
    number: int
    span: Span


class Flying(NamedTuple):
    """A flight that has begun: of which shape, from whom, since when."""

    flight: Flight
    shape: Shape
    peer: Peer
    began_s: float


class Heard(NamedTuple):
    """What a peer answered, or how it was lost, before anybody could wait for it."""

    peer: Peer
    answer: Answer | PeerLost


class SoloFlight:
    """A block that is asked for without a task, as long as its first peer gives it; `is_begun`: a connection was free."""

    __slots__ = ("_asked", "_asking", "_flying", "_source", "_task", "_tell", "is_begun")

    def __init__(
        self, source: PeerSource, flying: Flying, tell: Callable[[Coming | None], None]
    ) -> None:
        self._source = source
        self._flying = flying
        self._tell = tell
        self._task: asyncio.Task[Coming] | None = None
        self._asked = source.asked_for(flying.flight)
        self._asking = flying.peer.ask_now(self._asked, self._take)
        self.is_begun = self._asking is not None
        if self.is_begun:
            source.flights.begin(flying.flight)

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing once it was told."""
        self._tell = _nobody
        if self._task is not None:
            self._task.cancel()
        elif self._asking is not None:
            self._asking.cancel()
            self._source.flights.fail(self._flying.flight, asyncio.CancelledError())

    def _take(self, answer: Answer | PeerLost) -> None:
        self._asking = None
        flying = self._flying
        if isinstance(answer, PeerLost) or not self._source.is_good(answer, self._asked):
            heard = Heard(flying.peer, answer)
            going_on = self._source.begin_flight(flying.flight, flying.shape, heard)
            self._task = self._source.begin_task(going_on)
            self._task.add_done_callback(self._end)
            return
        try:
            self._tell(answer.body)
        finally:
            # Last, since the client waits for its first byte.
            self._source.follow(answer.body, flying)
            self._source.flights.finish(flying.flight, answer.body)

    def _end(self, task: asyncio.Task[Coming]) -> None:
        """What came of the other nodes; a task may be cancelled before its first step, so this is no part of it."""
        flight, flights = self._flying.flight, self._source.flights
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            flights.finish(flight, task.result())
            self._tell(task.result())
        else:
            flights.fail(flight, error)
            self._tell(None)


def _nobody(_: Coming | None) -> None:
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
        self.table: Table | None = None
        self.peers: Mapping[str, Peer] = {}
        self.generations = generations
        self.shapes: dict[str, _Kept] = {}
        self.asking_shapes: SingleFlight[str, Shape] = SingleFlight()
        self.asking_blocks: SingleFlight[Flight, Coming] = SingleFlight()
        self.coming: dict[Flight, Coming] = {}
        """Blocks that come in: whoever asks for one of them meanwhile shares it."""
        self.mending: set[asyncio.Task[Any]] = set()
        self.signer = signer
        self.on_peer_out = on_peer_out
        self._dc = dc
        self.peer_source = PeerSource(self)

    def source(self, key: str, hop: Hop | None, onward: Sequence[tuple[str, str]] = ()) -> Source:
        """Where to take `key` from; `onward` are fields that a hop made for this request carries."""
        if hop is not None or not self.others(key):
            return self.own
        return PeerSource(self, tuple(onward)) if onward else self.peer_source

    def is_kept_here(self, key: str) -> bool:
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
    def flights(self) -> SingleFlight[Flight, Coming]:
        """Blocks that are being asked for."""
        return self._router.asking_blocks

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
        return await self._router.asking_shapes.join(key, lambda: self._ask_shape(key))

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        """See `Source`. Raises: SourceCut, StoreUnavailable."""
        coming = await self.begin_block(key, shape, number, span)
        return await coming.whole()

    async def begin_block(self, key: str, shape: Shape, number: int, span: Span) -> Coming:
        """The bytes of `span` of a block, as soon as a peer's answer has proved itself; they come in meanwhile.

        Raises: SourceCut, StoreUnavailable.
        """
        flight = Flight(key, shape.etag, number, span)
        coming = self._router.coming.get(flight)
        if coming is not None:
            return coming
        return await self._router.asking_blocks.join(
            flight, lambda: self.begin_flight(flight, shape)
        )

    def ask_now(
        self, flight: Flight, shape: Shape, tell: Callable[[Coming | None], None]
    ) -> SoloFlight | None:
        """`begin_block` without a task: `tell` hears what comes in, or None: it is to be asked for in the usual way.

        None: nothing was done, since others ask for the same or no kept connection is free.
        """
        router = self._router
        if flight in router.coming or flight in router.asking_blocks:
            return None
        for peer in router.others(flight.key):
            solo = SoloFlight(self, Flying(flight, shape, peer, time.perf_counter()), tell)
            return solo if solo.is_begun else None
        return None

    async def begin_flight(
        self, flight: Flight, shape: Shape, heard: Heard | None = None
    ) -> Coming:
        """The bytes of whoever of the replicas gives them; `heard` is what one of them said already."""
        began_s = time.perf_counter()
        for peer in self._router.others(flight.key):
            coming = await self._ask_block(peer, flight, heard)
            if coming is not None and self.follow(coming, Flying(flight, shape, peer, began_s)):
                return coming
        key, _, number, span = flight
        return Coming.of(await self._router.origin.block(key, shape, number, span))

    def follow(self, coming: Coming, flying: Flying) -> bool:
        """Let others share what comes in, and see to its end; False: it is lost already."""
        if not coming.is_over:
            self._router.coming[flying.flight] = coming
            coming.on_end = partial(self._end_flight, coming, flying)
        elif coming.fault is None:
            _note_whole(flying.peer, flying.began_s)
        else:
            self._note_lost(flying.peer, coming.fault)
            return False
        return True

    def _end_flight(self, coming: Coming, flying: Flying, fault: HeadraceError | None) -> None:
        """All is here; or the peer was lost on the way, and the rest is taken from others."""
        del self._router.coming[flying.flight]
        if fault is None:
            _note_whole(flying.peer, flying.began_s)
            return
        self._note_lost(flying.peer, fault)
        self.begin_task(self._mend(coming, flying))

    def begin_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do it beside, as long as the cluster is followed."""
        task = asyncio.get_running_loop().create_task(work)
        self._router.mending.add(task)
        task.add_done_callback(self._router.mending.discard)
        return task

    async def _mend(self, coming: Coming, flying: Flying) -> None:
        try:
            coming.fill(await self._rest(coming, flying))
        except HeadraceError as error:
            coming.fail(error)
        except BaseException as error:
            # Told, and the clients are cut: they must not wait for ever.
            cut = SourceCut("the object's source failed while it was sent")
            cut.__cause__ = error
            coming.fail(cut)
            raise

    async def _rest(self, coming: Coming, flying: Flying) -> bytes:
        """What is missing, of the next peer or the origin. Raises: SourceCut, StoreUnavailable."""
        key, _, number, span = flying.flight
        rest = Span(span.start + coming.filled_bytes, span.end)
        for peer in self._router.others(key):
            if peer is flying.peer:
                continue
            found = await self._ask_block(peer, flying.flight._replace(span=rest))
            try:
                if found is not None:
                    return await found.whole()
            except PeerLost as error:
                self._note_lost(peer, error)
        return await self._router.origin.block(key, flying.shape, number, rest)

    async def _ask_shape(self, key: str) -> Shape:
        for peer in self._router.others(key):
            shape = await self._ask_shape_of(peer, key)
            if shape is not None:
                return shape
        return await self._router.own.shape(key)

    async def _ask_shape_of(self, peer: Peer, key: str) -> Shape | None:
        generation = self._router.generations.generation(key)
        asked = Asked("HEAD", target_of(key), fields=self._onward, generation=generation)
        answer = await self._ask(peer, asked)
        if answer is None:
            return None
        if answer.status == 404:
            raise ObjectUnknown("no object of this key is stored")
        shape = _shape_of(key, answer)
        self._router.keep_shape(key, shape)
        return shape

    def asked_for(self, flight: Flight) -> Asked:
        """What a peer is asked for the bytes of `flight`."""
        key, etag, number, span = flight
        start = number * BLOCK_BYTES
        bytes_asked = f"bytes={start + span.start}-{start + span.end - 1}"
        generation = self._router.generations.generation(key)
        return Asked("GET", target_of(key), bytes_asked, f'"{etag}"', self._onward, generation)

    async def _ask_block(
        self, peer: Peer, flight: Flight, heard: Heard | None = None
    ) -> Coming | None:
        """What `peer` gives of a block, on its way; None: ask the next. Raises: SourceCut."""
        key = flight.key
        answer = await self._ask(peer, self.asked_for(flight), heard)
        if answer is None:
            return None
        if answer.status in (404, 412):
            self._router.shapes.pop(key, None)
            if answer.status == 412:
                # It has just looked at the origin; the other replicas may know the old version still.
                with suppress(ObjectUnknown):
                    await self._ask_shape_of(peer, key)
            raise SourceCut("the object was replaced or removed while it was sent")
        return answer.body

    async def _ask(self, peer: Peer, asked: Asked, heard: Heard | None = None) -> Answer | None:
        """A peer's answer that can be believed, or None: ask the next."""
        said = heard.answer if heard is not None and heard.peer is peer else None
        for _ in range(AHEAD_TRIES):
            began_s = time.perf_counter()
            try:
                answer = await _hear(peer, asked, said)
            except PeerLost as error:
                self._note_lost(peer, error)
                return None
            said = None
            outcome = self._judge(answer, asked)
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
            self._blame(peer, f"{outcome}, status {answer.status}", is_gone=False)
        return None

    def _judge(self, answer: Answer, asked: Asked) -> str:
        """The outcome of one exchange, out of OUTCOMES."""
        if answer.status == 412 and asked.method == "GET":
            return "changed"
        if answer.status in (200, 206, 404):
            told = _told_by(answer, asked)
            signer = self._router.signer
            assert signer is not None
            proof = answer.fields.get(REPLY_FIELD, "")
            if told is None or not signer.is_proven(answer.mac, proof, told):
                return "unproven"
            return "missing" if answer.status == 404 else "ok"
        return _OTHER_OUTCOMES.get(answer.status, "failed")

    def is_good(self, answer: Answer, asked: Asked) -> bool:
        """Whether it is the bytes that were asked for; counted if so."""
        is_ok = self._judge(answer, asked) == "ok"
        if is_ok:
            _COUNTED["ok"].inc()
        return is_ok

    def _note_lost(self, peer: Peer, fault: HeadraceError) -> None:
        _COUNTED["failed"].inc()
        self._blame(peer, fault.text, is_gone=isinstance(fault, PeerLost) and fault.is_gone)

    def _blame(self, peer: Peer, why: str, *, is_gone: bool) -> None:
        if peer.health.fail(is_gone=is_gone):
            log.warning("peer_out", node=peer.name, why=why)
            self._router.on_peer_out(peer)


async def _hear(peer: Peer, asked: Asked, said: Answer | PeerLost | None) -> Answer:
    """What `peer` said, or its answer now. Raises: PeerLost."""
    if isinstance(said, PeerLost) and not (said.is_unheard and peer.health.is_usable):
        raise said
    return said if isinstance(said, Answer) else await peer.ask(asked)


def _note_whole(peer: Peer, began_s: float) -> None:
    HOP_SECONDS.observe(time.perf_counter() - began_s)
    peer.health.succeed()


def _told_by(answer: Answer, asked: Asked) -> Told | None:
    """What a believable answer to `asked` carries; None if it says something else."""
    if answer.status == 404:
        return NOTHING
    etag = answer.fields.get("etag", "").strip('"')
    length_bytes = int(answer.fields["content-length"])
    if asked.method == "HEAD":
        return Told(etag, 0, length_bytes) if answer.status == 200 else None
    part = asked.span[len("bytes=") :]
    start, _, last = part.partition("-")
    is_right = (
        answer.status == 206
        and answer.fields.get("content-range", "").startswith(f"bytes {part}/")
        and f'"{etag}"' == asked.if_match
        and length_bytes == int(last) - int(start) + 1
    )
    return Told(etag, int(start), length_bytes) if is_right else None


def _shape_of(key: str, answer: Answer) -> Shape:
    etag = answer.fields.get("etag", "").strip('"')
    modified_s = parse_http_date_s(answer.fields.get("last-modified", "")) or 0
    size_bytes = int(answer.fields["content-length"])
    return Shape(size_bytes, etag, modified_s, content_address(key) is not None)
