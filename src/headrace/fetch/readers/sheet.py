"""Spreadsheets: XLSX, XLS and ODS, every visible sheet that has a header among its first rows.

Rows are read as those of a table are, by the same names of columns. A sheet without a header, such as a page of
instructions, is skipped; hidden ones are not read. Formulas count by their last result, which the file keeps.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from headrace.fetch.decoding.sheets import SheetName, SheetRow, SheetUnreadable, sheet_rows
from headrace.fetch.mappings import Mapping
from headrace.fetch.model import ROWS_MAX
from headrace.fetch.readers.delimited import HEADER_LINES_MAX, columns_of, is_header
from headrace.fetch.readers.format import Format, Head
from headrace.fetch.readers.row import RawRow, broken, not_a_catalogue

SHEET_MAGICS: Final = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
"""How ZIP archives, which XLSX and ODS are, and old Office files begin."""


def read_sheets(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
    """Every row below the headers.

    Raises: NotACatalogue at once; CatalogueBroken, CatalogueTooLarge while read.
    """
    answers = sheet_rows(stream)
    try:
        header = _find_header(answers, head.mapping)
    except SheetUnreadable as unreadable:
        raise not_a_catalogue(unreadable.code) from None
    if header is None:
        raise not_a_catalogue("sheet_without_header", lines=HEADER_LINES_MAX)
    return _read(stream, answers, header, head.mapping)


def _find_header(
    answers: Iterator[SheetName | SheetRow], mapping: Mapping | None
) -> SheetRow | None:
    """The next header among the first rows of a sheet; its other rows follow in `answers`."""
    seen = 0
    for answer in answers:
        if isinstance(answer, SheetName):
            seen = 0
            continue
        seen += 1
        if seen <= HEADER_LINES_MAX and is_header(answer.cells, mapping):
            return answer
    return None


def _read(
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
                    # A sheet is as wide as its widest row.
                    cells = (answer.cells + [""] * columns.count)[: columns.count]
                    yield columns.row(number, answer.line, cells, None)
                header = _find_header(answers, mapping)
        except SheetUnreadable as unreadable:
            raise broken(unreadable.code) from None


FORMAT: Final = Format(
    name="sheet",
    title="XLSX, XLS or ODS",
    recognises=lambda head: head.is_sheet,
    read=read_sheets,
    takes_mapping=True,
)
