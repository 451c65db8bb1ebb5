"""Following one user, request or object through the cluster: a trace tag a request, logged only where asked for.

A request's tag is its W3C `traceparent` and, of its `baggage`, `user` and `request`; the object is the key asked for.
What a signed URL says of user and request wins, since a client cannot change it. The tag goes on with every
request that is made for this one, to a peer and to the origin, so one trace id finds all lines.

Off by default: a node then reads no tag but to hand it on. `headrace media trace on --tag user=42 --for 10m` adds a
watch to a document that the cluster shares beside its membership, so every node has it within two seconds; each
then logs the matching requests, one line an answer with the time of each stage. Bounds: WATCHES_MAX watches,
each ends by itself; LINES_PER_S lines a second and process (what is left out is counted in the next line).
A line holds no query and no address: so no signature, and nothing that the watch did not ask for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from headrace.kernel.errors import InvalidInput
from headrace.kernel.logs import (
    child_traceparent,
    is_traceparent,
    logger,
    new_traceparent,
    trace_id,
)
from headrace.kernel.metrics import bound, counter
from headrace.media.cluster.documents import Kind

log = logger(__name__)
WATCHES_MAX: Final = 16
WATCH_S_MAX: Final = 86_400.0
LINES_PER_S: Final = 50
Name: TypeAlias = Literal["user", "request", "object", "trace"]
NAMES: Final[tuple[Name, ...]] = ("user", "request", "object", "trace")
_CARRIED: Final = ("user", "request")
_BAGGAGE_CHARACTERS_MAX: Final = 8_192
_VALUE: Final = re.compile(r"[A-Za-z0-9._:@~/-]{1,512}")
LINES: Final = counter(
    "media_trace_lines_total",
    "Lines about traced requests.",
    outcome=("written", "left_out"),
)


class TraceInvalid(InvalidInput):
    """What to trace is no name=value of a known name, or for too long."""

    code = "media.trace_invalid"


class TraceTag(NamedTuple):
    """What a request is known by. `traceparent` is None when the client sent none that is valid."""

    traceparent: str | None
    user: str | None
    request: str | None
    object: str

    @property
    def trace(self) -> str | None:
        """The 32 hex digits that all requests of one trace share."""
        return trace_id(self.traceparent)

    @property
    def is_told(self) -> bool:
        """Whether there is anything that a peer or the origin could not tell by itself."""
        return self.traceparent is not None or self.user is not None or self.request is not None


class Watch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log the requests whose `name` is `value` until `ends_at`."""

    name: Name
    value: str
    ends_at: Annotated[datetime, msgspec.Meta(tz=True)]

    def is_over(self, now: datetime) -> bool:
        """Whether its time has passed."""
        return now >= self.ends_at


class Watches(msgspec.Struct, frozen=True, kw_only=True):
    """The document that the cluster shares."""

    version: int = 0
    watches: Annotated[tuple[Watch, ...], msgspec.Meta(max_length=WATCHES_MAX)] = ()


TRACE: Final = Kind("trace", Watches, Watches())
"""Where the cluster keeps what is traced."""


def parse_selector(text: str) -> tuple[Name, str]:
    """Name and value of `user=42`. Raises: TraceInvalid."""
    name, mark, value = text.partition("=")
    if name not in NAMES or not mark or _VALUE.fullmatch(value) is None:
        raise TraceInvalid(
            f"{text[:80]!r} is nothing to trace: write one of {', '.join(NAMES)}, = and what it is,"
            " such as user=42 or object=tracks/a.mp3"
        )
    return name, value


def read_trace(fields: Mapping[str, str], key: str, granted: str | None = None) -> TraceTag:
    """The tag of a request for `key`, from its head (names in lower case) and what its signed URL says.

    What is malformed or too long is left out, never an error: a player knows nothing of it.
    """
    parent = fields.get("traceparent")
    if parent is not None and not is_traceparent(parent):
        parent = None
    baggage = fields.get("baggage", "")
    members = _members(baggage) if len(baggage) <= _BAGGAGE_CHARACTERS_MAX else {}
    if granted is not None:
        members |= _members(granted)
    return TraceTag(parent, members.get("user"), members.get("request"), key)


def onward_fields(tag: TraceTag) -> tuple[tuple[str, str], ...]:
    """The header fields that a request made for this one carries; none where nothing is known of it."""
    if not tag.is_told:
        return ()
    known = {"user": tag.user, "request": tag.request, "object": tag.object}
    baggage = ",".join(f"{name}={value}" for name, value in known.items() if value is not None)
    return ("traceparent", child_traceparent(tag.traceparent)), ("baggage", baggage)


class TraceLog:
    """What one process of a node logs; `watches` gives what the cluster asked for last."""

    def __init__(
        self,
        watches: Callable[[], tuple[Watch, ...]],
        *,
        node: str,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._watches = watches
        self._node = node
        self._now_s = now_s
        self._known: tuple[Watch, ...] = ()
        self._ends_s = 0.0
        self._second = 0
        self._lines_count = 0
        self._left_out_count = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is watched: all that an untraced request asks."""
        watches = self._watches()
        if watches is not self._known:
            self._known = watches
            self._ends_s = max((watch.ends_at.timestamp() for watch in watches), default=0.0)
        return self._ends_s > 0 and self._now_s() < self._ends_s

    def is_wanted(self, tag: TraceTag) -> bool:
        """Whether a watch asks for this request."""
        if not self.is_on:
            return False
        now = datetime.fromtimestamp(self._now_s(), UTC)
        return any(
            getattr(tag, watch.name) == watch.value and not watch.is_over(now)
            for watch in self._known
        )

    def follow(self, tag: TraceTag) -> TraceTag:
        """`tag`, in a trace of ours where a watch asks for the request and its client began none."""
        if tag.traceparent is None and self.is_wanted(tag):
            return tag._replace(traceparent=new_traceparent())
        return tag

    def write(
        self,
        tag: TraceTag,
        *,
        status: int,
        sent_bytes: int,
        cache: str,
        outcome: str,
        stages_s: Mapping[str, float],
    ) -> None:
        """One line about an answer that is over: `outcome` is `done` or why it was cut."""
        if not self._may_write():
            return
        log.info(
            "request_traced",
            trace_id=tag.trace,
            node=self._node,
            user=tag.user,
            request=tag.request,
            object=tag.object,
            status=status,
            sent_bytes=sent_bytes,
            cache=cache,
            outcome=outcome,
            left_out_lines=self._left_out_count,
            **{f"{stage}_ms": round(spent_s * 1000, 3) for stage, spent_s in stages_s.items()},
        )
        self._left_out_count = 0

    def _may_write(self) -> bool:
        second = int(self._now_s())
        if second != self._second:
            self._second, self._lines_count = second, 0
        self._lines_count += 1
        may = self._lines_count <= LINES_PER_S
        self._left_out_count += not may
        bound(LINES, "media_trace_lines_total", outcome="written" if may else "left_out").inc()
        return may


def _members(text: str) -> dict[str, str]:
    """The members that are carried on of `user=42,request=r7;property,other=x`; the first of a name counts."""
    found: dict[str, str] = {}
    for member in text.split(",")[:64]:
        name, _, value = member.partition(";")[0].partition("=")
        name, value = name.strip(), value.strip()
        if name in _CARRIED and name not in found and _VALUE.fullmatch(value):
            found[name] = value
    return found
