"""One decoded JSON object as cells: every text under the path that leads to it.

Numbers stay as they were written (`1990.50` is not a float), `true` is a text, `null` is nothing. Objects
inside give paths (`size.width`), lists give several texts under one path. What parsers disagree about is
refused: a key given twice, NaN and Infinity.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, Final

from headrace.fetch.mappings import plain_path
from headrace.fetch.readers.mapped import Names
from headrace.fetch.readers.naming import named_by_habit
from headrace.fetch.readers.row import Fault, RawRow, RowUnreadable, Value
from headrace.fetch.synonyms import ID_WORDS

DEPTH_MAX: Final = 32
CELLS_MAX: Final = 10_000
"""Paths of a row, mapped or not, that are looked at; one of a hundred thousand names took seconds."""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=str, parse_int=str, parse_constant=_refuse_constant
)


_LENIENT: Final = json.JSONDecoder(parse_float=str, parse_int=str)


def id_in(raw: str, names: Names | None) -> dict[str, Value]:
    """The id of a row that cannot be read whole: its item must not be taken for gone.

    As other parsers would read the row; else only where the id comes first, since an id that is taken for
    another's would spoil a good row.
    """
    try:
        return id_of(_LENIENT.decode(raw), names)
    except (ValueError, RecursionError):
        match = _first_id(tuple(names.id_paths if names else ID_WORDS)).match(raw)
        return {"id": match[1]} if match else {}


def id_of(value: Any, names: Names | None) -> dict[str, Value]:
    """The id among the plain members of a decoded row."""
    if not isinstance(value, dict):
        return {}
    row = RawRow(0, 0)
    ids = names.id_paths if names else ID_WORDS
    plain = {k: v for k, v in value.items() if not isinstance(v, dict | list)}
    name_row(row, {k: v for k, v in plain.items() if plain_path(k) in ids}, names)
    return {"id": row.item} if row.item else {}


@lru_cache(100)
def _first_id(names: tuple[str, ...]) -> re.Pattern[str]:
    told = "|".join(map(re.escape, names))
    return re.compile(
        rf'\s*\{{\s*"(?:{told})"\s*:\s*"?([A-Za-z0-9._:@~-]{{1,128}})["\s,]', re.IGNORECASE
    )


def name_row(row: RawRow, value: Any, names: Names | None) -> None:
    """Give `row` the fields and photos of a decoded value. Raises: RowUnreadable."""
    if not isinstance(value, dict):
        raise RowUnreadable(Fault("row", "not_an_object"))
    cells: dict[str, list[str]] = {}
    _collect(value, "", cells, DEPTH_MAX)
    row.values, row.photos = named_by_habit(cells) if names is None else names.apply(cells)


def _collect(value: Any, path: str, cells: dict[str, list[str]], depth_left: int) -> None:
    """Put every text below `value` into `cells`. Raises: RowUnreadable."""
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
