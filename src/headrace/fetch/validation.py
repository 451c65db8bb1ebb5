"""Validate the rows of a catalogue: ids, limits, fields, photo links, one hash per row.

This is pure code that runs in a thread, one chunk of rows at a time, so that a large file neither
fills memory nor blocks the event loop. A row is valid, or it has a problem with a reason. An
invalid photo link does not invalidate its row: the link is refused, keeps its position in the item,
and is never requested.

**Item ids** are any text of 1 to 200 characters that is visible and unambiguous. One rule applies
to catalogues, the API and every lookup, so an accepted id is always found by the same text:

- White space around the id is removed, and the text is normalized to Unicode form NFC.
- Control characters, line and paragraph separators and lone surrogates are refused.
- Invisible characters (zero-width spaces, byte order marks, soft hyphens, direction marks) are
  refused, so that two ids never look alike. U+200C and U+200D are accepted, since words and emoji
  need them.

Ids are case-sensitive. `.` and `..` are valid, since no URL has an id in its path.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from headrace.fetch.field_types import split_currency
from headrace.fetch.guard import Policy, refusal_reason
from headrace.fetch.model import (
    COLUMNS_MAX,
    FIELD_BYTES_MAX,
    FIELDS_BYTES_MAX,
    PHOTOS_OF_ITEM_MAX,
    URL_CHARACTERS_MAX,
    RowProblem,
)
from headrace.fetch.readers import Fault, RawRow, Truncated, Value
from headrace.fetch.schemas import Schema, Schemas

ITEM_ID_CHARACTERS_MAX: Final = 200
_PLAIN: Final = re.compile(r"[!-~](?:[ -~]{0,198}[!-~])?")
"""ASCII ids, which need no normalization: nearly every id."""
_REFUSED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS: Final = "\u200c\u200d"


def find_item_id(text: str) -> str | None:
    """The id in stored form, or None if `text` is not a valid id."""
    if _PLAIN.fullmatch(text):
        return text
    if len(text) > 2 * ITEM_ID_CHARACTERS_MAX:
        return None
    found = unicodedata.normalize("NFC", text.strip())
    if not 1 <= len(found) <= ITEM_ID_CHARACTERS_MAX:
        return None
    is_fit = all(c in _JOINERS or unicodedata.category(c) not in _REFUSED for c in found)
    return found if is_fit else None


ROWS_OF_CHUNK: Final = 1000
FIELD_NAME_CHARACTERS_MAX: Final = 200
RULES_VERSION: Final = b"3"
"""Increase it if the same row would get another result than before."""
_SHOWN_CHARACTERS_MAX: Final = 200
_PRICE_CHARACTERS_MAX: Final = 64
_HALVES: Final = re.compile("[\ud800-\udfff]")
_JSON: Final = msgspec.json.Encoder(order="sorted")


class Rules:
    """All rules of validation; an equal `digest` means equal results for equal rows."""

    def __init__(self, policy: Policy, schemas: Mapping[str, Schema] | None = None) -> None:
        self.policy = policy
        self.schemas = Schemas(schemas or {}, policy)
        allowed = f"{sorted(map(str, policy.networks))}{sorted(policy.ports)}".encode()
        parts = RULES_VERSION, allowed, self.schemas.digest
        self.digest = hashlib.sha256(b"\n".join(parts)).digest()


@dataclass(slots=True)
class ValidatedRow:
    """One row with a valid id; an invalid row has no hash, but keeps its item from removal."""

    number: int
    line: int
    item: str
    fields: bytes = b"{}"
    photos: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Code of the refusal by URL, for photo links that are not allowed."""
    hash: bytes | None = None


@dataclass(slots=True)
class Chunk:
    """The validated rows and the problems of one step."""

    rows: list[ValidatedRow] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    rows_count: int = 0
    is_last: bool = False
    truncated: str | None = None


def read_chunk(rows: Iterator[RawRow], rules: Rules) -> Chunk:
    """Read and validate the next rows. Raises: CatalogueBroken, CatalogueTooLarge."""
    chunk = Chunk()
    try:
        for raw in islice(rows, ROWS_OF_CHUNK):
            chunk.rows_count += 1
            row, faults = validate_row(raw, rules)
            if row is not None:
                chunk.rows.append(row)
            item = row.item if row is not None else None
            chunk.problems.extend(problem_of(raw, item, fault) for fault in faults)
    except Truncated as cut:
        chunk.truncated = cut.where
        chunk.is_last = True
    else:
        chunk.is_last = chunk.rows_count < ROWS_OF_CHUNK
    return chunk


