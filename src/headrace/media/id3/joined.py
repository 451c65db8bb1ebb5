"""A tag and a track as one object: its shape, and which bytes of the two any range of it is.

Pure: shapes and the first bytes of a track go in, spans come out. `Tagged.pieces` is used for every answer, so
the same arithmetic gives a whole file, a middle range and the end of the tag with the start of the music.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from headrace.media.model import Shape
from headrace.media.ranges import Decision

TAGS_PREFIX: Final = "_headrace/media/tags/"
START_BYTES: Final = 10
"""What of a track's beginning tells the length of its own tag."""
KNOWN_MAX: Final = 65_536
_FOOTER: Final = 0x10


def tag_id(tag: bytes) -> str:
    """The id of a rendered tag: its SHA-256."""
    return hashlib.sha256(tag).hexdigest()


def tag_key(identifier: str) -> str:
    """The key that the tag of this id is stored under."""
    return TAGS_PREFIX + identifier


def own_tag_bytes(start: bytes, size_bytes: int) -> int:
    """How long the ID3v2 tag is that a track of `size_bytes` begins with, by its first bytes; 0: it has none.

    A tag that claims more bytes than there are is none: rather a few wrong bytes in front than music lost.
    """
    if len(start) < START_BYTES or start[:3] != b"ID3" or start[3] not in (2, 3, 4):
        return 0
    if start[4] == 0xFF or any(byte > 0x7F for byte in start[6:10]):
        return 0
    length_bytes = START_BYTES + sum(start[9 - i] << 7 * i for i in range(4))
    if start[3] == 4 and start[5] & _FOOTER:
        length_bytes += START_BYTES
    return length_bytes if length_bytes <= size_bytes else 0


class OwnTags:
    """How long the own tags of tracks are, by version; remembered for KNOWN_MAX of them, since most are asked often."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], int] = {}

    def find(self, key: str, track: Shape) -> int | None:
        """The length in bytes, or None: read the first START_BYTES of the track and `keep` them."""
        return self._known.get((key, track.etag))

    def keep(self, key: str, track: Shape, start: bytes) -> int:
        """Remember it by the track's first bytes; returns it."""
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        found = own_tag_bytes(start, track.size_bytes)
        self._known[key, track.etag] = found
        return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of one stored object."""

    key: str
    shape: Shape
    start: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """Track `key` with the tag `tag_id` instead of the first `skipped_bytes` of its own."""

    tag_id: str
    tag: Shape
    key: str
    track: Shape
    skipped_bytes: int

    @property
    def shape(self) -> Shape:
        """Of the whole as clients see it."""
        named = f"{self.tag_id}\n{self.track.etag}\n{self.skipped_bytes}"
        return Shape(
            self.tag.size_bytes + self.track.size_bytes - self.skipped_bytes,
            hashlib.sha256(named.encode()).hexdigest()[:40],
            self.track.modified_s,
            self.track.is_immutable,
        )

    def pieces(self, decision: Decision) -> tuple[Piece, ...]:
        """The spans that make up the answer, in order; none is empty."""
        start, end = decision.start, decision.start + decision.length_bytes
        seam = self.tag.size_bytes
        found = []
        if start < min(end, seam):
            found.append(Piece(tag_key(self.tag_id), self.tag, start, min(end, seam) - start))
        if end > max(start, seam):
            from_byte = max(start, seam)
            at = from_byte - seam + self.skipped_bytes
            found.append(Piece(self.key, self.track, at, end - from_byte))
        return tuple(found)
