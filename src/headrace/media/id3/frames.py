"""ID3v2.4 tags as bytes and back, strictly: what is read again is what was written, or Corrupt.

Only what buyers see and sellers need: title, artist, album, cover, and the buyer's mark twice, as text (TXXX) that
people find and as identifier (UFID) that editors of tags leave alone. The bytes are the same for the same
values, so a tag's hash is its id. No padding, no unsynchronisation: every reader of this century skips a tag by
its length. Source: id3.org, ID3 tag version 2.4.0, main structure and native frames.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from headrace.kernel.errors import Corrupt, FieldProblem, InvalidInput
from headrace.kernel.ids import USER_ID

TAG_BYTES_MAX: Final = 512 * 1024
TEXT_CHARACTERS_MAX: Final = 256
BUYER_CHARACTERS_MAX: Final = 64
"""What a UFID frame may hold."""
HEADER_BYTES: Final = 10
OWNER: Final = b"headrace"
BUYER_NAME: Final = b"HEADRACE_BUYER"
_MAGIC: Final = b"ID3\x04\x00\x00"
_UTF8: Final = b"\x03"
_LATIN1: Final = b"\x00"
_FRONT_COVER: Final = b"\x03"
_TEXTS: Final = {b"TIT2": "title", b"TPE1": "artist", b"TALB": "album"}
_PICTURES: Final = {b"\xff\xd8\xff": b"image/jpeg", b"\x89PNG\r\n\x1a\n": b"image/png"}


class TagInvalid(InvalidInput):
    """A tag cannot be written as it was given; every fault is listed."""

    code = "media.tag_invalid"


class TagCorrupt(Corrupt):
    """A stored tag is not what a tag of its id was when it was stored."""

    code = "media.tag_corrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What is written in front of a track; `cover` is the bytes of a JPEG or PNG, `buyer` an id of the caller's."""

    title: str | None = None
    artist: str | None = None
    album: str | None = None
    cover: bytes | None = None
    buyer: str | None = None


def tag_bytes(tags: Tags) -> bytes:
    """`tags` as a whole ID3v2.4 tag. Raises: TagInvalid, with every fault."""
    problems = list(_problems(tags))
    if problems:
        told = "; ".join(f"{p.pointer}: {p.text}" for p in problems)
        raise TagInvalid(f"this tag cannot be written: {told}", problems=tuple(problems))
    body = b"".join(_frames(tags))
    if HEADER_BYTES + len(body) > TAG_BYTES_MAX:
        text = f"expected {TAG_BYTES_MAX} bytes or less in all, got {HEADER_BYTES + len(body)}"
        problem = FieldProblem("cover", "too_large", text)
        raise TagInvalid(
            f"this tag is too large: {text}; make its cover smaller", problems=(problem,)
        )
    return _MAGIC + _syncsafe(len(body)) + body


def read_tags(data: bytes) -> Tags:
    """What `tag_bytes` was given to make `data`. Raises: TagCorrupt for any other bytes."""
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
        raise TagCorrupt(
            f"the stored tag of {len(data)} bytes is none that was written here: put it again"
        )
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
        # Seven bits a byte; what is no such number ends in a comparison that fails.
        content_bytes = sum(((size_bytes >> 8 * i) & 0x7F) << 7 * i for i in range(4))
        end = at + HEADER_BYTES + content_bytes
        yield data[at : at + 4], data[at + HEADER_BYTES : end]
        at = end


def _syncsafe(number: int) -> bytes:
    return bytes((number >> shift) & 0x7F for shift in (21, 14, 7, 0))
