"""Which format a file is, from its first 64 KiB, and the reader that takes it from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.fetch.errors import UnknownFormat
from headrace.fetch.mappings import Mapping
from headrace.fetch.readers import (
    avito,
    delimited,
    foreign,
    google,
    json_rows,
    ndjson,
    sheet,
    yml,
)
from headrace.fetch.readers.encoding import find_encoding
from headrace.fetch.readers.format import Format, Head, require_letters
from headrace.fetch.readers.row import RawRow, Truncated, not_a_catalogue
from headrace.fetch.readers.sheet import SHEET_MAGICS
from headrace.fetch.readers.unpacked import SNIFF_BYTES, open_unpacked
from headrace.fetch.readers.xml_rows import find_root

FORMATS: Final[tuple[Format, ...]] = (
    *(sheet.FORMAT, delimited.CSV, delimited.TSV),
    *(ndjson.FORMAT, json_rows.FORMAT),
    *(yml.FORMAT, avito.FORMAT, google.RSS, google.ATOM, foreign.FORMAT),
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
    if found is foreign.FORMAT and mapping is None:
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
    lines_skipped = len(delimited.LINE_BREAK.findall(whole[: len(whole) - len(text)]))
    return Head(text, encoding, root, mapping, lines_skipped)


def _recognise(head: Head, forced: Format | None) -> Format:
    """The format that the head shows, or the `forced` one. Raises: NotACatalogue."""
    if forced is not None:
        if head.is_sheet and forced is not sheet.FORMAT:
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
