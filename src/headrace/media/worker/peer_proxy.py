"""The fast path for a request that another node answers, without a task.

The request is sent in the epoch that read the client's, and its answer is sent on as it is
received.
The full path needs a task and twice as many rounds of the loop. It is used if no connection is
free, others request the same block, or the peer fails or answers anything but the bytes.
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
    """A request that is passed to a peer. `data` is its head; `is_begun`: the request was sent."""

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
    )

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
        """Cancel after the client disconnected."""
        if self._asking is not None:
            self._asking.cancel()

    def begin(self, channel: Channel, *, wake: Callable[[], None]) -> StartedAnswer | None:
        """Start the answer once the peer replied; None: use the full path."""
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
            self._source,
            head_info.key,
            self._shape,
            start=start + moved,
            length_bytes=end - start - moved,
            wake=wake,
            is_begun=moved > 0,
        )
        body.hold(coming, self._span.start, "peer")
        return StartedAnswer(sent, memoryview(head)[sent:], body)

    def _on_response(self, coming: PartialBlock | None) -> None:
        self._coming, self._asking = coming, None
        self._take(self)


def _send(channel: Channel, head: bytes, coming: PartialBlock) -> int:
    """Send the head and the received bytes, as far as the socket takes them. Errors show later."""
    try:
        return channel.send_both(head, coming.part(0))
    except (OSError, SourceCut):
        return 0
