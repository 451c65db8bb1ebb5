"""A receiver of OTLP over HTTP, such as an OpenTelemetry Collector has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.kit.processes import wait_until
from tests.kit.site import http_host


@dataclass
class Received:
    """One span, with the role of its process."""

    name: str
    role: str
    trace: str
    id: str
    parent: str
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    links: list[str]
    """Traces of its links."""


@dataclass
class Receiver:
    """The spans received so far."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    spans: list[Received] = field(default_factory=list)

    def of(self, trace: str) -> dict[str, Received]:
        """The spans of a trace by name."""
        return {span.name: span for span in list(self.spans) if span.trace == trace}

    def wait_for(self, trace: str, *names: str) -> dict[str, Received]:
        """The spans of a trace, once these have arrived."""
        try:
            wait_until(lambda: set(names) <= self.of(trace).keys(), what=f"spans {names}")
        except AssertionError as late:
            raise AssertionError(f"{late}; arrived: {sorted(self.of(trace))}") from late
        return self.of(trace)

    def add(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Decode one request."""
        self.paths.append(path)
        for process in ExportTraceServiceRequest.FromString(body).resource_spans:
            role = _values(process.resource.attributes).get("headrace.role", "")
            for scope in process.scope_spans:
                self.spans += [_span(span, role) for span in scope.spans]
        return 200, b""


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Receive spans on loopback."""
    receiver = Receiver()
    with http_host(receiver.add) as receiver.url:
        yield receiver


def _span(span: Any, role: str) -> Received:
    return Received(
        span.name,
        role,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.status.code == 2,
        _values(span.attributes),
        [link.trace_id.hex() for link in span.links],
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in attributes
    }
