"""Reads bytes as a catalogue file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.fetch.readers import RawRow, open_catalogue


def read(
    folder: Path, data: str | bytes, *, bytes_max: int = 10**9, **options: Any
) -> tuple[str, list[RawRow]]:
    """The format and the rows of a file with this content."""
    path = folder / "file"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    catalogue = open_catalogue(path, bytes_max=bytes_max, **options)
    return catalogue.format, list(catalogue.rows)


def codes(rows: list[RawRow]) -> list[str | None]:
    """The fault code of each row."""
    return [row.fault and row.fault.code for row in rows]
