"""The time of a request's stages, and the record of one request and its answer.

One request in SAMPLED_EVERY is measured, and each traced one, because observing all stages would
slow down answers. Samples are taken by count, so stages and tails represent all requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Final

from headrace.kernel import spans
from headrace.kernel.logs import is_sampled
from headrace.kernel.metrics import bound
from headrace.media.model import REQUESTS, SENT_BYTES, SOURCES, STAGE, STAGES, STATUSES
from headrace.media.requests import Request
from headrace.media.tracing import TraceLog
from headrace.media.worker.access_log import LogEntry
from headrace.media.worker.request_context import Admitted

if TYPE_CHECKING:
    from headrace.kernel.otel import Span

SAMPLED_EVERY: Final = 16
ANSWERED: Final = {s: bound(REQUESTS, "media_requests_total", status=str(s)) for s in STATUSES}
SENT: Final = {s: bound(SENT_BYTES, "media_bytes_total", source=s) for s in SOURCES}
_SERIES: Final = {stage: bound(STAGE, "media_stage_seconds", stage=stage) for stage in STAGES}


def samples() -> Iterator[bool]:
    """For each request of a worker whether to measure it: the first, then one in SAMPLED_EVERY."""
    return cycle([True, *[False] * (SAMPLED_EVERY - 1)])


class Exchange:
    """The record of a request until its answer is finished. The stages of some are timed."""

    __slots__ = (
        "_began_s",
        "_is_sampled",
        "_last_s",
        "_now_s",
        "_sent_before",
        "_span",
        "_stages_s",
        "_status",
        "_traces",
        "admitted",
        "cache_status",
        "entry",
        "is_first_byte_out",
        "request",
    )

    def __init__(
        self,
        began_s: float,
        *,
        now_s: Callable[[], float],
        is_sampled: bool,
        traces: TraceLog,
    ) -> None:
        self.admitted: Admitted | None = None
        self.request: Request | None = None
        self.entry: LogEntry | None = None
        """Of the access log, once the answer has begun."""
        self.cache_status = ""
        self.is_first_byte_out = False
        self._began_s = began_s
        self._traces = traces if traces.is_on else None
        self._is_sampled = is_sampled
        self._now_s, self._last_s = now_s, began_s
        is_timed = is_sampled or self._traces is not None
        self._stages_s: dict[str, float] | None = {} if is_timed else None
        self._status = 0
        self._sent_before = 0
        self._span: Span | None = None

    def admit(self, admitted: Admitted, method: str) -> Admitted:
        """Record the admitted request; begin its span if its traceparent is sampled.

        A hop made for the request is below this span.
        """
        tag = admitted.trace
        if spans.active is not None and tag is not None and is_sampled(tag.traceparent):
            attributes = {
                "http.request.method": method,
                "http.route": "/m/{key}",
                "url.path": f"/m/{admitted.key}",
                "headrace.media.is_hop": admitted.hop is not None,
            }
            self._span = span = spans.active.begin(
                f"{method} /m/{{key}}", "SERVER", tag.traceparent, attributes, is_current=False
            )
            admitted = admitted._replace(trace=tag._replace(traceparent=span.traceparent))
        self.admitted = admitted
        return admitted

    def mark(self, stage: str) -> None:
        """End `stage` and begin the next: add the time since the last mark to it."""
        if self._stages_s is not None:
            now_s = self._now_s()
            self._stages_s[stage] = self._stages_s.get(stage, 0.0) + now_s - self._last_s
            self._last_s = now_s

    def begin_sending(self, status: int, sent_bytes: int) -> None:
        """Record the status; `sent_bytes` is the count of the connection before the answer."""
        self._status = status
        self._sent_before = sent_bytes

    def begin_entry(self, client: str, data: bytes) -> None:
        """Record `client` for the access log; `data` begins with the head of the answer."""
        head_end = self._sent_before + data.find(b"\r\n\r\n") + 4
        self.entry = LogEntry(
            client,
            self.request,
            self._status,
            self.cache_status,
            self._began_s,
            time.time(),
            head_end,
        )

    def note_first_byte(self, now_s: float) -> float:
        """Record the first byte. Return the seconds since the request."""
        self.is_first_byte_out = True
        self.mark("send")
        if self._is_sampled and self._stages_s is not None:
            for stage, spent_s in self._stages_s.items():
                _SERIES[stage].observe(spent_s)
        return now_s - self._began_s

    def write_trace(self, outcome: str, sent_bytes: int) -> None:
        """End the span, and log the line if a watch matches.

        Its `send` includes the time to the answer's end.
        """
        if self._span is not None:
            self._end_span(self._span, outcome, sent_bytes - self._sent_before)
        tag = self.admitted.trace if self.admitted is not None else None
        if self._traces is None or tag is None or not self._traces.is_wanted(tag):
            return
        self.mark("send")
        assert self._stages_s is not None, "it is timed while there is a watch"
        self._traces.write(
            tag,
            status=self._status,
            sent_bytes=sent_bytes - self._sent_before,
            cache=self.cache_status,
            outcome=outcome,
            stages_s=self._stages_s,
        )

    def _end_span(self, span: Span, outcome: str, sent_bytes: int) -> None:
        span.note(
            {
                "http.response.status_code": self._status,
                "http.response.size": sent_bytes,
                "headrace.media.cache": self.cache_status,
            }
        )
        if outcome != "done" or self._status >= 500:
            span.fail(outcome if outcome != "done" else str(self._status))
        span.end()
