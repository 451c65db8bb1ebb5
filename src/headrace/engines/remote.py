"""Statements that another process of this host runs: rows and errors as values of messages.

A slot sends statements of jobs to its agent, so that connections grow with hosts and not with
slots. The caller gets the rows and the errors of a connection of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import asyncpg
import msgspec

from headrace.engines.sql import Query
from headrace.kernel.errors import HeadraceError, error_table


class RemoteStatements(Protocol):
    """The way to the process that runs statements for this one."""

    def takes(self, query: Query, parameters: dict[str, Any]) -> bool:
        """Whether the other process runs this statement."""

    async def call(
        self, method: str, query: Query, parameters: dict[str, Any], *, timeout_s: float
    ) -> Any:
        """The result of the driver's `method` for the query. Raises: the statement's errors."""


class Record:
    """A row with fields by name and by position."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self._names = names
        self._values = values

    def __getitem__(self, key: str | int) -> Any:
        return self._values[self._names.index(key) if isinstance(key, str) else key]

    def keys(self) -> Sequence[str]:
        """The names of the fields."""
        return self._names


def pack_result(method: str, result: Any) -> Any:
    """The result of the driver's `method` as values of a message."""
    match method:
        case "fetch":
            names = list(result[0].keys()) if result else []
            return names, [list(row.values()) for row in result]
        case "fetchrow":
            return None if result is None else (list(result.keys()), list(result.values()))
        case _:
            return result


def unpack_result(method: str, packed: Any) -> Any:
    """The result of the driver's `method`, from values of a message."""
    match method:
        case "fetch":
            names, rows = packed
            return [Record(names, row) for row in rows]
        case "fetchrow":
            return None if packed is None else Record(*packed)
        case _:
            return packed


class PackedError(msgspec.Struct, frozen=True, array_like=True):
    """An error of a statement as values of a message."""

    code: str
    """Of an error of this product, or the SQLSTATE of the driver's; empty for any other."""
    text: str
    retry_after_s: float | None = None
    constraint: str | None = None

    @classmethod
    def of(cls, error: Exception) -> PackedError:
        """The values of `error`."""
        if isinstance(error, HeadraceError):
            constraint = getattr(error, "constraint", None)
            return cls(error.code, error.text, error.retry_after_s, constraint)
        return cls(getattr(error, "sqlstate", None) or "", str(error) or repr(error))

    def error(self) -> Exception:
        """An error of the same class and text."""
        kind = error_table().get(self.code)
        if kind is not None:
            # Their constructors differ.
            error = kind.__new__(kind, self.text)
            HeadraceError.__init__(error, self.text, retry_after_s=self.retry_after_s)
            if self.constraint is not None:
                vars(error)["constraint"] = self.constraint
            return error
        if self.code:
            refused: Exception = asyncpg.PostgresError.new({"C": self.code, "M": self.text})
            return refused
        return HeadraceError(f"the statement failed in another process: {self.text}")
