"""Catalogue formats: one reader per format behind one interface, chosen by content.

`open_catalogue(path)` unpacks gzip, detects the format and returns a `Catalogue` with an iterator
of `RawRow`. Memory use is one row and one block of the file, whatever the file size; spreadsheets
are the exception and are decoded in a child process.

Errors have three levels:

- A faulty row is yielded with `fault` set, and reading continues.
- A file that breaks its format raises CatalogueBroken.
- A file that ends too early raises Truncated after its complete rows.

| module | content |
| --- | --- |
| `detect` | unpacking, encoding, choice of the format |
| `tables` | CSV, TSV and spreadsheets |
| `json_formats`, `json_stream` | JSON and NDJSON; the incremental JSON parser |
| `xml_formats` | YML, Avito, Google and mapped XML; the incremental XML parser |
| `rows` | rows, faults, formats, bounded lines |

`headrace.fetch.mappings` gives the cells of a row their field names.
"""

from __future__ import annotations

from headrace.fetch.mappings import Value
from headrace.fetch.readers.detect import (
    FORMAT_NAMES,
    Catalogue,
    open_catalogue,
    require_format,
)
from headrace.fetch.readers.rows import Fault, RawRow, Truncated

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
