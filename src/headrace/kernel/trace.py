"""W3C trace context, carried enqueue -> job -> fetch -> blob -> media hop.

Parsed and made by hand: 0.6 us against 3.6 us through OpenTelemetry, and an unsampled span of its costs
6 us (prototypes of 2026-11-21, 2 cores). Source: W3C Trace Context, section 3.2.
"""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from typing import Final

_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
current_traceparent: ContextVar[str | None] = ContextVar("current_traceparent", default=None)
onward: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("onward", default=())
"""Header fields that requests to the object store carry, where the one they are made for is looked into."""


def new_traceparent() -> str:
    """A fresh, unsampled traceparent."""
    return f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-00"


def is_traceparent(text: str) -> bool:
    """Whether `text` is a valid traceparent of version 00."""
    return _TRACEPARENT.fullmatch(text) is not None


def next_hop(traceparent: str | None) -> str:
    """The traceparent to hand on: the same trace under a new span, or a new trace if none is valid."""
    if traceparent is None or not is_traceparent(traceparent):
        return new_traceparent()
    return f"{traceparent[:36]}{random.getrandbits(64):016x}{traceparent[52:]}"


def trace_id(traceparent: str | None) -> str | None:
    """The 32 hex digits that name the trace, or None."""
    return traceparent[3:35] if traceparent else None
