"""JSON documents and NDJSON files, row by row.

**JSON** is an array of objects, or an object that contains one: at the path `rows` of the mapping,
else the first array of objects found, at most three objects deep. The text around the array is
parsed too, so a truncated file is detected.

**NDJSON** is one object per line; an invalid line is a faulty row. It is distinguished from a JSON
document by its first lines: an object on a line of its own that has an id, or that another object
follows. If the first line is invalid, the lines after it decide.

An object becomes cells keyed by path (`size.width`). A list gives several texts for one path.
Numbers stay as written (`1990.50` does not become a float), `true` is a text, and `null` is no
value. Duplicate keys, NaN and Infinity are refused, since parsers disagree about them.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from headrace.fetch.mappings import ID_WORDS, Names, Value, apply_synonyms, known_names, plain_path
from headrace.fetch.model import ROWS_MAX
from headrace.fetch.readers.json_stream import (
    DECODER,
    DEPTH_MAX,
    VALUE_CHARACTERS_MAX,
    JsonText,
    Unreadable,
)
from headrace.fetch.readers.rows import (
    Fault,
    Format,
    Head,
    RawRow,
    RowUnreadable,
    Truncated,
    broken,
    read_lines,
)

CELLS_MAX: Final = 10_000
"""Maximum number of paths in a row; a row of a hundred thousand names would take seconds."""


_LENIENT: Final = json.JSONDecoder(parse_float=str, parse_int=str)


def id_in(raw: str, names: Names | None) -> dict[str, Value]:
    """The id in the text of an unreadable row, so that its item does not count as removed.

    A lenient parser is tried first. Otherwise the id must be the first member: a value elsewhere
    may belong to another object, and a wrong id would damage a good item.
    """
    try:
        return id_of(_LENIENT.decode(raw), names)
    except (ValueError, RecursionError):
        match = _first_id(tuple(names.id_paths if names else ID_WORDS)).match(raw)
        return {"id": match[1]} if match else {}


def id_of(value: Any, names: Names | None) -> dict[str, Value]:
    """The id of a decoded row that has a fault; nested members are ignored."""
    if not isinstance(value, dict):
        return {}
    row = RawRow(0, 0)
    ids = names.id_paths if names else ID_WORDS
    plain = {k: v for k, v in value.items() if not isinstance(v, dict | list)}
    name_row(row, {k: v for k, v in plain.items() if plain_path(k) in ids}, names)
    return {"id": row.item} if row.item else {}


@lru_cache(100)
def _first_id(names: tuple[str, ...]) -> re.Pattern[str]:
    choices = "|".join(map(re.escape, names))
    return re.compile(
        rf'\s*\{{\s*"(?:{choices})"\s*:\s*"?([A-Za-z0-9._:@~-]{{1,128}})["\s,]', re.IGNORECASE
    )


def name_row(row: RawRow, value: Any, names: Names | None) -> None:
    """Set the fields and photos of `row` from a decoded value. Raises: RowUnreadable."""
    if not isinstance(value, dict):
        raise RowUnreadable(Fault("row", "not_an_object"))
    cells: dict[str, list[str]] = {}
    _collect(value, "", cells, DEPTH_MAX)
    row.values, row.photos = apply_synonyms(cells) if names is None else names.apply(cells)


def _collect(value: Any, path: str, cells: dict[str, list[str]], depth_left: int) -> None:
    """Add every text in `value` to `cells` under its path. Raises: RowUnreadable."""
    if depth_left == 0:
        raise RowUnreadable(Fault("row", "too_deep", {"most": DEPTH_MAX}))
    if isinstance(value, dict):
        for key, child in value.items():
            name = plain_path(key)
            _collect(child, f"{path}.{name}" if path else name, cells, depth_left - 1)
    elif isinstance(value, list):
        for child in value:
            _collect(child, path, cells, depth_left - 1)
    elif value is not None:
        text = str(value).strip() if value is not True and value is not False else _word(value)
        if text:
            cells.setdefault(path, []).append(text)
            if len(cells) > CELLS_MAX:
                raise RowUnreadable(Fault("row", "too_many_fields", {"most": CELLS_MAX}))


def _word(value: bool) -> str:  # noqa: FBT001 - a value, no switch
    return "true" if value else "false"


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
    """Advance to the array of rows; return its depth in objects, None if the array is empty."""
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
    """Search the members of an object for the array; consume the object if it has none."""
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
    """Return `depth` if the next value begins with `mark`. Raises: CatalogueBroken."""
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


JSON: Final = Format(
    name="json",
    title="JSON",
    recognizes=lambda head: head.text.startswith(("[", "{")),
    read=read_array,
    takes_mapping=True,
)


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
    """Whether `line` may be the first line of a JSON document: its end is the only fault."""
    at = getattr(error, "pos", 0)
    is_open_text = getattr(error, "msg", "").startswith("Unterminated string")
    return at >= len(line.rstrip()) and not is_open_text


def _has_adjacent_objects(lines: list[str]) -> bool:
    """Whether two consecutive lines are objects; a JSON document has a comma between them."""
    objects = [_is_object(line) for line in lines]
    return any(one and other for one, other in pairwise(objects))


def _is_object(line: str) -> bool:
    try:
        return isinstance(DECODER.decode(line), dict)
    except (ValueError, RecursionError):
        return False


NDJSON: Final = Format(
    name="ndjson",
    title="NDJSON",
    recognizes=_is_ndjson,
    read=read_objects,
    takes_mapping=True,
)
