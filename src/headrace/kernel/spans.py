"""Spans of OpenTelemetry: a request, a job or a step is one if its traceparent is sampled.

Idea: `logs.current_traceparent` is the trace context, with OpenTelemetry or without. A span is made
only where the flag `sampled` is set, so other requests and jobs cost one check of that flag. A
trace is sampled or not when it begins. The libraries are imported only if tracing is on.

Tracing is on if the application has set a TracerProvider, which is then used, or if
OTEL_EXPORTER_OTLP_ENDPOINT is set. Exporters have threads, so a slot calls `start` after its fork.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from headrace.kernel.errors import ExtraMissing
from headrace.kernel.logs import NewTraces, child_traceparent, current_traceparent, is_sampled
from headrace.kernel.otel_settings import sampled_ratio

if TYPE_CHECKING:
    from headrace.kernel.otel import Kind, Span, Tracing

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_S: Final = 1.0
"""How long the end of a process may wait for the export of its last spans."""
active: Tracing | None = None
"""None while tracing is off. Hot paths read it once per request or call."""
_NONE: Final = nullcontext(None)


def endpoint() -> str | None:
    """Where the environment sends spans; None if it does not turn tracing on."""
    if _is_disabled() or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    return next((url for name in ENDPOINTS if (url := os.environ.get(name))), None)


def load() -> None:
    """Import the libraries if they will be used, for processes that fork.

    Raises: ExtraMissing, InvalidConfig.
    """
    if endpoint() is not None:
        sampled_ratio(os.environ)  # first, since the libraries read some variables on import
        try:
            from headrace.kernel import otel  # noqa: F401
        except ImportError as error:
            raise ExtraMissing(
                "otel",
                need=f"{ENDPOINTS[1]} is set, and the libraries of OpenTelemetry are not installed."
                " Unset it, set OTEL_SDK_DISABLED=true, or install them",
            ) from error


def start(role: str | None = None) -> None:
    """Turn tracing on for this process if that is configured; `role` is None in a user's process.

    Further calls have no effect. Raises: ExtraMissing, InvalidConfig.
    """
    global active  # noqa: PLW0603 - one per process, as the provider of OpenTelemetry
    if active is not None or _is_disabled():
        return
    provider, ratio = _provider_of_application(), 1.0
    if provider is None:
        if endpoint() is None:
            return
        load()
        from headrace.kernel.otel import make_provider

        provider, ratio = make_provider(role, os.environ)
    from headrace.kernel.otel import Tracing

    NewTraces.sampled_ratio = ratio
    active = Tracing(provider)


def flush(wait_s: float = FLUSH_S) -> None:
    """Export the last spans, for at most `wait_s`; the rest is lost."""
    if active is not None:
        thread = threading.Thread(target=active.flush, daemon=True)
        thread.start()
        thread.join(wait_s)


def inside(
    name: str, kind: Kind, attributes: Mapping[str, Any]
) -> AbstractContextManager[Span | None]:
    """A span of the block; None if it is not sampled."""
    if active is None:
        return _NONE
    parent = active.current()
    if not is_sampled(child_traceparent(parent)):
        return _NONE
    return active.block(name, kind, parent, attributes)


def producing(queues: list[str]) -> AbstractContextManager[str]:
    """A block that enqueues jobs of these queues. Its value is the traceparent of the jobs."""
    if active is None:
        return nullcontext(child_traceparent(current_traceparent.get()))
    parent = active.current()
    traceparent = child_traceparent(parent)
    if not is_sampled(traceparent):
        return nullcontext(traceparent)
    return active.producing(queues, parent)


def _is_disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"


def _provider_of_application() -> Any:
    """The TracerProvider that the application has set; None without one."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    is_unset = isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider)
    return None if is_unset else provider
