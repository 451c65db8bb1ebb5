"""Positions and segments of PostgreSQL's write-ahead log, and the parts of it in the archive.

A part is a range of one segment below the server's flush position, where bytes no longer change. It
is stored as one line of JSON and the compressed bytes. The line has their checksum: PostgreSQL
takes damaged log for the end of the log, so without it damage would be a silent loss.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from headrace.kernel.errors import Corrupt

SEGMENT_BYTES: Final = 16 * 2**20
FULL: Final = "full"
"""The name of the part that is a whole segment."""
_SEGMENTS_PER_FILE: Final = 2**32 // SEGMENT_BYTES
_NAME: Final = re.compile(r"[0-9A-F]{24}")
_COMPRESSION_LEVEL: Final = 1


class BackupDamaged(Corrupt):
    """An object of the backup is missing, truncated or has other bytes than were stored."""

    code = "backup.damaged"

    def __init__(self, text: str, *, base_id: str = "") -> None:
        super().__init__(text)
        self.base_id = base_id
        """The base backup that is damaged; empty for the log and other objects."""
        self.known_until: datetime | None = None
        """For the log: the log before the damage has every commit up to then; None: unknown."""


def parse_lsn(text: str) -> int:
    """The position of a text such as `0/3000148`."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)


def format_lsn(position: int) -> str:
    """A position as PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def segment_floor(position: int) -> int:
    """The first position of the segment of `position`."""
    return position - position % SEGMENT_BYTES


def segment_name(timeline: int, position: int) -> str:
    """The name of the file with the byte at `position`."""
    high, low = divmod(position // SEGMENT_BYTES, _SEGMENTS_PER_FILE)
    return f"{timeline:08X}{high:08X}{low:08X}"


def segment_start(name: str) -> int:
    """The first position of the segment `name`. Raises: ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError("a segment such as 000000010000000000000003")
    return (int(name[8:16], 16) * _SEGMENTS_PER_FILE + int(name[16:], 16)) * SEGMENT_BYTES


def part_name(position: int) -> str:
    """The name of a part that begins at `position`: its offset in the segment."""
    return f"{position % SEGMENT_BYTES:08x}"


def part_offset(name: str) -> int:
    """The offset of a part in its segment."""
    return 0 if name == FULL else int(name, 16)


def unbroken(segments: Mapping[str, Sequence[str]], begin: int) -> tuple[list[str], bool]:
    """The stored segments from `begin` to the first gap, and whether there are others after it.

    `segments` has the parts of each, in order; only the last one may be incomplete.
    """
    found: list[str] = []
    expected = segment_floor(begin)
    names = [name for name in segments if segment_start(name) >= expected]
    for name in names:
        if segment_start(name) != expected:
            break
        found.append(name)
        if FULL not in segments[name]:
            break
        expected += SEGMENT_BYTES
    return found, len(found) < len(names)


class PartHead(msgspec.Struct, frozen=True):
    """The first line of a stored part."""

    start: int
    """The position of its first byte."""
    size_bytes: int
    sha256: str
    read_at: datetime
    """When the server's flush position was read: every commit up to then is in this log."""


class Part(msgspec.Struct, frozen=True):
    """A range of the log."""

    head: PartHead
    data: bytes

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.head.start + self.head.size_bytes


def encode_part(start: int, data: bytes, read_at: datetime) -> bytes:
    """The stored form of a part."""
    head = PartHead(start, len(data), hashlib.sha256(data).hexdigest(), read_at)
    return msgspec.json.encode(head) + b"\n" + zlib.compress(data, _COMPRESSION_LEVEL)


def decode_part(key: str, stored: bytes) -> Part:
    """The part stored as object `key`, checked. Raises: BackupDamaged."""
    line, _, body = stored.partition(b"\n")
    try:
        head = msgspec.json.decode(line, type=PartHead)
        data = zlib.decompress(body, bufsize=head.size_bytes)
    except (msgspec.MsgspecError, zlib.error) as error:
        raise damaged(key, str(error)) from error
    if len(data) != head.size_bytes or hashlib.sha256(data).hexdigest() != head.sha256:
        raise damaged(key, "its checksum differs")
    return Part(head, data)


def damaged(key: str, fault: str) -> BackupDamaged:
    """The error for a stored object that cannot be used."""
    base_id = ""
    if key.startswith("base/"):
        base_id = key.split("/")[1]
        fix = (
            "take a new base backup with `headrace backup`; until then `headrace restore` uses an"
            " older one and the log after it, which is the same state"
        )
    elif key == "archive.json":
        fix = "restore this file from a copy, or set backup.url to a new folder for a new archive"
    else:
        fix = "restore to a time before it, or take a new base backup with `headrace backup`"
    text = f"object {key!r} of the backup is damaged ({fault}): {fix}"
    return BackupDamaged(text, base_id=base_id)


def read_segment(folder: Path, name: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end`, offsets in the segment `name` below `folder`. Raises: OSError."""
    with (folder / name).open("rb") as file:
        file.seek(start)
        data = file.read(end - start)
    if len(data) != end - start:
        raise OSError(f"{folder / name} has {start + len(data)} bytes, at least {end} expected")
    return data
