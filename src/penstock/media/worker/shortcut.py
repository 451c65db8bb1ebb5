"""Requests that were understood before: a player asks one URL for many ranges of it.

What is decided of a request follows from its head, and the heads of one player differ in the numbers of their Range alone.
So what a head means is kept as a `Way` when it comes for the second time, without that line. Looked at each time is what may
change: that the grant holds, that this node still keeps the key, that the object's shape is known and young, that the
block stands in a frame of this turn and in memory. Whatever is not the plain case - conditions, hops, traces, tags,
rates, a bound address, a cold or a missing block - goes the long way, which decides anew.

An answer that the socket takes whole is over within one call; else a body goes on where this one stopped.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.kernel.errors import PenstockError
from penstock.media import answers
from penstock.media.hottest import ASKED
from penstock.media.model import BLOCK_BYTES, Shape
from penstock.media.requests import RANGE_START, Request, remembered
from penstock.media.signing import Grant
from penstock.media.sources import StoreSource
from penstock.media.store import Frame
from penstock.media.worker.bodies import BlockBody
from penstock.media.worker.channels import Channel
from penstock.media.worker.plane import Plane
from penstock.media.worker.stages import StageClock, StageSampler
from penstock.media.worker.tally import Tally

WAYS_MAX: Final = 4096
_LINE: Final = re.compile(rb"\r\nRange: bytes=([0-9]{1,18})-([0-9]{0,18})(?=\r\n)")
_SPAN: Final = b"Content-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n"
_WHOLE: Final = b"Content-Length: %d\r\n\r\n"
_CONDITIONS: Final = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range")  # fmt: skip


class Way:
    """What one head means, its Range left out, and the lines of an answer that stay the same for a second."""

    __slots__ = ("_grant", "_made_s", "_starts", "expires_at", "key", "placement", "shape")

    def __init__(self, key: str, grant: Grant, placement: object) -> None:
        self.key = key
        self.expires_at = grant.expires_at
        self.placement = placement
        self.shape: Shape | None = None
        self._grant = grant
        self._made_s = 0
        self._starts: dict[int, bytes] = {}

    def start_of(self, status: int, shape: Shape, now_s: int) -> bytes:
        """How an answer with `status` begins, up to the lines about its span."""
        if self._made_s != now_s or self.shape is not shape:
            self._made_s, self.shape = now_s, shape
            self._starts.clear()
        start = self._starts.get(status)
        if start is None:
            start = self._starts[status] = answers.steady_lines(
                status,
                shape,
                key=self.key,
                grant=self._grant,
                cache_status=answers.HIT,
                now_s=now_s,
            ).encode("latin-1")
        return start


class _Found(NamedTuple):
    """An answer that can go out now: its head, its span, and the frame that the span begins in."""

    way: Way
    shape: Shape
    status: int
    head: bytes
    start: int
    length_bytes: int
    frame: Frame


class Begun(NamedTuple):
    """An answer that has begun; `out` and `body` are what the socket did not take."""

    moved_bytes: int
    out: memoryview
    body: BlockBody | None


class Shortcuts:
    """The ways that one worker knows, for objects on its node's disks."""

    def __init__(
        self,
        plane: Plane,
        own: StoreSource,
        *,
        sampler: StageSampler,
        tally: Tally,
        now_s: Callable[[], float],
    ) -> None:
        self._plane = plane
        self._sampler = sampler
        self._tally = tally
        self._now_s = now_s
        self._own = own
        self._store = own.store
        self._ways: dict[bytes, Way | None] = {}

    def answer(self, data: bytes, channel: Channel, *, wake: Callable[[], None]) -> Begun | None:
        """Begin the answer to `data`, if that is one head that was understood before and its first bytes are at hand.

        None: nothing was done, it goes the long way. Call it within a turn. Raises: OSError (the client is gone).
        """
        began_s = self._now_s()
        found = self._find(data)
        if found is None:
            return None
        clock = StageClock(self._now_s, began_s) if self._sampler.is_next() else None
        if clock is not None:
            clock.mark("find")
        sent = _send(channel, found.head)
        self._tally.note_answer(found.status, self._now_s() - began_s)
        ASKED.note(found.way.key)
        if clock is not None:
            clock.mark("send")
            clock.observe()
        moved = self._send_frame(channel, found) if sent == len(found.head) else 0
        if moved:
            self._tally.note_hit(moved)
        out = memoryview(found.head)[sent:]
        return Begun(sent + moved, out, self._rest(found, moved, wake))

    def _find(self, data: bytes) -> _Found | None:
        at = data.find(RANGE_START)
        line = None
        head = data
        if at >= 0:
            line = _LINE.match(data, at)
            if line is None:
                return None
            head = data[:at] + data[line.end() :]
        way = self._ways.get(head)
        if way is None:
            way = self._learn(head)
            if way is None:
                return None
        shape = self._good_shape(way)
        if shape is None:
            return None
        start, end = 0, shape.size_bytes
        if line is not None:
            first, last = line.groups()
            start, end = int(first), min(end, int(last) + 1) if last else end
        if start >= end:
            return None
        frame = self._frame(way.key, shape, start, end)
        if frame is None:
            return None
        status = 206 if line is not None else 200
        steady = way.start_of(status, shape, int(time.time()))
        if line is not None:
            span = _SPAN % (end - start, start, end - 1, shape.size_bytes)
        else:
            span = _WHOLE % shape.size_bytes
        return _Found(way, shape, status, steady + span, start, end - start, frame)

    def _good_shape(self, way: Way) -> Shape | None:
        """The object's shape, as long as its way leads here."""
        if way.expires_at is not None and time.time() >= way.expires_at:
            return None
        plane = self._plane
        if way.placement is not plane.placement:
            self._ways.clear()
            return None
        if plane.traces is not None and plane.traces.is_on:
            return None
        return self._store.known_shape(way.key)

    def _frame(self, key: str, shape: Shape, start: int, end: int) -> Frame | None:
        """The frame that the span begins in, its bytes in memory."""
        number, offset = divmod(start, BLOCK_BYTES)
        frame = self._store.find(self._store.key(key, shape, number))
        count = min(end - start, BLOCK_BYTES - offset)
        if frame is None or frame.length < offset + count:
            return None
        return frame if self._store.is_in_memory(frame, offset, count) else None

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

    def _rest(self, found: _Found, moved: int, wake: Callable[[], None]) -> BlockBody | None:
        if moved == found.length_bytes:
            return None
        start = found.start + moved
        is_begun = bool(moved and start % BLOCK_BYTES)
        return BlockBody(
            self._own, found.way.key, found.shape,
            start=start, length_bytes=found.length_bytes - moved, wake=wake, is_begun=is_begun,
        )  # fmt: skip

    def _learn(self, head: bytes) -> Way | None:
        """The way of a head that was parsed before; None: it was not, or has none."""
        if head in self._ways:
            return None
        request = remembered(head)
        if request is None:
            return None
        if len(self._ways) >= WAYS_MAX:
            self._ways.clear()
        way = self._ways[head] = self._way_of(request)
        return way

    def _way_of(self, request: Request) -> Way | None:
        is_plain = request.method == "GET" and request.keeps_alive and not request.is_http_1_0
        if not is_plain or request.has_body or any(name in request.fields for name in _CONDITIONS):
            return None
        try:
            admitted = self._plane.admit(request, None)
        except PenstockError:
            return None
        grant = admitted.grant
        is_bare = admitted.hop is None and admitted.trace is None
        if (
            not is_bare
            or grant.rate is not None
            or grant.tag is not None
            or grant.trace is not None
        ):
            return None
        if not self._plane.is_kept_here(admitted.key):
            return None
        return Way(admitted.key, grant, self._plane.placement)


def _send(channel: Channel, head: bytes) -> int:
    try:
        return channel.send(memoryview(head), is_more=True)
    except BlockingIOError:
        return 0
