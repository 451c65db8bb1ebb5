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
    """What is wrong with one field of one row; `values` are what its sentence shows."""

    field: str
    code: str
    values: Shown = dataclasses.field(default_factory=dict)


@dataclass(slots=True)
class RawRow:
    """One row as it was read, `number` from 1; nothing is validated yet."""

    number: int
    line: int
    values: dict[str, Value] = dataclasses.field(default_factory=dict)
    photos: list[str] = dataclasses.field(default_factory=list)
    fault: Fault | None = None
    """Set when the row itself cannot be read; `values` then holds what is known of it."""
    has_line_break: bool | None = None
    """Of a text table: whether a line break ends the row."""

    @property
    def item(self) -> str:
        """What it says its id is; empty where it says nothing."""
        found = self.values.get("id", "")
        return found if isinstance(found, str) else ""


class Truncated(Exception):
    """The file ends in the middle; `fault` says where, `where` in a sentence."""

    def __init__(self, code: str, line: int | None = None, **values: str | int) -> None:
        self.fault = FileFault(code, line, values)
        self.where = Texts.load().file(self.fault)
        super().__init__(self.where)


class RowUnreadable(Exception):
    """One row cannot be read and the next one can; its reader makes it a row with this fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.code)
        self.fault = fault


def broken(code: str, line: int | None = None, **values: str | int) -> CatalogueBroken:
    """The error of a file whose rest cannot be read; `code` has a sentence in `texts/`."""
    fault = FileFault(code, line, values)
    text = Texts.load().file(fault)
    where = "file" if line is None else f"line {line}"
    error = CatalogueBroken(text, problems=(FieldProblem(where, code, text),))
    error.fault = fault
    return error


def not_a_catalogue(code: str, line: int | None = None, **values: str | int) -> NotACatalogue:
    """The error of a file that is of no format; `code` has a sentence in `texts/`."""
    error = NotACatalogue(Texts.load().file(FileFault(code, line, values)))
    error.fault = FileFault(code, line, values)
    return error


def too_large(bytes_max: int) -> CatalogueTooLarge:
    """The error of a file over the bound of catalogues."""
    error = CatalogueTooLarge(
        Texts.load().file(FileFault("too_large", values={"bytes": bytes_max}))
    )
    error.fault = FileFault("too_large", values={"bytes": bytes_max})
    return error


@dataclass(frozen=True, slots=True)
class Root:
    """The outermost element of an XML file."""

    name: str
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a file as text; `root` where they are XML. `mapping` names its fields.

    `lines_skipped` are the empty lines above the text. A sheet has no text.
    """

    text: str
    encoding: str
    root: Root | None = None
    mapping: Mapping | None = None
    lines_skipped: int = 0
    is_sheet: bool = False


def require_letters(head: Head) -> None:
    """Return where the first line of a file that no format takes could be read. Raises: NotACatalogue.

    Without this a table in another encoding, whose header is not understood for that, would be told that
    its header names no id.
    """
    if "\N{REPLACEMENT CHARACTER}" in head.text.splitlines()[0]:
        name = head.encoding.removesuffix("-sig").upper()
        raise not_a_catalogue("not_text", 1, encoding=name)


@dataclass(frozen=True, slots=True)
class Format:
    """A catalogue format; `title` is what people call it.

    `takes_mapping` where the format says nothing about the names of fields, so that a mapping may;
    the others mean one thing only and are not looked for once a mapping is given.
    """

    name: str
    title: str
    recognises: Callable[[Head], bool]
    read: Callable[[io.BufferedReader, Head], Iterator[RawRow]]
    takes_mapping: bool = False


UTF8_BYTES_MAX: Final = 4
_ESCAPED: Final = re.compile("[\udc80-\udcff]")


def read_lines(
    stream: io.BufferedReader, encoding: str, *, characters_max: int
) -> Iterator[tuple[int, str, bool]]:
    """(number, line, whether its end is there) of each line.

    Raises: CatalogueBroken, Truncated, CatalogueTooLarge.
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
    """The error of a file that is not of its encoding."""
    name = encoding.removesuffix("-sig").upper()
    return broken("invalid_encoding", line, encoding=name)
