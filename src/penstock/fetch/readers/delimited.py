"""CSV and TSV: a header line, then a row a line; `,` `;` TAB and `|` are recognised from the header.

Known columns (case does not matter): id (sku, offer_id, item_id), name (title), price, category
(category_id, category_name), url (link), and the photos: photos, images, pictures, image_link,
additional_image_link, photo, image, picture, also numbered (photo1, picture_2). A cell of photos may hold
several links, parted by `|`, a line break, or a comma, semicolon or space before the next `http://`.
Every other column is kept as it is, under its name in small letters.

A line that the CSV rules cannot read is a faulty row and the rest goes on; a quote that is never closed
reaches the end of the file and makes it truncated, since nothing behind the quote can be trusted.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from penstock.fetch.model import COLUMNS_MAX, FIELD_BYTES_MAX, ROWS_MAX, CatalogueBroken
from penstock.fetch.readers.row import RawRow, Truncated, broken
from penstock.kernel.errors import FieldProblem

_ALIASES: Final = {
    "sku": "id",
    "offer_id": "id",
    "item_id": "id",
    "title": "name",
    "category_id": "category",
    "category_name": "category",
    "link": "url",
}
_KNOWN: Final = frozenset({"name", "price", "category", "url"})
_PHOTOS: Final = re.compile(
    r"(photos?|images?|pictures?|photo_urls?|image_urls?|image_link|additional_image_links?)[ _-]?[0-9]*"
)
_BETWEEN_PHOTOS: Final = re.compile(r"\s*[|\n\r]\s*|[,;\s]+(?=[A-Za-z][A-Za-z0-9+.-]*://)")
LINE_CHARACTERS_MAX: Final = 2**20
UTF8_BYTES_MAX: Final = 4
_ESCAPED: Final = re.compile("[\udc80-\udcff]")
_DELIMITERS: Final = (",", ";", "\t", "|")


def find_header(text: str) -> str | None:
    """The delimiter under which the first line of `text` names an id and another known column."""
    line = text.splitlines()[0] if text else ""
    for delimiter in _DELIMITERS:
        try:
            names = _column_names(next(csv.reader([line], delimiter=delimiter), []))
        except csv.Error:
            continue
        if "id" in names and any(n in _KNOWN or _PHOTOS.fullmatch(n) for n in names):
            return delimiter
    return None


def _column_names(cells: list[str]) -> list[str]:
    names = [cell.strip().lower() for cell in cells]
    return [_ALIASES.get(n, n) if _ALIASES.get(n, n) not in names else n for n in names]


def split_photos(cell: str) -> list[str]:
    """The links of one cell, in order."""
    return [link for link in (part.strip() for part in _BETWEEN_PHOTOS.split(cell.strip())) if link]


def read_rows(stream: io.BufferedReader, encoding: str, delimiter: str) -> Iterator[RawRow]:
    """Every row below the header. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
    names: list[str] = []
    number = 0
    for line, cells, fault in _records(stream, encoding, delimiter):
        if not names:
            if fault is not None:
                raise broken("csv_quote", "the header line is not valid CSV", line)
            names = _require_header(cells, line)
        elif fault is not None or cells:
            number += 1
            if number > ROWS_MAX:
                raise broken("too_many_rows", f"more than {ROWS_MAX:,} rows: split the file", line)
            yield (
                _row(names, cells, number, line)
                if fault is None
                else RawRow(number, line, fault=fault)
            )


def _records(
    stream: io.BufferedReader, encoding: str, delimiter: str
) -> Iterator[tuple[int, list[str], FieldProblem | None]]:
    """(line, cells, fault) of each record of the file, the header among them."""
    # Bytes that are no UTF-8 come through as surrogates, so that the fault has its own line; a
    # strict decoder would stop a whole buffer of rows before it.
    errors = "strict" if encoding == "utf-16" else "surrogateescape"
    text = io.TextIOWrapper(stream, encoding=encoding, errors=errors, newline="")
    reader = csv.reader(_lines(text, encoding), delimiter=delimiter, strict=True)
    with text:
        while True:
            line = reader.line_num + 1
            try:
                yield line, next(reader), None
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                if "unexpected end" in error.reason or "truncated" in error.reason:
                    raise Truncated(f"line {line}: the file ends inside a letter") from None
                raise _not_text(encoding, line) from None
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise Truncated(f"line {line}: a quote is opened and never closed") from None
                text_of = f"the row is not valid CSV: {error}"
                yield line, [], FieldProblem("row", "csv_quote", text_of)


def _lines(text: io.TextIOWrapper, encoding: str) -> Iterator[str]:
    """The lines of `text`, each of bounded length: a file need not have any line break."""
    number = 0
    while line := text.readline(LINE_CHARACTERS_MAX):
        number += 1
        is_whole = line.endswith(("\n", "\r"))
        if len(line) == LINE_CHARACTERS_MAX and not is_whole:
            raise broken(
                "line_too_long", f"a line is over {LINE_CHARACTERS_MAX:,} characters long", number
            )
        if not line.isascii() and (escaped := _ESCAPED.search(line)):
            if not is_whole and len(line) - escaped.start() < UTF8_BYTES_MAX:
                raise Truncated(f"line {number}: the file ends inside a letter")
            raise _not_text(encoding, number)
        yield line


def _not_text(encoding: str, line: int) -> CatalogueBroken:
    name = encoding.removesuffix("-sig").upper()
    return broken("invalid_encoding", f"the text is no {name}: save the file as UTF-8", line)


def _require_header(cells: list[str], line: int) -> list[str]:
    names = _column_names(cells)
    named = [name for name in names if name]
    if len(names) > COLUMNS_MAX:
        raise broken(
            "too_many_columns", f"{len(names)} columns, at most {COLUMNS_MAX} are read", line
        )
    doubled = sorted(
        {name for name in named if named.count(name) > 1 and not _PHOTOS.fullmatch(name)}
    )
    if doubled:
        raise broken("duplicate_header", f"the column {doubled[0]!r} is named more than once", line)
    return names


@lru_cache(COLUMNS_MAX)
def _is_photos(name: str) -> bool:
    return _PHOTOS.fullmatch(name) is not None


def _row(names: list[str], cells: list[str], number: int, line: int) -> RawRow:
    row = RawRow(number, line)
    if len(cells) != len(names):
        text = f"the row has {len(cells)} columns, the header has {len(names)}"
        row.fault = FieldProblem("row", "column_count", text)
    for name, cell in zip(names, cells, strict=False):
        if not cell:
            continue
        if len(cell) > FIELD_BYTES_MAX or "\x00" in cell:
            text = f"the field holds a NUL or is over {FIELD_BYTES_MAX} bytes"
            row.fault = FieldProblem(name, "field_too_large" if "\x00" not in cell else "nul", text)
        elif _is_photos(name):
            row.photos.extend(split_photos(cell))
        elif name and cell.strip():
            row.values[name] = cell.strip()
    return row
