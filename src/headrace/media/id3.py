"""ID3v2 tags in front of tracks: one buyer's copy of an MP3 without a stored copy.

A tag (title, artist, album, cover, buyer) is rendered once as an ID3v2.4 tag and stored under its
SHA-256. A signed URL names it. The client receives that object followed by the track without the
track's own tag: two spans of two ordinary objects. So all buyers share the blocks of the track, and
length, ETag and every range are determined before a byte is read.

A track's own ID3v2 tag is skipped, because readers handle two tags in a row differently. An ID3v1
tag at the end stays, because readers prefer ID3v2.

The buyer is written twice: as text (TXXX) for people, and as identifier (UFID), which tag editors
keep. Equal values give equal bytes, so a tag's hash is its id. There is no padding and no
unsynchronization. `read_tags` is strict: it accepts only bytes that `tag_bytes` makes. Source:
id3.org, ID3 tag version 2.4.0, main structure and native frames.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from headrace.kernel.errors import Corrupt, FieldProblem, InvalidInput
from headrace.kernel.ids import USER_ID
from headrace.media.model import Shape
from headrace.media.ranges import Decision

TAG_BYTES_MAX: Final = 512 * 1024
TEXT_CHARACTERS_MAX: Final = 256
BUYER_CHARACTERS_MAX: Final = 64
"""The limit of a UFID frame."""
HEADER_BYTES: Final = 10
OWNER: Final = b"headrace"
BUYER_NAME: Final = b"HEADRACE_BUYER"
_MAGIC: Final = b"ID3\x04\x00\x00"
_UTF8: Final = b"\x03"
_LATIN1: Final = b"\x00"
_FRONT_COVER: Final = b"\x03"
_TEXTS: Final = {b"TIT2": "title", b"TPE1": "artist", b"TALB": "album"}
_PICTURES: Final = {b"\xff\xd8\xff": b"image/jpeg", b"\x89PNG\r\n\x1a\n": b"image/png"}
TAGS_PREFIX: Final = "_headrace/media/tags/"
START_BYTES: Final = 10
"""Bytes at a track's start that give the length of its own tag."""
KNOWN_MAX: Final = 65_536
_FOOTER: Final = 0x10


class TagInvalid(InvalidInput):
    """A tag cannot be written; all problems are listed."""

    code = "media.tag_invalid"


class TagCorrupt(Corrupt):
    """A stored tag is damaged."""

    code = "media.tag_corrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The contents of a tag. `cover` is a JPEG or PNG file, `buyer` an id of the application."""

    title: str | None = None
    artist: str | None = None
    album: str | None = None
    cover: bytes | None = None
    buyer: str | None = None


def tag_bytes(tags: Tags) -> bytes:
    """`tags` as a complete ID3v2.4 tag. Raises: TagInvalid, with every problem."""
    TagInvalid.require_none(_problems(tags), "this tag cannot be written")
    body = b"".join(_frames(tags))
    if HEADER_BYTES + len(body) > TAG_BYTES_MAX:
        text = f"expected {TAG_BYTES_MAX} bytes or less in all, got {HEADER_BYTES + len(body)}"
        problem = FieldProblem("cover", "too_large", text)
        raise TagInvalid(
            f"this tag is too large: {text}; make its cover smaller", problems=(problem,)
        )
    return _MAGIC + _syncsafe(len(body)) + body


def read_tags(data: bytes) -> Tags:
    """The tags that `tag_bytes` rendered as `data`. Raises: TagCorrupt for any other bytes."""
    found: dict[str, str | bytes] = {}
    for name, content in _split(data):
        if name in _TEXTS:
            found[_TEXTS[name]] = content[1:].decode("utf-8", "replace")
        elif name == b"APIC":
            found["cover"] = content.partition(b"\0" + _FRONT_COVER + b"\0")[2]
        elif name == b"TXXX":
            found["buyer"] = content.rpartition(b"\0")[2].decode("utf-8", "replace")
    tags = Tags(**found)  # type: ignore[arg-type]  # compared below, byte for byte
    try:
        is_ours = tag_bytes(tags) == data
    except TagInvalid:
        is_ours = False
    if not is_ours:
        raise TagCorrupt(f"the stored tag of {len(data)} bytes is damaged: put it again")
    return tags


