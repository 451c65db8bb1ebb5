"""Tables: CSV and TSV text, and XLSX, XLS and ODS spreadsheets.

A table has a header row, and one item in each row below it. Columns are recognized by the words in
`synonyms.toml` or by a mapping; an unknown column keeps its name in lower case. Rows above the
header, such as a title, are skipped.

**Text.** The delimiter (`,` `;` TAB `|`) is the one that makes the header readable; a first line
`sep=;`, as Excel writes it, overrides that. A line that breaks the CSV rules is a faulty row, and
reading continues. A file is truncated if a quote is never closed, or if the last row has fewer
cells than the header and no line break.

**Spreadsheets.** Every visible sheet with a header in its first rows is read; other sheets, such as
instructions, are skipped. The file stores the last result of each formula, which is used.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.fetch.decoding.client import SheetName, SheetRow, SheetUnreadable, sheet_rows
from headrace.fetch.mappings import (
    KNOWN,
    Mapping,
    Names,
    is_photos,
    known_names,
    plain_path,
    split_photos,
)
from headrace.fetch.model import COLUMNS_MAX, FIELD_BYTES_MAX, ROWS_MAX
from headrace.fetch.readers.rows import (
    Fault,
    Format,
    Head,
    RawRow,
    Shown,
    Truncated,
    broken,
    not_a_catalogue,
    read_lines,
    require_letters,
)

LINE_CHARACTERS_MAX: Final = 2**20
HEADER_LINES_MAX: Final = 20
"""Number of rows that are searched for a header."""
Record: TypeAlias = tuple[int, list[str], Fault | None, bool]
"""Line number, cells, fault, and whether a line break ends the record."""
LINE_BREAK: Final = re.compile(r"\r\n|\r|\n")
"""Line breaks of a file; `str.splitlines` also splits at form feeds and the like."""
_DELIMITERS: Final = (",", ";", "\t", "|")
_SEPARATOR_LINE: Final = re.compile(r'"?sep=([,;\t|])"?\s*', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Header:
    """The position of a header: its line, counted from 1, and the delimiter of its cells."""

    line: int
    delimiter: str


def find_header(head: Head) -> Header | None:
    """The first line that names an id column and, without a mapping, another known column."""
    if head.text.startswith(("<", "{", "[")):
        return None
    lines = LINE_BREAK.split(head.text, HEADER_LINES_MAX)[:HEADER_LINES_MAX]
    named = _SEPARATOR_LINE.fullmatch(lines[0]) if lines else None
    given = head.mapping.delimiter if head.mapping else None
    delimiters = (named[1],) if named else (given,) if given else _DELIMITERS
    for number, line in enumerate(lines, 1):
        for delimiter in delimiters:
            if is_header(_cells_of(line, delimiter), head.mapping):
                return Header(head.lines_skipped + number, delimiter)
    return None


def _cells_of(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


def is_header(cells: Sequence[str], mapping: Mapping | None) -> bool:
    """Whether these cells are the header of a table."""
    if mapping is not None:
        return not {plain_path(cell) for cell in cells}.isdisjoint(Names(mapping).id_paths)
    names = _column_names(cells)
    return "id" in names and any(n in KNOWN or is_photos(n) for n in names)


def _column_names(cells: Sequence[str]) -> list[str]:
    return known_names([cell.strip().lower() for cell in cells])


def read_delimited(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
    """The rows below the header of a CSV or TSV file.

    Raises: NotACatalogue at once; CatalogueBroken, Truncated, CatalogueTooLarge while read.
    """
    header = find_header(head)
    if header is None:
        require_letters(head)
        raise not_a_catalogue("no_header", snippet=head.text.splitlines()[0][:80])
    return _read(stream, head, header)


def _read(stream: io.BufferedReader, head: Head, header: Header) -> Iterator[RawRow]:
    number = 0
    columns: Columns | None = None
    for line, cells, fault, is_ended in _records(stream, head.encoding, header.delimiter):
        if line < header.line:
            continue
        if columns is None:
            if fault is not None or not is_header(cells, head.mapping):
                raise broken("header_csv", line)
            columns = columns_of(cells, line, head.mapping)
        elif fault is not None or any(cells):
            number += 1
            if number > ROWS_MAX:
                raise broken("too_many_rows", line, most=ROWS_MAX)
            has_text = any(map(str.strip, cells))
            if not is_ended and len(cells) < columns.count and has_text:
                raise Truncated("truncated_row", line, count=len(cells), most=columns.count)
            row = columns.row(number, line, cells, fault)
            row.has_line_break = is_ended or (fault is None and not has_text)
            yield row


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a header; `fill` stores the cells of a record in a row under their names."""

    count: int
    id_index: int
    fill: Callable[[RawRow, list[str]], None]

    def row(self, number: int, line: int, cells: list[str], fault: Fault | None) -> RawRow:
        """The row of these cells. A faulty row has only its id, if no quote precedes it."""
        row = RawRow(number, line, fault=fault)
        if fault is None:
            if len(cells) != self.count:
                counts: Shown = {"count": len(cells), "most": self.count}
                row.fault = Fault("row", "column_count", counts)
            self.fill(row, cells)
        elif self.id_index < len(cells):
            before = cells[: self.id_index + 1]
            if '"' not in "".join(before):
                row.values["id"] = before[-1].strip()
        return row


