"""A file's rows on their way to be compared: those equal to last time's are not judged again.

    row --hash of it as read--> its item was made of an equal row: staged without content
                           \\--> else judged in a thread: staged whole, or as invalid

Judging a row (its links, its schema) costs several times reading it, and most rows of a catalogue are the
ones of yesterday. An item remembers the hash of its row as it was read, together with everything that
judging depends on, unless anything was at fault in it. A chunk is read ahead while the one before is
compared and staged, so PostgreSQL and the reader work side by side.
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
from headrace.fetch.intake import ROWS_OF_CHUNK, Chunk, IntakeRow, Rules, read_chunk
from headrace.fetch.item_ids import find_item_id
from headrace.fetch.model import PROBLEMS_KEPT_MAX, RowProblem
from headrace.fetch.readers import RawRow, Truncated
from headrace.fetch.store.sql import SQL
from headrace.kernel.resilience import crash_point

ROWS_AT_ONCE: Final = 4000
BYTES_AT_ONCE: Final = 8 * 2**20
"""A chunk ends there too: rows may be of 256 KiB each."""
_JSON: Final = msgspec.json.Encoder()


@dataclass(slots=True)
class Reading:
    """What a run has read so far."""

    rows: int = 0
    invalid: int = 0
    problems: int = 0
    judged: int = 0
    """Rows that were not equal to last time's."""
    unreadable: int = 0
    """Rows whose id cannot be read: they keep no item from being gone."""
    truncated: str | None = None
    fault: FileFault | None = None
    """Where the file ends too early."""
    last_line: int = 0
    has_line_break: bool | None = None
    """Whether a line break ends the last row; None: the file is no text table."""


@dataclass(slots=True)
class RawChunk:
    """Rows as they were read, each with its hash; None for one that no item can have been made of."""

    rows: list[RawRow] = field(default_factory=list)
    items: list[str | None] = field(default_factory=list)
    """The id of each row; None where it has no valid one."""
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
            # The first row of an id counts: a later one must not be taken for it.
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
    """The row as bytes that are equal for equal rows; empty where it holds half a letter."""
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
            # The file is closed after this; the thread must not be in it.
            await asyncio.wait({ahead})
            # What was read ahead of a chunk that could not be stored may be at fault, too; the first fault is raised.
            if not ahead.cancelled():
                ahead.exception()

    async def _stage(self, raw: RawChunk) -> None:
        """Stage one chunk; the same transaction notes how far reading is."""
        reading = self.reading
        async with self._postgres.transaction() as tx:
            await tx.one(SQL.commit_lazily)
            rest = await self._others(tx, raw)
            hashes = {row.number: hashed for row, hashed in rest}
            rows = [row for row, _ in rest]
            for start in range(0, len(rest), ROWS_OF_CHUNK):
                piece = iter(rows[start : start + ROWS_OF_CHUNK])
                await self.stage_judged(
                    tx, await asyncio.to_thread(read_chunk, piece, self._rules), hashes
                )
            reading.judged += len(rest)
            if raw.rows:
                reading.last_line = raw.rows[-1].line
                reading.has_line_break = raw.rows[-1].has_line_break
            if raw.truncated is not None:
                reading.truncated, reading.fault = raw.truncated.where, raw.truncated.fault
            await self.note(tx, rows=len(raw.rows))
        crash_point("fetch.rows_staged")

    async def note(self, tx: Tx, *, rows: int) -> None:
        """Note that so many more rows were read."""
        self.reading.rows += rows
        await store.runs.note_reading(
            tx,
            self._run_id,
            rows=self.reading.rows,
            invalid=self.reading.invalid,
            problems=self.reading.problems,
        )

    async def _others(self, tx: Tx, raw: RawChunk) -> list[tuple[RawRow, bytes | None]]:
        """Stage the rows that are equal to last time's; the others, with their hashes."""
        asked = [index for index, hashed in enumerate(raw.hashes) if hashed is not None]
        others = await store.runs.stage_same(
            tx,
            self._run_id,
            self._customer,
            items=[item for index in asked if (item := raw.items[index]) is not None],
            raw_hashes=[raw.hashes[index] for index in asked],
        )
        left = [index for index, hashed in enumerate(raw.hashes) if hashed is None]
        left += [asked[position - 1] for position in others]
        return [(raw.rows[index], raw.hashes[index]) for index in sorted(left)]

    async def stage_judged(
        self, tx: Tx, chunk: Chunk, hashes: dict[int, bytes | None] | None = None
    ) -> None:
        """Stage judged rows; those of a double id are told. `hashes`: of rows as read, by number."""
        reading = self.reading
        faulty = {problem.row for problem in chunk.problems}
        raw_hashes = [
            None if row.number in faulty or hashes is None else hashes.get(row.number)
            for row in chunk.rows
        ]
        doubled = []
        if chunk.rows:
            doubled = await store.runs.stage(tx, self._run_id, chunk.rows, raw_hashes=raw_hashes)
        reading.unreadable += chunk.rows_count - len(chunk.rows)
        valid = sum(row.hash is not None for row in chunk.rows)
        valid -= sum(row.hash is not None for row in doubled)
        reading.invalid += chunk.rows_count - valid
        problems = chunk.problems + [_doubled(row) for row in doubled]
        room = max(0, PROBLEMS_KEPT_MAX - reading.problems)
        reading.problems += len(problems)
        if problems[:room]:
            ordered = sorted(problems[:room], key=lambda problem: problem.row)
            await store.problems.insert_problems(tx, self._run_id, ordered)


def _doubled(row: IntakeRow) -> RowProblem:
    return RowProblem(
        row=row.number,
        line=row.line,
        item=row.item,
        field="id",
        code="duplicate_id",
        values={"value": row.item},
    )
