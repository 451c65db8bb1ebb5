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
from headrace.fetch.readers.base import (
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
from headrace.fetch.readers.xml_stream import find_root

UTF_8: Final = "utf-8"
CYRILLIC: Final = "windows-1251"
_WORD: Final = re.compile("[А-Яа-яЁёІіЇїЄєҐґЎў]{3,}")
_RUSSIAN: Final = re.compile("[А-Яа-яЁё]")
_LETTER: Final = re.compile("[^\x00-\x7f]")
_SIGN: Final = re.compile("[№«»“”„–—…₽°±×\xa0\xad©®™•’‘·]")
_COMMON: Final = frozenset("оеаинтср")
WORDS_SHARE_MIN: Final = 0.7
"""Share of the letters that are in Cyrillic words: letters of a Latin text stand alone between others."""
RUSSIAN_SHARE_MIN: Final = 0.85
"""Share of the letters that are Russian: about 0.92 in Ukrainian, 0.5 in CP866 read as windows-1251."""
COMMON_SHARE_MIN: Final = 0.4
"""Share of the eight most common letters: about 0.55 in Russian, 0.3 in KOI8-R read as windows-1251."""
LETTERS_COUNTED_MIN: Final = 60
"""Of fewer letters the share means nothing."""


def find_encoding(start: bytes) -> str:
    """The encoding of a text that begins with `start`."""
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
    """The bytes of `path`, of what it packs if it is gzip. Reading raises as the file demands.

    Raises while read: Truncated, CatalogueBroken, CatalogueTooLarge.
    """
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    source: IO[bytes] = gzip.open(path, "rb") if is_packed else path.open("rb")  # type: ignore[assignment] # noqa: SIM115
    bounded: Any = _Bounded(source, bytes_max)
    return io.BufferedReader(bounded, SNIFF_BYTES)


class _Bounded(io.RawIOBase):
    """Bytes of `source`, at most `bytes_max`; faults of packing in our words."""

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
        """The next bytes, also the last ones before packed data breaks off. Raises: Truncated behind those."""
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
"""Every format; a file is of the first that recognises it."""
FORMAT_NAMES: Final = tuple(found.name for found in FORMATS)
_BOMS: Final = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_MAGICS: Final = (
    (b"%PDF", "is_pdf"),
    (b"\xff\xd8\xff", "is_image"),
    (b"\x89PNG", "is_image"),
)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A recognised file: `format` is one of FORMAT_NAMES; `rows` can be read once."""

    format: str
    rows: Iterator[RawRow]


def open_catalogue(
    path: Path, *, bytes_max: int, format_name: str | None = None, mapping: Mapping | None = None
) -> Catalogue:
    """Recognise the file at `path` and start reading it. Blocking: call it in a thread.

    `format_name` says the format instead of the content; else `mapping.format` does.
    Raises: NotACatalogue, UnknownFormat, CatalogueBroken, CatalogueTooLarge.
    """
    told = mapping.format if mapping else None
    forced = require_format(format_name or told, mapping)
    # Opening a FIFO would wait for a writer, for ever where there is none.
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
            f"format {found.name} has names of its own and takes no mapping: leave one of the two out"
        )
    if found is xml_formats.XML and mapping is None:
        raise UnknownFormat("format xml says nothing about names: give a mapping with it")
    return found


def _look_at(start: bytes, mapping: Mapping | None) -> Head:
    """The head of a file that is some kind of text. Raises: NotACatalogue."""
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
    """The format that the head shows, or the `forced` one. Raises: NotACatalogue."""
    if forced is not None:
        if head.is_sheet and forced is not tables.SHEET:
            raise not_a_catalogue("is_sheet", format=forced.name)
        return forced
    for found in FORMATS:
        if (head.mapping is None or found.takes_mapping) and found.recognises(head):
            return found
    if head.root is not None:
        raise not_a_catalogue("is_other_xml", root=head.root.name[:40])
    if head.text.startswith("<"):
        raise not_a_catalogue("is_unreadable_xml", detail="")
    require_letters(head)
    code = "no_header" if head.mapping is None else "no_mapped_header"
    raise not_a_catalogue(code, snippet=head.text.splitlines()[0][:80])
