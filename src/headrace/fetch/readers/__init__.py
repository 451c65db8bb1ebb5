"""Catalogue formats, each a small reader behind one interface, recognised by content alone.

`open_catalogue(path)` looks at the first bytes (names and content types lie), unpacks gzip on the way and
gives a `Catalogue`: its format and an iterator of `RawRow`, which never holds more than one row and one
block of the file: those of 270 to 390 MiB were read by a process of 55 MiB in all (2026-11). A fault of one
row is a row with `fault` set, a fault of the file raises CatalogueBroken, and an end that comes too early
raises Truncated, after the rows before it were given.

The formats: `delimited` (CSV, TSV), `json_rows`, `ndjson`, `yml` (Yandex), `avito`, `google` (RSS, Atom), `foreign`
(any XML by a mapping); each is one file that ends with its `Format`, and one line in `recognise.FORMATS`. What
they stand on: `unpacked` (bytes), `lines`, `json_text` and `json_cells`, `xml_rows`; then `naming` (names by
habit) or `mapped` (names by a mapping) make a row's cells its fields.
"""

from __future__ import annotations

from headrace.fetch.mappings import Value
from headrace.fetch.readers.base import Fault, RawRow, Truncated
from headrace.fetch.readers.detect import (
    FORMAT_NAMES,
    Catalogue,
    open_catalogue,
    require_format,
)

__all__ = [
    "FORMAT_NAMES",
    "Catalogue",
    "Fault",
    "RawRow",
    "Truncated",
    "Value",
    "open_catalogue",
    "require_format",
]
