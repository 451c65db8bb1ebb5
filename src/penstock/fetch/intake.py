"""From raw rows to rows that can be compared: validation, photo judging, one hash a row.

Pure but for the file behind the reader; it runs in a thread, a chunk of rows at a time, so that a
catalogue of a gigabyte neither fills the memory nor stops the event loop. A row is valid or it has a
problem that says so; a bad photo link does not spoil its row: the link is refused at the door, keeps its
place in the item, and is never asked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from typing import Final

import msgspec

from penstock.fetch.guard import Policy, judge_url
from penstock.fetch.model import (
    FIELDS_BYTES_MAX,
    PHOTOS_OF_ITEM_MAX,
    URL_CHARACTERS_MAX,
    RowProblem,
    UrlRefused,
)
from penstock.fetch.readers import RawRow, Truncated
from penstock.kernel.ids import USER_ID

ROWS_OF_CHUNK: Final = 1000
NAME_CHARACTERS_MAX: Final = 1000
_SPACES: Final = re.compile(r"[\s\u00a0\u202f]")
_JSON: Final = msgspec.json.Encoder(order="sorted")


@dataclass(slots=True)
class IntakeRow:
    """One row with a readable id; an invalid one has no hash and only keeps its item from being gone."""

    number: int
    line: int
    item: str
    fields: bytes = b"{}"
    photos: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """URL -> code of those links that may not be asked."""
    hash: bytes | None = None


@dataclass(slots=True)
class Chunk:
    """What one step of reading gave."""

    rows: list[IntakeRow] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    rows_count: int = 0
    is_last: bool = False
    truncated: str | None = None


def read_chunk(rows: Iterator[RawRow], policy: Policy) -> Chunk:
    """Read and validate the next rows. Raises: CatalogueBroken, CatalogueTooLarge."""
    chunk = Chunk()
    try:
        for raw in islice(rows, ROWS_OF_CHUNK):
            chunk.rows_count += 1
            row = _take(raw, policy, chunk.problems)
            if row is not None:
                chunk.rows.append(row)
    except Truncated as cut:
        chunk.truncated = cut.where
        chunk.is_last = True
    else:
        chunk.is_last = chunk.rows_count < ROWS_OF_CHUNK
    return chunk


def _take(raw: RawRow, policy: Policy, problems: list[RowProblem]) -> IntakeRow | None:
    """The row, invalid or not, or None where not even its id can be read."""
    values = dict(raw.values)
    item = values.pop("id", "")
    is_named = USER_ID.fullmatch(item) is not None
    name = item if is_named else None
    found: list[RowProblem] = []

    def add(field_name: str, code: str, text: str) -> None:
        found.append(
            RowProblem(
                row=raw.number, line=raw.line, item=name, field=field_name, code=code, text=text
            )
        )

    if raw.fault is not None:
        add(raw.fault.pointer, raw.fault.code, raw.fault.text)
    elif not is_named:
        code, what = ("missing", "is missing") if not item else ("invalid_id", f"is {item[:40]!r}")
        add("id", code, f"the id {what}: use 1 to 128 of the characters A-Z a-z 0-9 . _ : @ ~ -")
    else:
        for problem in _check_values(values, policy):
            add(*problem)
    if not is_named:
        problems.extend(found)
        return None
    row = IntakeRow(raw.number, raw.line, item)
    is_valid = not found
    if is_valid:
        for problem in _judge_photos(row, raw.photos, policy):
            add(*problem)
        row.fields = _JSON.encode(values)
        row.hash = hashlib.sha256(row.fields + b"\n" + _JSON.encode(row.photos)).digest()
    problems.extend(found)
    return row


def _check_values(values: dict[str, str], policy: Policy) -> Iterator[tuple[str, str, str]]:
    """(field, code, text) of each fault; the price is brought to the form `1990.50`."""
    name = values.get("name", "")
    if not name:
        yield "name", "missing", "the name is missing"
    elif len(name) > NAME_CHARACTERS_MAX:
        yield (
            "name",
            "too_long",
            f"the name has {len(name)} characters, at most {NAME_CHARACTERS_MAX} are taken",
        )
    if "price" in values:
        price = _parse_price(values["price"])
        if price is None:
            yield (
                "price",
                "invalid_number",
                f"the price {values['price'][:40]!r} is no number such as 1990.50",
            )
        else:
            values["price"] = price
    if "url" in values:
        try:
            judge_url(values["url"], policy)
        except UrlRefused as error:
            if error.reason not in ("forbidden_address", "port"):
                yield "url", f"url_{error.reason}", error.text
    if sum(len(key) + len(value) for key, value in values.items()) > FIELDS_BYTES_MAX:
        yield "row", "row_too_large", f"the row is over {FIELDS_BYTES_MAX} characters"
    if any("\x00" in value or not _is_text(value) for value in values.values()):
        yield "row", "invalid_text", "a field holds a NUL or half a letter"


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _parse_price(text: str) -> str | None:
    plain = _SPACES.sub("", text)
    if "," in plain and "." not in plain:
        plain = plain.replace(",", ".")
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?", plain):
        return None
    return plain if plain[0] != "0" else format(Decimal(plain), "f")


def _judge_photos(
    row: IntakeRow, photos: list[str], policy: Policy
) -> Iterator[tuple[str, str, str]]:
    """Give `row` its links in order, each once; yield what is wrong with any."""
    links = list(dict.fromkeys(photos))
    if len(links) > PHOTOS_OF_ITEM_MAX:
        yield (
            "photos",
            "too_many_photos",
            f"the item has {len(links)} photos, the first {PHOTOS_OF_ITEM_MAX} are taken",
        )
        links = links[:PHOTOS_OF_ITEM_MAX]
    for index, link in enumerate(links):
        try:
            judge_url(link, policy)
        except UrlRefused as error:
            yield f"photos[{index}]", error.reason, error.text
            if not link.isprintable() or len(link.encode()) > URL_CHARACTERS_MAX:
                continue
            row.refused[link] = error.reason
        row.photos.append(link)
