"""The part of `spans` that imports OpenTelemetry: the exporting provider, and spans.

Names and attributes follow the semantic conventions for HTTP and messaging. A batch of jobs is one
span: below its first sampled job, with links to all of them.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode

from headrace.kernel.config import InvalidConfig
from headrace.kernel.logs import child_traceparent, current_traceparent, is_sampled, is_traceparent
from headrace.kernel.otel_settings import sampled_ratio

Kind = Literal["INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"]
Attributes = Mapping[str, Any]
SYSTEM: Final = "headrace"
TIMEOUTS: Final = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
USERS_EXPORT_S: Final = 2.0
"""Time limit of an export in a user's process, which waits for it when it ends."""
_OWN_ROOT: Final = otel_context.create_key("headrace-root")
_ROOT: Final = otel_context.set_value(_OWN_ROOT, value=True, context=otel_context.Context())
_UNSAMPLED: Final = NonRecordingSpan(SpanContext(1, 1, is_remote=True))
"""The current span of jobs that are not sampled, so that spans of their code are not either."""


def make_provider(role: str | None, env: Mapping[str, str]) -> tuple[TracerProvider, float]:
    """A provider that exports over OTLP/HTTP, and the ratio of new traces that are sampled.

    In a role it becomes the global one, so spans of handlers are exported too. `role` is None in a
    user's process, which may still set its own. Raises: InvalidConfig.
    """
    ratio = sampled_ratio(env)
    instance = f"{socket.gethostname()}:{os.getpid()}"
    resource = Resource.create(
        {"service.instance.id": instance, **({"headrace.role": role} if role else {})}
    )
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SYSTEM}))
    # `spans.flush` bounds the end of a role.
    provider = TracerProvider(
        sampler=ParentBased(_Roots(ratio)), resource=resource, shutdown_on_exit=role is None
    )
    has_timeout = any(env.get(name) for name in TIMEOUTS)
    timeout_s = None if role or has_timeout else USERS_EXPORT_S
    try:
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
    except (ValueError, RuntimeError) as error:
        raise InvalidConfig(f"configuration of OpenTelemetry: {error}") from error
    if role is not None:
        trace.set_tracer_provider(provider)
        # Its warnings about each retry, from every slot, would fill the log.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    return provider, ratio


class _Roots(Sampler):
    """Samples roots of Headrace, about which `NewTraces` has decided, and others by ratio."""

    def __init__(self, ratio: float) -> None:
        self._others = TraceIdRatioBased(ratio)

    def should_sample(
        self, parent_context: otel_context.Context | None, *arguments: Any, **named: Any
    ) -> SamplingResult:
        """See `Sampler`."""
        is_ours = parent_context is not None and _OWN_ROOT in parent_context
        sampler = ALWAYS_ON if is_ours else self._others
        return sampler.should_sample(parent_context, *arguments, **named)

    def get_description(self) -> str:
        """See `Sampler`."""
        return "headrace"


