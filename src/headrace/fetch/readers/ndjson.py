"""NDJSON: a JSON object a line; a line that is none is a faulty row and the rest goes on.

A last line that breaks off makes the file truncated. A first line that is an object by itself, with an id or
with another object below it, tells NDJSON from a JSON document. So does a bad first line above an object, unless
a document can go on after that line.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from headrace.fetch.model import ROWS_MAX
from headrace.fetch.readers.format import Format, Head
from headrace.fetch.readers.json_cells import DECODER, DEPTH_MAX, id_in, name_row
from headrace.fetch.readers.json_text import VALUE_CHARACTERS_MAX
from headrace.fetch.readers.lines import read_lines
from headrace.fetch.readers.mapped import Names
from headrace.fetch.readers.naming import known_names
from headrace.fetch.readers.row import Fault, RawRow, RowUnreadable, Truncated, broken

LINES_LOOKED_AT: Final = 4


def read_objects(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
    """Every row, in order. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
    names = Names(head.mapping) if head.mapping else None
    number = 0
    for line, text, is_ended in read_lines(
        stream, head.encoding, characters_max=VALUE_CHARACTERS_MAX
    ):
        if not text.strip():
            continue
        number += 1
        if number > ROWS_MAX:
            raise broken("too_many_rows", line, most=ROWS_MAX)
        row = RawRow(number, line)
        try:
            name_row(row, _decode(text), names)
        except RowUnreadable as unreadable:
            if not is_ended and unreadable.fault.code == "invalid_json":
                raise Truncated("truncated_ndjson", line) from None
            row.fault, row.values = unreadable.fault, id_in(text, names)
        yield row


def _decode(text: str) -> object:
    try:
        return DECODER.decode(text)
    except RecursionError:
        fault = Fault("row", "too_deep", {"most": DEPTH_MAX})
    except ValueError:
        fault = Fault("row", "invalid_json")
    raise RowUnreadable(fault)


def _is_ndjson(head: Head) -> bool:
    lines = [
        line for line in head.text.split("\n", LINES_LOOKED_AT)[:LINES_LOOKED_AT] if line.strip()
    ]
    if not lines or lines[0].startswith("<"):
        return False
    try:
        first = DECODER.decode(lines[0])
    except RecursionError:
        first = None
    except ValueError as error:
        if _may_go_on(lines[0], error) and not _has_adjacent_objects(lines[1:]):
            return False
        first = None
    if not isinstance(first, dict):
        return any(map(_is_object, lines[1:2]))
    ids = Names(head.mapping).id_paths if head.mapping else ["id"]
    has_id = any(name in ids for name in known_names([key.strip().lower() for key in first]))
    return has_id or (len(lines) > 1 and lines[1].lstrip().startswith("{"))


def _may_go_on(line: str, error: ValueError) -> bool:
    """Whether a JSON document may have `line` as its first: the decoder reached the line's end."""
    at = getattr(error, "pos", 0)
    is_open_text = getattr(error, "msg", "").startswith("Unterminated string")
    return at >= len(line.rstrip()) and not is_open_text


def _has_adjacent_objects(lines: list[str]) -> bool:
    """Whether two lines in a row are objects: a JSON document has a comma between them."""
    objects = [_is_object(line) for line in lines]
    return any(one and other for one, other in pairwise(objects))


def _is_object(line: str) -> bool:
    try:
        return isinstance(DECODER.decode(line), dict)
    except (ValueError, RecursionError):
        return False


FORMAT: Final = Format(
    name="ndjson",
    title="NDJSON",
    recognises=_is_ndjson,
    read=read_objects,
    takes_mapping=True,
)
