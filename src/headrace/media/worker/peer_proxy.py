"""One request that another node answers, without a task: asked in the turn that read it, sent on as its answer comes in.

The long way of such a request is a task that waits for a question that waits for a connection, four turns of the loop in
all; this one takes two, and its answer leaves with its head in one call. Whatever is not the plain case goes the long way
after all: no connection is free, others ask for the same block, the peer is lost or says anything but the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, time
from typing import TypeAlias

from headrace.media.cluster.routing import BlockRequest, PeerSource
from headrace.media.errors import SourceCut
from headrace.media.hottest import HOTTEST
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.sources import PartialBlock, Span
from headrace.media.worker.bodies import BlockBody
from headrace.media.worker.counters import Counters
from headrace.media.worker.head_cache import NOTHING, CachedHead, StartedAnswer
from headrace.media.worker.socket_io import Channel
from headrace.media.worker.timing import StageClock

Take: TypeAlias = Callable[["PeerProxy"], None]


class PeerProxy:
    """Its `data` are the head that was read; `is_begun`: the peer was asked."""

    __slots__ = (
        "_asking",
        "_began_s",
        "_clock",
        "_coming",
        "_counters",
        "_end",
        "_head_info",
        "_is_part",
        "_shape",
        "_source",
        "_span",
        "_start",
        "_take",
        "data",
    )  # fmt: skip

    def __init__(
        self,
        data: bytes,
        head_info: CachedHead,
        shape: Shape,
        *,
        start: int,
        end: int,
        is_part: bool,
        source: PeerSource,
        counters: Counters,
        take: Take,
        began_s: float,
        clock: StageClock | None,
    ) -> None:
        self.data = data
        self._head_info, self._shape, self._start, self._end = head_info, shape, start, end
        self._is_part, self._source, self._counters, self._take = is_part, source, counters, take
        self._began_s, self._clock = began_s, clock
        self._coming: PartialBlock | None = None
        number, offset = divmod(start, BLOCK_BYTES)
        self._span = Span(offset, min(offset + end - start, BLOCK_BYTES))
        flight = BlockRequest(head_info.key, shape.etag, number, self._span)
        self._asking = source.request_now(flight, shape, self._on_response)

    @property
    def is_begun(self) -> bool:
        return self._asking is not None

    def cancel(self) -> None:
        """The client is gone."""
        if self._asking is not None:
            self._asking.cancel()

    def begin(self, channel: Channel, *, wake: Callable[[], None]) -> StartedAnswer | None:
        """Begin the answer, once it was told of; None: it goes the long way."""
        coming = self._coming
        if coming is None:
            return None
        head_info, start, end = self._head_info, self._start, self._end
        head = (
            head_info.render_head(self._shape, start, end, int(time()), is_part=self._is_part)
            + b"\r\n"
        )
        if self._clock is not None:
            self._clock.mark("wait")
        span_bytes = self._span.end - self._span.start
        sent = _send(channel, head, coming) if end - start == span_bytes else 0
        self._counters.note_answer(206 if self._is_part else 200, monotonic() - self._began_s)
        HOTTEST.note(head_info.key)
        if self._clock is not None:
            self._clock.mark("send")
            self._clock.observe()
        moved = max(0, sent - len(head))
        if moved:
            self._counters.note_proxied(moved)
        if moved == end - start:
            return StartedAnswer(sent, NOTHING, None)
        body = BlockBody(
            self._source, head_info.key, self._shape,
            start=start + moved, length_bytes=end - start - moved, wake=wake, is_begun=moved > 0,
        )  # fmt: skip
        body.hold(coming, self._span.start, "peer")
        return StartedAnswer(sent, memoryview(head)[sent:], body)

    def _on_response(self, coming: PartialBlock | None) -> None:
        self._coming, self._asking = coming, None
        self._take(self)


def _send(channel: Channel, head: bytes, coming: PartialBlock) -> int:
    """What the socket takes of the head and of what is here; a client or a source that is gone is met by who sends next."""
    try:
        return channel.send_both(head, coming.part(0))
    except (OSError, SourceCut):
        return 0
