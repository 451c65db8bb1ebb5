"""JSON: an array of objects, or an object that holds one, read row by row.

Only one row and one block are in memory: each row is cut out of the text by the decoder of the standard
library, which says where a value ends. The array is the one at the mapping's `rows`, else the first array
of objects that is found, at most three objects deep. What stands before and after it is read past and must
be whole, so that a file cut short is told. A row that is no JSON is a faulty one where its brackets close.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from headrace.fetch.mappings import plain_path
from headrace.fetch.model import ROWS_MAX
from headrace.fetch.readers.format import Format, Head
from headrace.fetch.readers.json_cells import id_in, id_of, name_row
from headrace.fetch.readers.json_text import JsonText, Unreadable
from headrace.fetch.readers.mapped import Names
from headrace.fetch.readers.row import RawRow, RowUnreadable, broken

OBJECTS_DEEP_MAX: Final = 3


def read_array(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
    """Every row, in order. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
    mapping = head.mapping
    path = plain_path(mapping.rows).split(".") if mapping and mapping.rows else None
    names = Names(mapping) if mapping else None
    with stream:
        text = JsonText(stream, head.encoding)
        depth = _enter(text, path)
        if depth is not None:
            yield from _rows(text, names)
            text.leave(depth)
        text.expect_end()


def _enter(text: JsonText, path: list[str] | None) -> int | None:
    """Go to the array of rows; answer in how many objects it stands, None for one without rows."""
    if text.peek() == "[":
        return 0
    depth = _find_array(text, path, 1)
    if depth is None:
        if path is None and text.has_empty_array:
            return None
        if path is None:
            raise broken("no_rows", most=OBJECTS_DEEP_MAX)
        raise broken("no_rows_at", path=".".join(path))
    return depth


def _find_array(text: JsonText, path: list[str] | None, depth: int) -> int | None:
    """Look through the members of an object; its end is passed where nothing is found."""
    for key in text.members():
        if path is not None:
            if plain_path(key) != path[0]:
                text.skip()
            elif len(path) == 1:
                return _require(text, "[", key, depth)
            else:
                return _find_array(text, path[1:], _require(text, "{", key, depth) + 1)
        elif text.is_array_of_objects():
            return depth
        elif text.peek() == "{" and depth < OBJECTS_DEEP_MAX:
            found = _find_array(text, None, depth + 1)
            if found is not None:
                return found
        else:
            text.skip()
    return None


def _require(text: JsonText, mark: str, key: str, depth: int) -> int:
    """`depth`, if what comes next begins with `mark`. Raises: CatalogueBroken."""
    if text.peek() != mark:
        raise broken("no_rows_at", text.line, path=key[:40])
    return depth


def _rows(text: JsonText, names: Names | None) -> Iterator[RawRow]:
    for number, line in enumerate(text.elements(), 1):
        if number > ROWS_MAX:
            raise broken("too_many_rows", line, most=ROWS_MAX)
        row = RawRow(number, line)
        try:
            value = text.value()
            name_row(row, value, names)
        except RowUnreadable as unreadable:
            row.fault, row.values = unreadable.fault, id_of(value, names)
        except Unreadable as unreadable:
            text.skip()
            row.fault, row.values = unreadable.fault, id_in(unreadable.raw, names)
        yield row


FORMAT: Final = Format(
    name="json",
    title="JSON",
    recognises=lambda head: head.text.startswith(("[", "{")),
    read=read_array,
    takes_mapping=True,
)
