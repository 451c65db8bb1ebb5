"""What every reader gives: raw rows in one shape, and the words for a file that ends too early."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.fetch.model import CatalogueBroken
from penstock.kernel.errors import FieldProblem


@dataclass(slots=True)
class RawRow:
    """One row as it was read, `number` from 1; nothing is validated yet."""

    number: int
    line: int
    values: dict[str, str] = field(default_factory=dict)
    photos: list[str] = field(default_factory=list)
    fault: FieldProblem | None = None
    """Set when the row itself cannot be read; `values` then holds what is known of it."""


class Truncated(Exception):
    """The file ends in the middle; `where` says at which line and in what."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


def broken(code: str, text: str, line: int | None = None) -> CatalogueBroken:
    """The error of a file whose rest cannot be read; `code` names the fault within the one error."""
    where = "file" if line is None else f"line {line}"
    return CatalogueBroken(f"{where}: {text}", problems=(FieldProblem(where, code, text),))
