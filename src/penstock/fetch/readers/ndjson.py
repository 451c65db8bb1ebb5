"""NDJSON: a JSON object a line; a line that is none is a faulty row and the rest goes on.

A last line that breaks off makes the file truncated. Told from a JSON document by its first line, which
is whole by itself: another object follows it, or it has an id of its own.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from penstock.fetch.model import ROWS_MAX
from penstock.fetch.readers.format import Format, Head
from penstock.fetch.readers.json_cells import DECODER, DEPTH_MAX, id_in, name_row
from penstock.fetch.readers.json_text import VALUE_CHARACTERS_MAX
from penstock.fetch.readers.lines import read_lines
from penstock.fetch.readers.mapped import Names
from penstock.fetch.readers.naming import known_names
from penstock.fetch.readers.row import Fault, RawRow, RowUnreadable, Truncated, broken


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
            raise broken("too_many_rows", f"more than {ROWS_MAX:,} rows: split the file", line)
        row = RawRow(number, line)
        try:
            name_row(row, _decode(text), names)
        except RowUnreadable as unreadable:
            if not is_ended and unreadable.fault.code == "invalid_json":
                raise Truncated(f"line {line}: the last line is no whole JSON object") from None
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
    lines = [line for line in head.text.split("\n", 2)[:2] if line.strip()]
    if not lines or not lines[0].startswith("{"):
        return False
    try:
        first = DECODER.decode(lines[0])
    except (ValueError, RecursionError):
        return False
    ids = Names(head.mapping).id_paths if head.mapping else ["id"]
    has_id = any(name in ids for name in known_names([key.strip().lower() for key in first]))
    return has_id or (len(lines) > 1 and lines[1].lstrip().startswith("{"))


FORMAT: Final = Format(
    name="ndjson",
    title="NDJSON",
    recognises=_is_ndjson,
    read=read_objects,
    takes_mapping=True,
)
