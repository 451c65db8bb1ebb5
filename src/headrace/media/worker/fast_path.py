"""The fast path: answer known request heads in one call.

A player requests one URL with many ranges, so its heads differ in their Range only. When a head
without its Range line is received for the second time, its meaning is kept as a `CachedHead`. Each
request still checks what may change: the URL has not expired, this node still keeps the key, the
object's shape is fresh, and the block is in a frame of this epoch and in memory. All other requests
use the full path: conditions, traces, tags, rates, bound addresses, uncached or missing blocks.
Heads of other nodes also differ in their hop field. Its signature is checked first, and it is
recorded as used only when the answer is certain.

If the socket takes the whole answer, it is finished within one call; otherwise a body continues it.
Up to JOINED_BYTES are copied and sent with their head in one call, since sendfile pays off for
longer spans only.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from time import monotonic
from typing import Final, NamedTuple

from headrace.kernel.errors import HeadraceError
from headrace.media.cache import Frame
from headrace.media.cluster.hop import HOP_FIELD, AnswerSpan, VerifiedHop, covered_text
from headrace.media.hottest import HOTTEST
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.requests import HOP_LINE, HOP_START, RANGE_START, Request, key_of, remembered
from headrace.media.signing import OPEN
from headrace.media.sources import CacheSource
from headrace.media.worker.bodies import BlockBody
from headrace.media.worker.counters import Counters
from headrace.media.worker.head_cache import NOTHING, CachedHead, StartedAnswer
from headrace.media.worker.peer_proxy import PeerProxy, Take
from headrace.media.worker.request_context import RequestContext
from headrace.media.worker.socket_io import Channel
from headrace.media.worker.timing import StageClock, StageSampler

HEADS_MAX: Final = 4096
JOINED_BYTES: Final = 32 * 1024
_LINE: Final = re.compile(rb"\r\nRange: bytes=([0-9]{1,18})-([0-9]{0,18})(?=\r\n)")
_RANGE_NAME: Final = "\r\nRange: "
_HOP_OTHERS: Final = (HOP_FIELD, "traceparent", "baggage")
_CONDITIONS: Final = ("if-none-match", "if-modified-since", "if-unmodified-since", "if-range")
_Asked = tuple[CachedHead, re.Match[bytes] | None, VerifiedHop | None]


class _Found(NamedTuple):
    """An answer that can be sent now: head, span, the frame of its start, and short first bytes."""

    head_info: CachedHead
    shape: Shape
    status: int
    head: bytes
    start: int
    length_bytes: int
    frame: Frame
    first_bytes: memoryview


class FastPath:
    """The known heads of one worker, for objects on its node's disks."""

    def __init__(
        self,
        context: RequestContext,
        own: CacheSource,
        *,
        sampler: StageSampler,
        counters: Counters,
    ) -> None:
        self._context = context
        self._sampler = sampler
        self._counters = counters
        self._own = own
        self._store = own.store
        self._heads: dict[bytes, CachedHead | None] = {}
        self._hop_heads: dict[bytes, CachedHead | None] = {}
        self._joined = memoryview(bytearray(JOINED_BYTES))
        """A buffer for one answer at a time; its contents are not used after the call."""

    def answer(
        self, data: bytes, channel: Channel, *, wake: Callable[[], None], take: Take
    ) -> StartedAnswer | PeerProxy | None:
        """Start the answer to `data` if it is one known head and its first bytes are in memory.

        Or request them from the node that keeps them; `take` is called with its answer. None: use
        the full path, nothing was done. Call it within an epoch. Raises: OSError (the client
        disconnected).
        """
        began_s = monotonic()
        at = data.find(HOP_START)
        asked = self._asked(data, self._heads) if at < 0 else self._asked_by_hop(data, at)
        if asked is None:
            return None
        if asked[0].is_remote:
            return self._pass_on(data, asked, take, began_s)
        found = self._find(asked)
        if found is None:
            return None
        clock = StageClock(monotonic, began_s) if self._sampler.is_next() else None
        if clock is not None:
            clock.mark("find")
        head_info, _shape, status, head, _start, length_bytes, _frame, first_bytes = found
        sent = _send(channel, head, first_bytes)
        self._counters.note_answer(status, monotonic() - began_s)
        if not head_info.target:
            HOTTEST.note(head_info.key)
        if clock is not None:
            clock.mark("send")
            clock.observe()
        moved = sent - len(head)
        if not moved:
            moved = self._send_frame(channel, found)
            sent += moved
        if moved > 0:
            self._counters.note_hit(moved)
        if moved == length_bytes:
            return tuple.__new__(StartedAnswer, (sent, NOTHING, None))
        return StartedAnswer(sent, memoryview(head)[sent:], self._rest(found, max(moved, 0), wake))

    def _find(self, asked: _Asked) -> _Found | None:
        head_info, line, proven = asked
        now_s = time.time()
        shape = self._store.known_shape(head_info.key) if self._is_good(head_info, now_s) else None
        if shape is None or (head_info.if_match and head_info.if_match != f'"{shape.etag}"'):
            return None
        start, end = _span_of(line, shape)
        at_hand = self._at_hand(head_info.key, shape, start, end) if start < end else None
        if at_hand is None:
            return None
        is_part = line is not None
        head = head_info.render_head(shape, start, end, int(now_s), is_part=is_part)
        reply = b"\r\n"
        if proven is not None:
            reply = self._reply(proven, AnswerSpan(shape.etag, start, end - start))
            if not reply:
                return None
        status = 206 if is_part else 200
        found = head_info, shape, status, head + reply, start, end - start, *at_hand
        # Half the time of _Found(...), in every request.
        return tuple.__new__(_Found, found)

    def _asked(self, head: bytes, heads: dict[bytes, CachedHead | None]) -> _Asked | None:
        """The known head and its Range line."""
        at = head.find(RANGE_START)
        line = None
        if at >= 0:
            line = _LINE.match(head, at)
            if line is None:
                return None
            head = head[:at] + head[line.end() :]
        head_info = heads.get(head)
        if head_info is None:
            head_info = self._learn(head, heads)
        return (head_info, line, None) if head_info is not None else None

    def _asked_by_hop(self, head: bytes, at: int) -> _Asked | None:
        """The known head of a hop whose line is at `at`, and the verified hop;

        None: use the full path.
        """
        proof = HOP_LINE.match(head, at)
        gate = self._context.gate
        if proof is None or gate is None:
            return None
        asked = self._asked(head[:at] + head[proof.end() :], self._hop_heads)
        if asked is None:
            return None
        head_info, line, _ = asked
        span = line[0].decode("ascii").removeprefix(_RANGE_NAME) if line is not None else ""
        covered = covered_text("GET", head_info.target, span, head_info.if_match)
        proven = gate.verify(proof[1].decode("ascii"), covered, head_info.key)
        return (head_info, line, proven) if proven is not None else None

    def _pass_on(self, data: bytes, asked: _Asked, take: Take, began_s: float) -> PeerProxy | None:
        """Request the block from the node that keeps it, if that is possible at once."""
        head_info, line, _ = asked
        router = self._context.router
        if router is None or not self._is_good(head_info, time.time()):
            return None
        shape = router.peer_source.shape_now(head_info.key)
        if shape is None:
            return None
        start, end = _span_of(line, shape)
        if start >= end:
            return None
        clock = StageClock(monotonic, began_s) if self._sampler.is_next() else None
        if clock is not None:
            clock.mark("find")
        passing = PeerProxy(
            data,
            head_info,
            shape,
            start=start,
            end=end,
            is_part=line is not None,
            source=router.peer_source,
            counters=self._counters,
            take=take,
            began_s=began_s,
            clock=clock,
        )
        return passing if passing.is_begun else None

    def _is_good(self, head_info: CachedHead, now_s: float) -> bool:
        """Whether the URL is valid, the key's owners are unchanged, and no trace is active."""
        if head_info.expires_at is not None and now_s >= head_info.expires_at:
            return False
        context = self._context
        if head_info.placement is not context.placement:
            self._heads.clear()
            self._hop_heads.clear()
            return False
        return context.traces is None or not context.traces.is_on

    def _at_hand(
        self, key: str, shape: Shape, start: int, end: int
    ) -> tuple[Frame, memoryview] | None:
        """The frame of the span's start if its bytes are in memory; short spans are copied."""
        store = self._store
        number, offset = divmod(start, BLOCK_BYTES)
        frame = store.find(store.key(key, shape, number))
        count = min(end - start, BLOCK_BYTES - offset)
        if frame is None or frame.length < offset + count:
            return None
        if count <= JOINED_BYTES:
            joined = self._joined[:count]
            return (frame, joined) if store.read_now(frame, offset, joined) else None
        return (frame, NOTHING) if store.is_warm(frame, offset, count) else None

    def _send_frame(self, channel: Channel, found: _Found) -> int:
        offset = found.start % BLOCK_BYTES
        count = min(found.length_bytes, BLOCK_BYTES - offset)
        frame = found.frame
        try:
            return channel.send_file(frame.fd, frame.offset + offset, count)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._store.report_fault(frame.disk, error)
            return 0

    def _rest(self, found: _Found, moved: int, wake: Callable[[], None]) -> BlockBody:
        start = found.start + moved
        is_begun = bool(moved and start % BLOCK_BYTES)
        return BlockBody(
            self._own,
            found.head_info.key,
            found.shape,
            start=start,
            length_bytes=found.length_bytes - moved,
            wake=wake,
            is_begun=is_begun,
        )

    def _reply(self, proven: VerifiedHop, span: AnswerSpan) -> bytes:
        """The end of the head that answers a hop; empty: the hop was used before."""
        gate = self._context.gate
        assert gate is not None, "it proved the hop"
        reply = gate.accept(proven, span)
        return f"X-Headrace-Reply: {reply}\r\n\r\n".encode("ascii") if reply is not None else b""

    def _learn(self, head: bytes, heads: dict[bytes, CachedHead | None]) -> CachedHead | None:
        """The known head of a head that was parsed before, or None."""
        if head in heads:
            return None
        request = remembered(head)
        if request is None:
            return None
        if len(heads) >= HEADS_MAX:
            heads.clear()
        is_hop = heads is self._hop_heads
        head_info = heads[head] = self._hop_head_of(request) if is_hop else self._head_of(request)
        return head_info

    def _head_of(self, request: Request) -> CachedHead | None:
        if not _is_plain(request) or "if-match" in request.fields:
            return None
        try:
            admitted = self._context.admit(request, None)
        except HeadraceError:
            return None
        rights = admitted.rights
        is_bare = admitted.hop is None and admitted.trace is None
        if (
            not is_bare
            or rights.rate is not None
            or rights.tag is not None
            or rights.trace is not None
        ):
            return None
        is_remote = not self._context.is_replica(admitted.key)
        cors = self._context.cors.lines(request.fields)
        return CachedHead(
            admitted.key, rights, self._context.placement, is_remote=is_remote, cors=cors
        )

    def _hop_head_of(self, request: Request) -> CachedHead | None:
        """Every node answers a hop; its signature covers what it may request."""
        fields = request.fields
        if not _is_plain(request) or any(name in fields for name in _HOP_OTHERS):
            return None
        try:
            key = key_of(request.target)
        except HeadraceError:
            return None
        if_match = fields.get("if-match", "")
        cors = self._context.cors.lines(fields)
        return CachedHead(
            key, OPEN, self._context.placement, target=request.target, if_match=if_match, cors=cors
        )


def _span_of(line: re.Match[bytes] | None, shape: Shape) -> tuple[int, int]:
    """The requested bytes, from and up to."""
    if line is None:
        return 0, shape.size_bytes
    first, last = line.groups()
    return int(first), min(shape.size_bytes, int(last) + 1) if last else shape.size_bytes


def _is_plain(request: Request) -> bool:
    is_plain = request.method == "GET" and request.keeps_alive and not request.is_http_1_0
    has_more = request.has_body or any(name in request.fields for name in _CONDITIONS)
    return is_plain and not has_more


def _send(channel: Channel, head: bytes, first_bytes: memoryview) -> int:
    try:
        if first_bytes:
            return channel.send_both(head, first_bytes)
        return channel.send(memoryview(head), is_more=True)
    except BlockingIOError:
        return 0