def _problems(tags: Tags) -> Iterator[FieldProblem]:
    if all(getattr(tags, field.name) is None for field in fields(tags)):
        yield FieldProblem(
            "tag", "missing", "expected at least one of title, artist, album, cover, buyer"
        )
    for name in _TEXTS.values():
        text = getattr(tags, name)
        if text is not None and not _is_plain(text):
            expected = f"expected 1 to {TEXT_CHARACTERS_MAX} characters without control characters"
            yield FieldProblem(name, "invalid", expected)
    if tags.cover is not None and _picture_type(tags.cover) is None:
        yield FieldProblem("cover", "invalid", "expected the bytes of a JPEG or PNG file")
    if tags.buyer is not None and not (
        len(tags.buyer) <= BUYER_CHARACTERS_MAX and USER_ID.fullmatch(tags.buyer)
    ):
        expected = f"expected 1 to {BUYER_CHARACTERS_MAX} of the characters A-Z a-z 0-9 . _ : @ ~ -"
        yield FieldProblem("buyer", "invalid", expected)


def _is_plain(text: str) -> bool:
    return 0 < len(text) <= TEXT_CHARACTERS_MAX and not any(
        unicodedata.category(character) in ("Cc", "Cs") for character in text
    )


def _picture_type(cover: bytes) -> bytes | None:
    return next((kind for magic, kind in _PICTURES.items() if cover.startswith(magic)), None)


def _frames(tags: Tags) -> Iterator[bytes]:
    for name, field in _TEXTS.items():
        text = getattr(tags, field)
        if text is not None:
            yield _frame(name, _UTF8 + text.encode())
    if tags.buyer is not None:
        buyer = tags.buyer.encode()
        yield _frame(b"TXXX", _LATIN1 + BUYER_NAME + b"\0" + buyer)
        yield _frame(b"UFID", OWNER + b"\0" + buyer)
    if tags.cover is not None:
        kind = _picture_type(tags.cover) or b""
        yield _frame(b"APIC", _LATIN1 + kind + b"\0" + _FRONT_COVER + b"\0" + tags.cover)


def _frame(name: bytes, content: bytes) -> bytes:
    return name + _syncsafe(len(content)) + b"\0\0" + content


def _split(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = HEADER_BYTES
    while at + HEADER_BYTES <= len(data):
        size_bytes = int.from_bytes(data[at + 4 : at + 8])
        # Seven bits per byte. Other bytes make the comparison in `read_tags` fail.
        content_bytes = sum(((size_bytes >> 8 * i) & 0x7F) << 7 * i for i in range(4))
        end = at + HEADER_BYTES + content_bytes
        yield data[at : at + 4], data[at + HEADER_BYTES : end]
        at = end


def _syncsafe(number: int) -> bytes:
    return bytes((number >> shift) & 0x7F for shift in (21, 14, 7, 0))


def tag_id(tag: bytes) -> str:
    """The id of a rendered tag: its SHA-256."""
    return hashlib.sha256(tag).hexdigest()


def tag_key(identifier: str) -> str:
    """The key of the tag with this id."""
    return TAGS_PREFIX + identifier


def own_tag_bytes(start: bytes, size_bytes: int) -> int:
    """The length of the ID3v2 tag that a track of `size_bytes` begins with; 0: it has none.

    A tag that is longer than the track is ignored: a few wrong bytes in front are better than lost
    music.
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
    """The lengths of tracks' own tags, cached for KNOWN_MAX versions."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], int] = {}

    def find(self, key: str, track: Shape) -> int | None:
        """The length in bytes; None: read the first START_BYTES of the track and `keep` them."""
        return self._known.get((key, track.etag))

    def keep(self, key: str, track: Shape, start: bytes) -> int:
        """Compute the length from the track's first bytes, cache it and return it."""
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
class TaggedTrack:
    """Track `key` with the tag `tag_id` instead of the first `skipped_bytes` of its own."""

    tag_id: str
    tag: Shape
    key: str
    track: Shape
    skipped_bytes: int

    @property
    def shape(self) -> Shape:
        """The shape of the whole as clients see it."""
        named = f"{self.tag_id}\n{self.track.etag}\n{self.skipped_bytes}"
        return Shape(
            self.tag.size_bytes + self.track.size_bytes - self.skipped_bytes,
            hashlib.sha256(named.encode()).hexdigest()[:40],
            self.track.modified_s,
            self.track.is_immutable,
        )

    def pieces(self, decision: Decision) -> tuple[Piece, ...]:
        """The spans of the answer in order; none is empty."""
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
