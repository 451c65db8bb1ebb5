"""Validate the rows of a catalogue and stage them for comparison.

Rows are validated in a thread, one chunk at a time, so that a large file neither fills memory nor
blocks the event loop. A row is valid, or it has a problem with a reason. An
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

Rows equal to the last run are not validated again:

    row --hash of the raw row--> equal to the row of its item: staged without content
                            `--> otherwise validated in a thread: staged whole, or as invalid

Validating a row costs several times as much as reading it, and most rows of a catalogue did not
change. An item without faults stores a hash of its raw row and of all validation rules. The next
chunk is read while the current one is staged, so that the reader and PostgreSQL work in parallel.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.errors import FileFault
from headrace.fetch.field_types import split_currency
from headrace.fetch.guard import Policy, refusal_reason
from headrace.fetch.model import (
    COLUMNS_MAX,
    FIELD_BYTES_MAX,
    FIELDS_BYTES_MAX,
    PHOTOS_OF_ITEM_MAX,
    PROBLEMS_KEPT_MAX,
    URL_CHARACTERS_MAX,
    RowProblem,
    ValidatedRow,
)
from headrace.fetch.readers import Fault, RawRow, Truncated, Value
from headrace.fetch.schemas import Schema, Schemas
from headrace.fetch.sql import SQL
from headrace.kernel.resilience import crash_point

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


ROWS_AT_ONCE: Final = 4000
BYTES_AT_ONCE: Final = 8 * 2**20
"""A chunk also ends at this size, since one row may have 256 KiB."""
_RAW_JSON: Final = msgspec.json.Encoder()


@dataclass(slots=True)
class Reading:
    """What a run has read so far, and how the file ended."""

    rows: int = 0
    invalid: int = 0
    problems: int = 0
    validated: int = 0
    """Rows that differ from the last run."""
    unreadable: int = 0
    """Rows without a valid id; the items they describe count as removed."""
    truncated: str | None = None
    """Where the file ends too early, as an English sentence."""
    fault: FileFault | None = None
    """The same as a fault, for other languages."""
    last_line: int = 0
    has_line_break: bool | None = None
    """Whether a line break ends the last row; None unless the file is a text table."""


@dataclass(slots=True)
class RawChunk:
    """Rows as read, each with its hash; None if no stored item can be equal to the row."""

    rows: list[RawRow] = field(default_factory=list)
    items: list[str | None] = field(default_factory=list)
    """The id of each row; None if it is invalid."""
    hashes: list[bytes | None] = field(default_factory=list)
    is_last: bool = False
    truncated: Truncated | None = None


def read_raw(rows: Iterator[RawRow], rules: bytes) -> RawChunk:
    """Read the next rows. Raises: CatalogueBroken, CatalogueTooLarge."""
    chunk = RawChunk()
    seen: set[str] = set()
    size_bytes = 0
    try:
        for raw in islice(rows, ROWS_AT_ONCE):
            item = find_item_id(raw.item)
            encoded = _encoded(raw)
            is_fit = raw.fault is None and item is not None and item not in seen
            hashed = hashlib.blake2b(rules + encoded, digest_size=16).digest() if is_fit else None
            chunk.rows.append(raw)
            chunk.items.append(item)
            chunk.hashes.append(hashed if encoded else None)
            # The first row of an id is used: a later row must not match the stored item.
            if item is not None:
                seen.add(item)
            size_bytes += len(encoded)
            if size_bytes > BYTES_AT_ONCE:
                return chunk
    except Truncated as cut:
        chunk.truncated = cut
        chunk.is_last = True
    else:
        chunk.is_last = len(chunk.rows) < ROWS_AT_ONCE
    return chunk


def _encoded(raw: RawRow) -> bytes:
    """The row as bytes, equal for equal rows; empty if it has an incomplete character."""
    try:
        return _RAW_JSON.encode((raw.values, raw.photos))
    except UnicodeEncodeError:
        return b""


class Staging:
    """Stages the rows of one run."""

    def __init__(self, postgres: Postgres, run_id: int, customer: str, rules: Rules) -> None:
        self._postgres = postgres
        self._run_id = run_id
        self._customer = customer
        self._rules = rules
        self.reading = Reading()

    async def read(self, rows: Iterator[RawRow]) -> Reading:
        """Read `rows` to their end. Raises: CatalogueBroken, CatalogueTooLarge."""
        digest = self._rules.digest
        ahead = asyncio.create_task(asyncio.to_thread(read_raw, rows, digest))
        try:
            while True:
                chunk = await ahead
                if not chunk.is_last:
                    ahead = asyncio.create_task(asyncio.to_thread(read_raw, rows, digest))
                await self._stage(chunk)
                if chunk.is_last:
                    return self.reading
        finally:
            # The caller closes the file next: wait until the thread has left it.
            await asyncio.wait({ahead})
            # Retrieve an error of the chunk read ahead, so that only the first error is raised.
            if not ahead.cancelled():
                ahead.exception()

    async def _stage(self, raw: RawChunk) -> None:
        """Stage one chunk and store the progress, in one transaction."""
        reading = self.reading
        async with self._postgres.transaction() as tx:
            await tx.one(SQL.commit_lazily)
            rest = await self._stage_equal(tx, raw)
            hashes = {row.number: hashed for row, hashed in rest}
            rows = [row for row, _ in rest]
            for start in range(0, len(rest), ROWS_OF_CHUNK):
                piece = iter(rows[start : start + ROWS_OF_CHUNK])
                await self.stage_validated(
                    tx, await asyncio.to_thread(read_chunk, piece, self._rules), hashes
                )
            reading.validated += len(rest)
            if raw.rows:
                reading.last_line = raw.rows[-1].line
                reading.has_line_break = raw.rows[-1].has_line_break
            if raw.truncated is not None:
                reading.truncated, reading.fault = raw.truncated.where, raw.truncated.fault
            await self.note(tx, rows=len(raw.rows))
        crash_point("fetch.rows_staged")

    async def note(self, tx: Tx, *, rows: int) -> None:
        """Store that `rows` more rows were read."""
        self.reading.rows += rows
        await store.runs.note_reading(
            tx,
            self._run_id,
            rows=self.reading.rows,
            invalid=self.reading.invalid,
            problems=self.reading.problems,
        )

    async def _stage_equal(self, tx: Tx, raw: RawChunk) -> list[tuple[RawRow, bytes | None]]:
        """Stage the rows equal to stored items; return the others with their hashes."""
        hashed = [index for index, value in enumerate(raw.hashes) if value is not None]
        differing = await store.runs.stage_same(
            tx,
            self._run_id,
            self._customer,
            items=[item for index in hashed if (item := raw.items[index]) is not None],
            raw_hashes=[raw.hashes[index] for index in hashed],
        )
        rest = [index for index, value in enumerate(raw.hashes) if value is None]
        rest += [hashed[position - 1] for position in differing]
        return [(raw.rows[index], raw.hashes[index]) for index in sorted(rest)]

    async def stage_validated(
        self, tx: Tx, chunk: Chunk, hashes: dict[int, bytes | None] | None = None
    ) -> None:
        """Stage validated rows and store their problems, duplicate ids included.

        `hashes` has the hashes of the raw rows by row number.
        """
        reading = self.reading
        faulty = {problem.row for problem in chunk.problems}
        raw_hashes = [
            None if row.number in faulty or hashes is None else hashes.get(row.number)
            for row in chunk.rows
        ]
        duplicates = []
        if chunk.rows:
            duplicates = await store.runs.stage(tx, self._run_id, chunk.rows, raw_hashes=raw_hashes)
        reading.unreadable += chunk.rows_count - len(chunk.rows)
        valid = sum(row.hash is not None for row in chunk.rows)
        valid -= sum(row.hash is not None for row in duplicates)
        reading.invalid += chunk.rows_count - valid
        problems = chunk.problems + [id_problem(row, "duplicate_id") for row in duplicates]
        room = max(0, PROBLEMS_KEPT_MAX - reading.problems)
        reading.problems += len(problems)
        if problems[:room]:
            ordered = sorted(problems[:room], key=lambda problem: problem.row)
            await store.runs.insert_problems(tx, self._run_id, ordered)


def id_problem(row: ValidatedRow, code: str) -> RowProblem:
    """A problem with the id of a row."""
    return RowProblem(
        row=row.number,
        line=row.line,
        item=row.item,
        field="id",
        code=code,
        values={"value": row.item},
    )