def _records(stream: io.BufferedReader, encoding: str, delimiter: str) -> Iterator[Record]:
    """The records of a file, including its header.

    A line of invalid CSV is split at every delimiter; only its cells before the first quote are
    right.
    """
    last, is_ended = "", True

    def texts() -> Iterator[str]:
        nonlocal last, is_ended
        for _, text, has_end in read_lines(stream, encoding, characters_max=LINE_CHARACTERS_MAX):
            last, is_ended = text, has_end
            yield text

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
            yield line, cells, None, is_ended
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise Truncated("truncated_quote", line) from None
            cells = last.split(delimiter) if reader.line_num == line else []
            yield line, cells, Fault("row", "csv_quote"), is_ended


def columns_of(header: list[str], line: int, mapping: Mapping | None) -> Columns:
    """The columns that a header names. Raises: CatalogueBroken."""
    if len(header) > COLUMNS_MAX:
        raise broken("too_many_columns", line, count=len(header), most=COLUMNS_MAX)
    if mapping is not None:
        paths, mapped = [plain_path(cell) for cell in header], Names(mapping)
        index = next((paths.index(path) for path in mapped.id_paths if path in paths), len(paths))
        return Columns(len(paths), index, _mapped_filler(paths, mapped))
    names = _column_names(header)
    named = [name for name in names if name and not is_photos(name)]
    duplicates = sorted({name for name in named if named.count(name) > 1})
    if duplicates:
        raise broken("duplicate_header", line, column=duplicates[0])
    fill = _synonym_filler([(name, is_photos(name)) for name in names])
    return Columns(len(names), names.index("id"), fill)


def _synonym_filler(columns: list[tuple[str, bool]]) -> Callable[[RawRow, list[str]], None]:
    """A function that fills rows by synonyms; cells of photo columns are split into links."""

    def fill(row: RawRow, cells: list[str]) -> None:
        for (name, holds_photos), cell in zip(columns, cells, strict=False):
            if not cell:
                continue
            if len(cell) > FIELD_BYTES_MAX:
                row.fault = _too_large(name)
            elif holds_photos:
                row.photos.extend(split_photos(cell))
            elif name and (text := cell.strip()):
                row.values[name] = text

    return fill


def _mapped_filler(columns: list[str], names: Names) -> Callable[[RawRow, list[str]], None]:
    """A function that fills rows by a mapping."""

    def fill(row: RawRow, cells: list[str]) -> None:
        found: dict[str, list[str]] = {}
        for name, cell in zip(columns, cells, strict=False):
            if len(cell) > FIELD_BYTES_MAX:
                row.fault = _too_large(name)
            elif name and (text := cell.strip()):
                found.setdefault(name, []).append(text)
        row.values, row.photos = names.apply(found)

    return fill


def _too_large(name: str) -> Fault:
    return Fault(name, "field_too_large", {"most": FIELD_BYTES_MAX})


def _delimiter_of(head: Head) -> str | None:
    header = find_header(head)
    return header.delimiter if header else None


CSV: Final = Format(
    name="csv",
    title="CSV",
    recognizes=lambda head: _delimiter_of(head) not in (None, "\t"),
    read=read_delimited,
    takes_mapping=True,
)
TSV: Final = Format(
    name="tsv",
    title="TSV",
    recognizes=lambda head: _delimiter_of(head) == "\t",
    read=read_delimited,
    takes_mapping=True,
)


SHEET_MAGICS: Final = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
"""First bytes of ZIP archives (XLSX and ODS) and of old Office files (XLS)."""


def read_sheets(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
    """The rows below the headers of all sheets of a workbook.

    Raises: NotACatalogue at once; CatalogueBroken, CatalogueTooLarge while read.
    """
    answers = sheet_rows(stream)
    try:
        header = _find_sheet_header(answers, head.mapping)
    except SheetUnreadable as unreadable:
        raise not_a_catalogue(unreadable.code) from None
    if header is None:
        raise not_a_catalogue("sheet_without_header", lines=HEADER_LINES_MAX)
    return _read_sheets(stream, answers, header, head.mapping)


def _find_sheet_header(
    answers: Iterator[SheetName | SheetRow], mapping: Mapping | None
) -> SheetRow | None:
    """The next header in `answers`, where its rows follow; None if no further sheet has one."""
    seen = 0
    for answer in answers:
        if isinstance(answer, SheetName):
            seen = 0
            continue
        seen += 1
        if seen <= HEADER_LINES_MAX and is_header(answer.cells, mapping):
            return answer
    return None


def _read_sheets(
    stream: io.BufferedReader,
    answers: Iterator[SheetName | SheetRow],
    header: SheetRow | None,
    mapping: Mapping | None,
) -> Iterator[RawRow]:
    number = 0
    with stream:
        try:
            while header is not None:
                width = max(at for at, cell in enumerate(header.cells, 1) if cell.strip())
                columns = columns_of(header.cells[:width], header.line, mapping)
                for answer in answers:
                    if isinstance(answer, SheetName):
                        break
                    number += 1
                    if number > ROWS_MAX:
                        raise broken("too_many_rows", answer.line, most=ROWS_MAX)
                    # Every row of a sheet has the width of the widest one.
                    cells = (answer.cells + [""] * columns.count)[: columns.count]
                    yield columns.row(number, answer.line, cells, None)
                header = _find_sheet_header(answers, mapping)
        except SheetUnreadable as unreadable:
            raise broken(unreadable.code) from None


SHEET: Final = Format(
    name="sheet",
    title="XLSX, XLS or ODS",
    recognizes=lambda head: head.is_sheet,
    read=read_sheets,
    takes_mapping=True,
)
