"""Tracing: follow one user, request or object through the cluster.

A request's tag is its W3C `traceparent` and, of its `baggage`, `user` and `request`; the object is
the requested key. Values in a signed URL take precedence, since a client cannot change them. The
tag is passed on with every request made for this one, to a peer and to the origin, so one trace id
finds all lines.

Tracing is off by default. `headrace media trace on --tag user=42 --for 10m` adds a watch to a
document of the cluster, which every node reads within two seconds. Each node then logs the matching
requests, one line per answer with the time of each stage. There are at most WATCHES_MAX watches,
each with an end, and LINES_PER_S lines per second and process; omitted lines are counted in the
next one. A line has no query and no address, so it contains no signature.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from headrace.engines.blobs import Blobs
from headrace.kernel.errors import InvalidInput, LimitExceeded
from headrace.kernel.logs import (
    is_traceparent,
    logger,
    new_traceparent,
    trace_id,
)
from headrace.kernel.metrics import bound, counter
from headrace.media.cluster.cluster_config import Document, DocumentType

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
    """The selector of a trace is no name=value of a supported name, or its duration is too long."""

    code = "media.trace_invalid"


class TraceTag(NamedTuple):
    """The trace tag of a request. `traceparent` is None without a valid field of the client."""

    traceparent: str | None
    user: str | None
    request: str | None
    object: str

    @property
    def trace(self) -> str | None:
        """The 32 hex digits that all requests of one trace share."""
        return trace_id(self.traceparent)

    @property
    def has_context(self) -> bool:
        """Whether the client or the URL gave trace information to pass on."""
        return self.traceparent is not None or self.user is not None or self.request is not None


class Watch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log the requests whose `name` is `value` until `ends_at`."""

    name: Name
    value: str
    ends_at: Annotated[datetime, msgspec.Meta(tz=True)]

    def is_over(self, now: datetime) -> bool:
        """Whether it has ended."""
        return now >= self.ends_at


class Watches(msgspec.Struct, frozen=True, kw_only=True):
    """The watches of the cluster."""

    version: int = 0
    watches: Annotated[tuple[Watch, ...], msgspec.Meta(max_length=WATCHES_MAX)] = ()


TRACE: Final = DocumentType("trace", Watches, Watches())
"""The document of the cluster that holds the watches."""


def parse_selector(text: str) -> tuple[Name, str]:
    """Name and value of a selector such as `user=42`. Raises: TraceInvalid."""
    name, mark, value = text.partition("=")
    if name not in NAMES or not mark or _VALUE.fullmatch(value) is None:
        raise TraceInvalid(
            f"{text[:80]!r} is no selector: use {', '.join(NAMES)} with = and a value, such as"
            " user=42 or object=tracks/a.mp3"
        )
    return name, value


def read_trace(fields: Mapping[str, str], key: str, granted: str | None = None) -> TraceTag:
    """The tag of a request for `key`, from its head (names in lower case) and its signed URL.

    Malformed or oversized values are ignored, since players do not set them on purpose.
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
    """The header fields to pass on with requests made for this one; none without information."""
    if not tag.has_context:
        return ()
    known = {"user": tag.user, "request": tag.request, "object": tag.object}
    baggage = ",".join(f"{name}={value}" for name, value in known.items() if value is not None)
    # Unchanged: it is already that of the span of this node, if there is one.
    traceparent = tag.traceparent or new_traceparent(may_sample=False)
    return ("traceparent", traceparent), ("baggage", baggage)


class TraceLog:
    """The trace log of one process. `watches` returns the cluster's watches."""

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
        """Whether there is an active watch: the only check for requests that are not traced."""
        watches = self._watches()
        if watches is not self._known:
            self._known = watches
            self._ends_s = max((watch.ends_at.timestamp() for watch in watches), default=0.0)
        return self._ends_s > 0 and self._now_s() < self._ends_s

    def is_wanted(self, tag: TraceTag) -> bool:
        """Whether a watch matches this request."""
        if not self.is_on:
            return False
        now = datetime.fromtimestamp(self._now_s(), UTC)
        return any(
            getattr(tag, watch.name) == watch.value and not watch.is_over(now)
            for watch in self._known
        )

    def follow(self, tag: TraceTag) -> TraceTag:
        """`tag`, with a new trace id if a watch matches and the client sent none."""
        if tag.traceparent is None and self.is_wanted(tag):
            return tag._replace(traceparent=new_traceparent(may_sample=False))
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
        """Log one finished answer. `outcome` is `done` or the reason of a cut."""
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
    """The relevant members of baggage such as `user=42,request=r7;property`; the first counts."""
    found: dict[str, str] = {}
    for member in text.split(",")[:64]:
        name, _, value = member.partition(";")[0].partition("=")
        name, value = name.strip(), value.strip()
        if name in _CARRIED and name not in found and _VALUE.fullmatch(value):
            found[name] = value
    return found


class TooManyWatches(LimitExceeded):
    """The maximum number of traces is active already."""

    code, retryable = "media.too_many_watches", False


class Traces:
    """The watches of the whole cluster."""

    def __init__(self, blobs: Blobs) -> None:
        self._document = Document(blobs, TRACE)

    async def start(self, selector: str, *, for_s: float) -> Watch:
        """Have all nodes log the requests that match `user=42` (or request, object, trace) for
        `for_s`.

        If it is traced already, the new end applies. Nodes start within two seconds. Raises:
        TraceInvalid, TooManyWatches, BlobsDown.
        """
        name, value = parse_selector(selector)
        if not 1 <= for_s <= WATCH_S_MAX:
            raise TraceInvalid(
                f"cannot trace for {for_s:g} s: expected 1 s to {WATCH_S_MAX / 3600:g} hours"
            )
        now = datetime.now(UTC)
        watch = Watch(name=name, value=value, ends_at=now + timedelta(seconds=for_s))

        def add(old: Watches) -> Watches:
            kept = [w for w in _current(old, now) if (w.name, w.value) != (name, value)]
            if len(kept) >= WATCHES_MAX:
                raise TooManyWatches(
                    f"{WATCHES_MAX} traces are active: stop one with `headrace media trace off`"
                )
            return Watches(version=old.version, watches=(*kept, watch))

        await self._document.change(add)
        return watch

    async def stop(self, selector: str | None = None) -> Sequence[Watch]:
        """Stop the watch on `selector`, or all. Return those, which end now.

        Raises: TraceInvalid, BlobsDown.
        """
        named = None if selector is None else parse_selector(selector)
        now = datetime.now(UTC)
        ended: list[Watch] = []

        def take(old: Watches) -> Watches:
            found = _current(old, now)
            ended[:] = [w for w in found if named in (None, (w.name, w.value))]
            left = tuple(w for w in found if w not in ended)
            return Watches(version=old.version, watches=left)

        await self._document.change(take)
        return [msgspec.structs.replace(watch, ends_at=now) for watch in ended]

    async def list(self) -> Sequence[Watch]:
        """The active watches. Raises: BlobsDown."""
        return _current(await self._document.read(), datetime.now(UTC))


def _current(document: Watches, now: datetime) -> list[Watch]:
    return [watch for watch in document.watches if not watch.is_over(now)]
