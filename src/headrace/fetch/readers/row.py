"""What every reader gives: raw rows in one shape, and the words for a file that ends too early."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

from headrace.fetch.errors import (
    CatalogueBroken,
    CatalogueTooLarge,
    FileFault,
    NotACatalogue,
)
from headrace.fetch.texts import Texts
from headrace.kernel.errors import FieldProblem

Value: TypeAlias = str | list[str]
"""One field: a text, or texts where the file gave several."""
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