class Span:
    """A span that has begun; the current one until `end` or `leave`."""

    __slots__ = ("_before", "_otel", "_token", "traceparent")

    def __init__(self, otel: trace.Span, *, is_current: bool) -> None:
        self._otel = otel
        self.traceparent = _traceparent(otel.get_span_context())
        self._token = self._before = None
        if is_current:
            self._token = otel_context.attach(trace.set_span_in_context(otel))
            self._before = current_traceparent.set(self.traceparent)

    def rename(self, name: str) -> None:
        """Set a name that was not known before."""
        self._otel.update_name(name)

    def note(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._otel.set_attributes(attributes)

    def fail(self, kind: str, text: str = "") -> None:
        """Mark it as failed with an error of this kind."""
        self._otel.set_attribute("error.type", kind)
        self._otel.set_status(Status(StatusCode.ERROR, text))

    def end(self) -> None:
        """End it; the span around it is the current one again."""
        self._otel.end()
        self.leave()

    def leave(self) -> None:
        """Drop it without an end, or make the span around it the current one."""
        if self._token is not None and self._before is not None:
            otel_context.detach(self._token)
            current_traceparent.reset(self._before)
            self._token = self._before = None


class Acked(Protocol):
    """A lease whose acks are recorded."""

    ids: Sequence[int]
    sampled: Sequence[str]
    acked_ns: int


class Tracing:
    """Begins spans of a provider."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer: trace.Tracer = provider.get_tracer("headrace")

    def begin(
        self,
        name: str,
        kind: Kind,
        parent: str | None,
        attributes: Attributes,
        *,
        links: Sequence[str] = (),
        began_ns: int | None = None,
        is_current: bool = True,
    ) -> Span:
        """Begin a span below `parent`, or the first one of a trace."""
        above = _ROOT
        if parent is not None and is_traceparent(parent):
            above = trace.set_span_in_context(NonRecordingSpan(_remote(parent)), above)
        otel = self._tracer.start_span(
            name,
            above,
            SpanKind[kind],
            attributes,
            [Link(_remote(link)) for link in links],
            start_time=began_ns,
        )
        return Span(otel, is_current=is_current)

    @contextmanager
    def block(
        self, name: str, kind: Kind, parent: str | None, attributes: Attributes
    ) -> Iterator[Span]:
        """A span of the block; an error that leaves the block marks it as failed."""
        span = self.begin(name, kind, parent, attributes)
        try:
            yield span
        except BaseException as error:
            span.fail(type(error).__name__, str(error))
            raise
        finally:
            span.end()

    @contextmanager
    def producing(self, queues: Sequence[str], parent: str | None) -> Iterator[str]:
        """A span of a block that enqueues; its traceparent, for the jobs."""
        name, attributes = _messaging("enqueue", "send", set(queues))
        if len(queues) > 1:
            attributes["messaging.batch.message_count"] = len(queues)
        with self.block(name, "PRODUCER", parent, attributes) as span:
            yield span.traceparent

    def sampled(self, headers: Sequence[str | None]) -> list[str]:
        """The traceparents of sampled jobs."""
        return [text[:55] for text in headers if text is not None and is_sampled(text)]

    def running(self, queue: str, ids: Sequence[int], headers: Sequence[str | None]) -> Span | None:
        """Begin the span of a call with these jobs; None if none of them is sampled."""
        sampled = self.sampled(headers)
        if not sampled:
            otel_context.attach(_UNSAMPLED_CONTEXT)
            current_traceparent.set(child_traceparent(headers[0] and headers[0][:55]))
            return None
        name, attributes = _messaging("run", "process", {queue})
        _note_ids(attributes, ids)
        links = sampled if len(ids) > 1 else ()
        return self.begin(name, "CONSUMER", sampled[0], attributes, links=links)

    def acked(self, lease: Acked) -> None:
        """Report that the outcomes of sampled jobs are recorded."""
        name, attributes = _messaging("ack", "settle", set())
        _note_ids(attributes, lease.ids)
        self.begin(
            name,
            "CLIENT",
            lease.sampled[0],
            attributes,
            links=lease.sampled if len(lease.ids) > 1 else (),
            began_ns=lease.acked_ns,
            is_current=False,
        ).end()

    def current(self) -> str | None:
        """The traceparent of the user's current span, or of Headrace's."""
        span = trace.get_current_span()
        found = span.get_span_context()
        if span is _UNSAMPLED or not found.is_valid:
            return current_traceparent.get()
        return _traceparent(found)

    def flush(self) -> None:
        """Export all spans that have ended; blocks."""
        if hasattr(self._provider, "force_flush"):
            self._provider.force_flush()


_UNSAMPLED_CONTEXT: Final = trace.set_span_in_context(_UNSAMPLED, otel_context.Context())


def _traceparent(found: SpanContext) -> str:
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def _remote(traceparent: str) -> SpanContext:
    return SpanContext(
        int(traceparent[3:35], 16),
        int(traceparent[36:52], 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(traceparent[53:55], 16)),
    )


def _messaging(operation: str, kind: str, queues: set[str]) -> tuple[str, dict[str, Any]]:
    """Name and attributes of a span about jobs; of several queues none is named."""
    attributes: dict[str, Any] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    if len(queues) != 1:
        return operation, attributes
    [queue] = queues
    attributes["messaging.destination.name"] = queue
    return f"{operation} {queue}", attributes


def _note_ids(attributes: dict[str, Any], ids: Sequence[int]) -> None:
    if len(ids) == 1:
        attributes["messaging.message.id"] = str(ids[0])
    else:
        attributes["messaging.batch.message_count"] = len(ids)
