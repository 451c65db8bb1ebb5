"""Any other XML, by a mapping: `rows` is the path of the elements that are rows, from the root.

The root's own name may be left out. A field is the path of an element below the row, `@name` an attribute.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from headrace.fetch.errors import InvalidMapping
from headrace.fetch.mappings import plain_path
from headrace.fetch.readers.format import Format, Head
from headrace.fetch.readers.mapped import Names
from headrace.fetch.readers.row import RawRow
from headrace.fetch.readers.xml_rows import read_xml


def read_elements(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
    """Every row, in order. Raises: InvalidMapping, CatalogueBroken, Truncated, CatalogueTooLarge."""
    mapping = head.mapping
    if mapping is None or not mapping.rows:
        raise InvalidMapping(
            "the mapping of an XML file needs `rows`, the path of the elements that are rows, such as"
            " 'shop.products.product'"
        )
    return _read(stream, plain_path(mapping.rows).split("."), Names(mapping), mapping.encoding)


def _read(
    stream: io.BufferedReader, rows: list[str], names: Names, encoding: str | None
) -> Iterator[RawRow]:
    def is_row(path: list[str]) -> bool:
        if len(path) - len(rows) not in (0, 1):
            return False
        return [name.lower() for name in path[-len(rows) :]] == rows

    for row in read_xml(stream, is_row, encoding=encoding):
        found = row.raw()
        found.values, found.photos = names.apply(row.cells())
        yield found


FORMAT: Final = Format(
    name="xml",
    title="XML with a mapping",
    recognises=lambda head: head.root is not None and head.mapping is not None,
    read=read_elements,
    takes_mapping=True,
)
