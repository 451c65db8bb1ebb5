"""Catalogue formats, each a small reader behind one interface, recognised by content alone.

`open_catalogue(path)` looks at the first bytes (names and content types lie), unpacks gzip on the way and
gives a `Catalogue`: its format and an iterator of `RawRow`, which never holds more than one row and one
block of the file. A fault of one row is a row with `fault` set, a fault of the file raises
CatalogueBroken, and an end that comes too early raises Truncated, after the rows before it were given.

delimited  CSV and TSV with a header line        yml  Yandex YML (XML, `offers/offer`)
"""

from __future__ import annotations

from penstock.fetch.readers.recognise import Catalogue, open_catalogue
from penstock.fetch.readers.row import RawRow, Truncated

__all__ = ["Catalogue", "RawRow", "Truncated", "open_catalogue"]