def validate_row(raw: RawRow, rules: Rules) -> tuple[ValidatedRow | None, list[Fault]]:
    """Validate one row; return it with its faults, None for a row without a valid id."""
    values = dict(raw.values)
    item = find_item_id(raw.item)
    values.pop("id", None)
    row = None if item is None else ValidatedRow(raw.number, raw.line, item)
    if raw.fault is not None:
        return row, [raw.fault]
    if row is None:
        return None, [
            Fault("id", "invalid_id", {"value": raw.item})
            if raw.item.strip()
            else Fault("id", "missing")
        ]
    faults = _check_bounds(values)
    if not faults:
        _split_price(values)
        faults = rules.schemas.validate(values, raw.photos)
    if not faults:
        faults = validate_photos(row, raw.photos, rules.policy)
        set_content(row, _JSON.encode(values))
    return row, faults


def set_content(row: ValidatedRow, fields: bytes) -> None:
    """Set the fields of a valid row, as JSON with sorted names, and its content hash."""
    row.fields = fields
    row.hash = hashlib.sha256(fields + b"\n" + _JSON.encode(row.photos)).digest()


def problem_of(raw: RawRow, item: str | None, fault: Fault) -> RowProblem:
    """A fault with its position; values from the file are shortened and made printable."""
    return RowProblem(
        row=raw.number,
        line=raw.line,
        item=item,
        field=_printable(fault.field),
        code=fault.code,
        values={
            name: _printable(value) if isinstance(value, str) else value
            for name, value in fault.values.items()
        },
    )


def _printable(text: str) -> str:
    shown = text[:_SHOWN_CHARACTERS_MAX]
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def _check_bounds(values: dict[str, Value]) -> list[Fault]:
    """The faults of a row that exceeds a general limit, whatever its schema."""
    if len(values) > COLUMNS_MAX:
        return [Fault("row", "too_many_fields", {"most": COLUMNS_MAX})]
    characters = 0
    for name, value in values.items():
        text = value if isinstance(value, str) else "\n".join(value)
        characters += len(name) + len(text)
        if len(text) > FIELD_BYTES_MAX:
            return [Fault(name, "field_too_large", {"most": FIELD_BYTES_MAX})]
        if len(name) > FIELD_NAME_CHARACTERS_MAX:
            return [Fault(name, "field_name", {"most": FIELD_NAME_CHARACTERS_MAX})]
        if not (_is_text(name) and _is_text(text)):
            return [Fault(name, "invalid_text")]
    if characters > FIELDS_BYTES_MAX:
        return [Fault("row", "row_too_large", {"most": FIELDS_BYTES_MAX})]
    return []


def _is_text(value: str) -> bool:
    return "\x00" not in value and (value.isascii() or not _HALVES.search(value))


def _split_price(values: dict[str, Value]) -> None:
    """Move a currency in the price to the field `currency`."""
    price = values.get("price")
    if isinstance(price, str) and not price.isdigit() and len(price) <= _PRICE_CHARACTERS_MAX:
        values["price"], currency = split_currency(price)
        if currency is not None:
            values.setdefault("currency", currency)


def validate_photos(row: ValidatedRow, photos: list[str], policy: Policy) -> list[Fault]:
    """Set the photo links of `row`, without duplicates; return their faults."""
    faults: list[Fault] = []
    links = list(dict.fromkeys(photos))
    if len(links) > PHOTOS_OF_ITEM_MAX:
        counts: dict[str, str | int] = {"count": len(links), "most": PHOTOS_OF_ITEM_MAX}
        faults.append(Fault("photos", "too_many_photos", counts))
        links = links[:PHOTOS_OF_ITEM_MAX]
    for index, link in enumerate(links):
        reason = refusal_reason(link, policy) if _is_text(link) else "syntax"
        if reason is not None:
            faults.append(Fault(f"photos[{index}]", reason, {"value": link}))
            if not link.isprintable() or len(link.encode()) > URL_CHARACTERS_MAX:
                continue
            row.refused[link] = reason
        row.photos.append(link)
    return faults
