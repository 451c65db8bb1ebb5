"""Open a catalogue: unpack gzip within bounds, detect its encoding and its format.

The first 64 KiB decide. File names and content types are ignored, since they are often wrong.
"""

# ruff: noqa: RUF001 - Cyrillic is meant
from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from headrace.fetch.errors import UnknownFormat
from headrace.fetch.mappings import Mapping
from headrace.fetch.readers import json_formats, tables, xml_formats
from headrace.fetch.readers.rows import (
    Format,
    Head,
    RawRow,
    Truncated,
    broken,
    not_a_catalogue,
    require_letters,
    too_large,
)
from headrace.fetch.readers.tables import SHEET_MAGICS
from headrace.fetch.readers.xml_formats import find_root

UTF_8: Final = "utf-8"
CYRILLIC: Final = "windows-1251"
_WORD: Final = re.compile("[А-Яа-яЁёІіЇїЄєҐґЎў]{3,}")
_RUSSIAN: Final = re.compile("[А-Яа-яЁё]")
_LETTER: Final = re.compile("[^\x00-\x7f]")
_SIGN: Final = re.compile("[№«»“”„–—…₽°±×\xa0\xad©®™•’‘·]")
_COMMON: Final = frozenset("оеаинтср")
WORDS_SHARE_MIN: Final = 0.7
"""Minimum share of letters in Cyrillic words; misread Latin letters appear one at a time."""
RUSSIAN_SHARE_MIN: Final = 0.85
"""Minimum share of Russian letters: about 0.92 in Ukrainian, 0.5 in CP866 read as windows-1251."""
COMMON_SHARE_MIN: Final = 0.4
"""Minimum share of the eight most common letters: 0.55 in Russian, 0.3 in misread KOI8-R."""
LETTERS_COUNTED_MIN: Final = 60
"""With fewer letters, the share of common letters is not checked."""


def find_encoding(start: bytes) -> str:
    """The encoding of a text without a byte order mark that begins with `start`.

    Valid UTF-8 is UTF-8. Other bytes are windows-1251 only if they read as Russian text in it,
    since a wrong guess would corrupt names without any error.
    """
    try:
        start.decode(UTF_8)
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" or not _is_cyrillic(start):
            return UTF_8
        return CYRILLIC
    return UTF_8


def _is_cyrillic(start: bytes) -> bool:
    if start.lstrip().startswith((b"<", b"{", b"[")):
        return False
    text = _SIGN.sub("", start.decode(CYRILLIC, errors="replace"))
    letters = len(_LETTER.findall(text))
    words = "".join(_WORD.findall(text)).lower()
    russian = len(_RUSSIAN.findall(text))
    if len(words) < letters * WORDS_SHARE_MIN or russian < letters * RUSSIAN_SHARE_MIN:
        return False
    common = sum(letter in _COMMON for letter in words)
    return len(words) < LETTERS_COUNTED_MIN or common >= len(words) * COMMON_SHARE_MIN


SNIFF_BYTES: Final = 64 * 1024


def open_unpacked(path: Path, *, bytes_max: int) -> io.BufferedReader:
    """The bytes of a file, unpacked if it is gzip, at most `bytes_max` of them.

    The limit applies to unpacked bytes, since gzip can expand a thousandfold. Raises while read:
    Truncated, CatalogueBroken, CatalogueTooLarge.
    """
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    source: IO[bytes] = gzip.open(path, "rb") if is_packed else path.open("rb")  # type: ignore[assignment] # noqa: SIM115
    bounded: Any = _Bounded(source, bytes_max)
    return io.BufferedReader(bounded, SNIFF_BYTES)


class _Bounded(io.RawIOBase):
    """A stream over `source` that enforces the byte limit and translates gzip errors."""

    def __init__(self, source: IO[bytes], bytes_max: int) -> None:
        self._source = source
        self._bytes_max = bytes_max
        self._bytes_read = 0
        self._is_cut = False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._source.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            block = self._read(len(buffer))
        except (gzip.BadGzipFile, zlib.error) as error:
            raise broken("gzip", detail=str(error)) from None
        self._bytes_read += len(block)
        if self._bytes_read > self._bytes_max:
            raise too_large(self._bytes_max)
        buffer[: len(block)] = block
        return len(block)

    def _read(self, size_bytes: int) -> bytes:
        """The next bytes. If gzip data ends early, return the rest first. Raises: Truncated."""
        blocks: list[bytes] = []
        while size_bytes and not self._is_cut:
            try:
                block = self._source.read1(size_bytes)  # type: ignore[attr-defined]
            except EOFError:
                self._is_cut = True
                break
            if not block:
                break
            blocks.append(block)
            size_bytes -= len(block)
        if self._is_cut and not blocks:
            raise Truncated("truncated_gzip")
        return b"".join(blocks)


