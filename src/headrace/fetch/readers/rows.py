"""The shared parts of every reader: raw rows, faults, formats, and bounded lines of text.

A new format is one `Format` and one entry in `detect.FORMATS`.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.fetch.errors import (
    CatalogueBroken,
    CatalogueTooLarge,
    FileFault,
    NotACatalogue,
)
from headrace.fetch.i18n import Texts
from headrace.fetch.mappings import Mapping, Value
from headrace.kernel.errors import FieldProblem

Shown: TypeAlias = dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one field in one row; `values` fill the placeholders of its sentence."""

    field: str
    code: str
    values: Shown = dataclasses.field(default_factory=dict)


@dataclass(slots=True)
class RawRow:
    """One row as read, not validated; `number` counts from 1."""

    number: int
    line: int
    values: dict[str, Value] = dataclasses.field(default_factory=dict)
    photos: list[str] = dataclasses.field(default_factory=list)
    fault: Fault | None = None
    """Set if the row cannot be read; `values` then has the id, if it was found."""
    has_line_break: bool | None = None
    """Whether a line break ends the row; None unless the file is a text table."""

    @property
    def item(self) -> str:
        """The id as written in the file; empty if there is none."""
        found = self.values.get("id", "")
        return found if isinstance(found, str) else ""


class Truncated(Exception):
    """The file ends too early; `fault` has the position, `where` the English sentence."""

    def __init__(self, code: str, line: int | None = None, **values: str | int) -> None:
        self.fault = FileFault(code, line, values)
        self.where = Texts.load().file(self.fault)
        super().__init__(self.where)


class RowUnreadable(Exception):
    """One row cannot be read; the reader yields it with this fault and continues."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.code)
        self.fault = fault


def broken(code: str, line: int | None = None, **values: str | int) -> CatalogueBroken:
    """The error for a file that cannot be read further; `code` has a sentence in `i18n`."""
    fault = FileFault(code, line, values)
    text = Texts.load().file(fault)
    where = "file" if line is None else f"line {line}"
    error = CatalogueBroken(text, problems=(FieldProblem(where, code, text),))
    error.fault = fault
    return error


def not_a_catalogue(code: str, line: int | None = None, **values: str | int) -> NotACatalogue:
    """The error for a file of no known format; `code` has a sentence in `i18n`."""
    error = NotACatalogue(Texts.load().file(FileFault(code, line, values)))
    error.fault = FileFault(code, line, values)
    return error


def too_large(bytes_max: int) -> CatalogueTooLarge:
    """The error for a file larger than the catalogue limit."""
    error = CatalogueTooLarge(
        Texts.load().file(FileFault("too_large", values={"bytes": bytes_max}))
    )
    error.fault = FileFault("too_large", values={"bytes": bytes_max})
    return error


@dataclass(frozen=True, slots=True)
class Root:
    """The root element of an XML file."""

    name: str
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Head:
    """The decoded first bytes of a file, which decide its format.

    `root` is set for XML. `lines_skipped` counts empty lines above the text. A spreadsheet has no
    text.
    """

    text: str
    encoding: str
    root: Root | None = None
    mapping: Mapping | None = None
    lines_skipped: int = 0
    is_sheet: bool = False


def require_letters(head: Head) -> None:
    """Refuse a file whose first line has undecodable characters. Raises: NotACatalogue.

    Without this check, a table in the wrong encoding would be reported as a table without an id
    column.
    """
    if "\N{REPLACEMENT CHARACTER}" in head.text.splitlines()[0]:
        name = head.encoding.removesuffix("-sig").upper()
        raise not_a_catalogue("not_text", 1, encoding=name)


@dataclass(frozen=True, slots=True)
class Format:
    """A catalogue format: how to recognize it and how to read it. `title` is its display name.

    `takes_mapping` is set for formats without fixed field names. If a mapping is given, only these
    formats are considered.
    """

    name: str
    title: str
    recognizes: Callable[[Head], bool]
    read: Callable[[io.BufferedReader, Head], Iterator[RawRow]]
    takes_mapping: bool = False


UTF8_BYTES_MAX: Final = 4
_ESCAPED: Final = re.compile("[\udc80-\udcff]")


def read_lines(
    stream: io.BufferedReader, encoding: str, *, characters_max: int
) -> Iterator[tuple[int, str, bool]]:
    """The lines as (number, text, whether a line break ends it), each of bounded length.

    Invalid UTF-8 is decoded to surrogates first, so that the error names the right line: a strict
    decoder would fail for a whole buffer of lines. Raises while read:
    CatalogueBroken, Truncated, CatalogueTooLarge.
    """
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    text = io.TextIOWrapper(stream, encoding=encoding, errors=errors, newline="")
    number = 0
    with text:
        while line := _next_line(text, encoding, number + 1, characters_max):
            number += 1
            is_ended = line.endswith(("\n", "\r"))
            if len(line) >= characters_max and not is_ended:
                raise broken("line_too_long", number, most=characters_max)
            if not line.isascii() and (escaped := _ESCAPED.search(line)):
                if not is_ended and len(line) - escaped.start() < UTF8_BYTES_MAX:
                    raise Truncated("truncated_letter", number)
                raise not_text(encoding, number)
            yield number, line, is_ended


def _next_line(text: io.TextIOWrapper, encoding: str, number: int, characters_max: int) -> str:
    try:
        return text.readline(characters_max)
    except UnicodeDecodeError as error:
        if "unexpected end" in error.reason or "truncated" in error.reason:
            raise Truncated("truncated_letter", number) from None
        raise not_text(encoding, number) from None


def not_text(encoding: str, line: int) -> CatalogueBroken:
    """The error for bytes that are invalid in the encoding of the file."""
    name = encoding.removesuffix("-sig").upper()
    return broken("invalid_encoding", line, encoding=name)
