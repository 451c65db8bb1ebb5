"""Stage the rows of a file for comparison; rows equal to the last run are not validated again.

    row --hash of the raw row--> equal to the row of its item: staged without content
                            \\--> otherwise validated in a thread: staged whole, or as invalid

Validating a row costs several times as much as reading it, and most rows of a catalogue did not
change. An item without faults stores a hash of its raw row and of all validation rules. The next
chunk is read while the current one is staged, so that the reader and PostgreSQL work in parallel.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.errors import FileFault
from headrace.fetch.model import PROBLEMS_KEPT_MAX, RowProblem
from headrace.fetch.readers import RawRow, Truncated
from headrace.fetch.sql import SQL
from headrace.fetch.validation import (
    ROWS_OF_CHUNK,
    Chunk,
    Rules,
    ValidatedRow,
    find_item_id,
    read_chunk,
)
from headrace.kernel.resilience import crash_point

ROWS_AT_ONCE: Final = 4000
BYTES_AT_ONCE: Final = 8 * 2**20
"""A chunk also ends at this size, since one row may have 256 KiB."""
_JSON: Final = msgspec.json.Encoder()


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
        return _JSON.encode((raw.values, raw.photos))
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
        problems = chunk.problems + [_duplicate_id(row) for row in duplicates]
        room = max(0, PROBLEMS_KEPT_MAX - reading.problems)
        reading.problems += len(problems)
        if problems[:room]:
            ordered = sorted(problems[:room], key=lambda problem: problem.row)
            await store.runs.insert_problems(tx, self._run_id, ordered)


def _duplicate_id(row: ValidatedRow) -> RowProblem:
    return RowProblem(
        row=row.number,
        line=row.line,
        item=row.item,
        field="id",
        code="duplicate_id",
        values={"value": row.item},
    )