FORMATS: Final[tuple[Format, ...]] = (
    *(tables.SHEET, tables.CSV, tables.TSV),
    *(json_formats.NDJSON, json_formats.JSON),
    *(xml_formats.YML, xml_formats.AVITO, xml_formats.RSS, xml_formats.ATOM, xml_formats.XML),
)
"""All formats in order of precedence: the first one that recognizes the file is used."""
FORMAT_NAMES: Final = tuple(found.name for found in FORMATS)
_BOMS: Final = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_MAGICS: Final = (
    (b"%PDF", "is_pdf"),
    (b"\xff\xd8\xff", "is_image"),
    (b"\x89PNG", "is_image"),
)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """An open file: its format, one of FORMAT_NAMES, and its rows, which can be read once."""

    format: str
    rows: Iterator[RawRow]


def open_catalogue(
    path: Path, *, bytes_max: int, format_name: str | None = None, mapping: Mapping | None = None
) -> Catalogue:
    """Detect the format of the file at `path` and start to read it. Blocks: call it in a thread.

    `format_name`, else `mapping.format`, overrides the detection.
    Raises: NotACatalogue, UnknownFormat, CatalogueBroken, CatalogueTooLarge.
    """
    named = mapping.format if mapping else None
    forced = require_format(format_name or named, mapping)
    # Opening a FIFO would block until a writer appears.
    if path.exists() and not path.is_file():
        raise not_a_catalogue("is_no_file", name=path.name)
    stream = open_unpacked(path, bytes_max=bytes_max)
    try:
        head = _look_at(stream.peek(SNIFF_BYTES), mapping)
        found = _recognise(head, forced)
        return Catalogue(found.name, found.read(stream, head))
    except Truncated as cut:
        stream.close()
        raise not_a_catalogue("cannot_unpack", detail=cut.where) from None
    except BaseException:
        stream.close()
        raise


def require_format(name: str | None, mapping: Mapping | None = None) -> Format | None:
    """The format of that name; None for None. Raises: UnknownFormat."""
    found = next((one for one in FORMATS if one.name == name), None)
    if name is not None and found is None:
        raise UnknownFormat(
            f"format {name[:40]!r} is not known: expected one of {', '.join(FORMAT_NAMES)}"
        )
    if found and mapping and not found.takes_mapping:
        raise UnknownFormat(
            f"format {found.name} has fixed field names and accepts no mapping: omit the mapping or"
            " the format"
        )
    if found is xml_formats.XML and mapping is None:
        raise UnknownFormat("format xml has no field names of its own: pass a mapping with it")
    return found


def _look_at(start: bytes, mapping: Mapping | None) -> Head:
    """The head of a text file or spreadsheet that begins with `start`. Raises: NotACatalogue."""
    if not start.strip():
        raise not_a_catalogue("is_empty")
    if start.startswith(SHEET_MAGICS):
        return Head("", "", mapping=mapping, is_sheet=True)
    for magic, code in _MAGICS:
        if start.startswith(magic):
            raise not_a_catalogue(code)
    declared = (mapping and mapping.encoding) or find_encoding(start)
    encoding = next((name for bom, name in _BOMS if start.startswith(bom)), declared)
    if encoding != "utf-16" and b"\x00" in start:
        raise not_a_catalogue("is_binary")
    whole = start.decode(encoding, errors="replace")
    text = whole.lstrip()
    if not text:
        raise not_a_catalogue("is_empty")
    root = find_root(start) if text.startswith("<") else None
    lines_skipped = len(tables.LINE_BREAK.findall(whole[: len(whole) - len(text)]))
    return Head(text, encoding, root, mapping, lines_skipped)


def _recognise(head: Head, forced: Format | None) -> Format:
    """The `forced` format, else the first that recognizes the head. Raises: NotACatalogue."""
    if forced is not None:
        if head.is_sheet and forced is not tables.SHEET:
            raise not_a_catalogue("is_sheet", format=forced.name)
        return forced
    for found in FORMATS:
        if (head.mapping is None or found.takes_mapping) and found.recognizes(head):
            return found
    if head.root is not None:
        raise not_a_catalogue("is_other_xml", root=head.root.name[:40])
    if head.text.startswith("<"):
        raise not_a_catalogue("is_unreadable_xml", detail="")
    require_letters(head)
    code = "no_header" if head.mapping is None else "no_mapped_header"
    raise not_a_catalogue(code, snippet=head.text.splitlines()[0][:80])
