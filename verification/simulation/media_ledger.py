"""What the object store had and when, what was purged, and which answers are right."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from tests.kit.checkers import Finding

from headrace.media.cluster.cluster_config import is_reserved
from verification.simulation.media_model import Stored

PURGED_S: Final = 2.5
"""Within this time an acknowledged purge is in effect on every node that reaches the store."""
STALE_MAX_S: Final = 80.0
"""A replaced object: its shape is kept for 60 s on one node and for 2 s on another, and a request
between them takes up to 12 s.
"""


@dataclass(frozen=True, slots=True)
class Version:
    """What the store had under a key from `at_s` on; no data: the object was deleted."""

    at_s: float
    etag: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class DonePurge:
    """An acknowledged purge; versions before `first` must not be served after it."""

    generation: int
    done_s: float
    first: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client received. `end`: whole, cut, short (a clean end), refused, late."""

    end: str
    status: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A client's request, and what was known when it was sent."""

    node: str
    method: str
    key: str
    span: tuple[int, int] | None
    at_s: float
    generation: int
    """The version of the node's purge list."""
    is_calm: bool
    """There were no faults for a while, so the bounds of a healthy cluster hold."""


class MediaLedger:
    """The versions of all objects, and the checks of answers."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.versions: dict[str, list[Version]] = defaultdict(list)
        self.purges: dict[str, list[DonePurge]] = defaultdict(list)
        self.now_s = 0.0

    def note_change(self, key: str, stored: Stored | None, *, now_s: float) -> None:
        """The store has a new version of an object, or no object any more."""
        if not is_reserved(key):
            version = (
                Version(now_s, "", None)
                if stored is None
                else Version(now_s, stored.info.etag, stored.data)
            )
            self.versions[key].append(version)

    def newest(self, key: str) -> int:
        """The number of the newest version; -1: there was none."""
        return len(self.versions[key]) - 1

    def changed_s(self, key: str) -> float:
        """When the object was changed last."""
        versions = self.versions[key]
        return versions[-1].at_s if versions else float("-inf")

    def _first(self, sent: SentRequest, *, is_same_process: bool) -> int:
        """The oldest version that may be served."""
        first = 0
        for purge in self.purges[sent.key]:
            is_known = is_same_process and purge.generation <= sent.generation
            is_due = sent.is_calm and purge.done_s + PURGED_S < sent.at_s
            if is_known or is_due:
                first = max(first, purge.first)
        return first

    def check(self, sent: SentRequest, reply: Reply, *, is_same_process: bool) -> None:
        """Compare an answer with the versions that it may be of."""
        if reply.end == "short":
            self._find("ended_cleanly", sent, f"{len(reply.body)} bytes, then a clean end")
        if reply.status not in (200, 206, 404):
            return
        versions = self.versions[sent.key]
        first = self._first(sent, is_same_process=is_same_process)
        if reply.status == 404:
            right = [v for v in versions[first:] if v.data is None]
            if versions and not right:
                self._find("wrong_404", sent, f"it exists since version {first}")
            return
        etag = reply.fields.get("etag", "").strip('"')
        number = next((n for n, v in enumerate(versions) if v.etag == etag), None)
        if number is None or versions[number].data is None:
            self._find("unknown_version", sent, f"ETag {etag!r}")
            return
        self._check_bytes(sent, reply, versions[number].data or b"")
        if number < first:
            self._find("stale_after_purge", sent, f"version {number}, purged up to {first}")
        ended = [v.at_s for v in versions[number + 1 :]]
        if ended and ended[0] < sent.at_s - STALE_MAX_S:
            age_s = sent.at_s - ended[0]
            self._find("stale", sent, f"version {number} was replaced {age_s:.1f} s before")

    def _check_bytes(self, sent: SentRequest, reply: Reply, data: bytes) -> None:
        start, end = 0, len(data)
        if reply.status == 206:
            text, _, size = reply.fields["content-range"].removeprefix("bytes ").partition("/")
            first, _, last = text.partition("-")
            start, end = int(first), int(last) + 1
            wanted = sent.span or (0, 0)
            if (start, end, int(size)) != (wanted[0], min(wanted[1], len(data)), len(data)):
                self._find("wrong_span", sent, f"bytes {start} to {end} of {size}")
        length_bytes = int(reply.fields["content-length"])
        if length_bytes != end - start:
            self._find("wrong_length", sent, f"{length_bytes} bytes of {end - start}")
        if reply.body != data[start : start + len(reply.body)]:
            self._find("wrong_bytes", sent, f"bytes {start} to {end}, ETag of another version")

    def _find(self, fault: str, sent: SentRequest, text: str) -> None:
        where = f"{sent.method} {sent.key} {sent.span} of {sent.node} at {sent.at_s:.3f} s"
        self.findings.append(Finding(fault, sent.key, f"{where}: {text}"))
