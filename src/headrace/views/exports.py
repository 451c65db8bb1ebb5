"""Exports for analysts: series of all items, and the feed of changes, as JSON, CSV or Parquet.

**Changes.** Every flush, move and deletion records what it changed in its own transaction, under a
number of its shard. The number is assigned under the lock of the shard's row, which is held until
the commit. So numbers have no gap, a visible number means that all before it are visible, and
commits of other shards may come in any order. A position holds the last number that was read of
each shard and the time of its change. A reader that stores its position together with the rows
sees every change once, whatever is killed. If the change at a position is missing or another one,
changes were lost to the reader (it was too slow, or PostgreSQL lost commits), and the read fails.

Changes are read from the primary, because a standby may be behind a position.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final
from zoneinfo import ZoneInfo

from headrace.engines.durable_files import rename_durably, write_durably
from headrace.engines.postgres import Postgres
from headrace.kernel.errors import ExtraMissing, describe_value
from headrace.kernel.resilience import crash_point
from headrace.views import store
from headrace.views.analytics import span_of
from headrace.views.errors import ChangesOff, InvalidPosition, InvalidSpan, PositionLost
from headrace.views.model import ChangePage, ExportPage, ExportRow, require_ids

FORMATS: Final = {
    "json": "application/json",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
"""Content type of each format."""
ROWS_MAX: Final = 20_000
"""Changes after which a page ends; it contains whole flushes, so up to twice as many."""
IDS_MAX: Final = 1_000
FIRST: Final = (-1, 0)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PART: Final = re.compile(r"([0-9a-f]{1,15})-([0-9a-f]{1,15})")
COLUMNS: Final = ("id", "start_at", "class", "views")


class Exports:
    """Pages of series and changes; a caller reads them one after another."""

    def __init__(self, postgres: Postgres, *, shards: int, time_zone: str) -> None:
        self._postgres = postgres
        self._shards = shards
        self._zone = ZoneInfo(time_zone)

    async def series(
        self,
        by: str = "day",
        *,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
        after: str = "",
        ids_max: int = 100,
    ) -> ExportPage:
        """Views of the `ids_max` items after id `after`, by hour, day or month.

        Pass the page's `after` to read the next one; it is None on the last page. Pages are read
        one by one, so export spans that have ended. Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        span = span_of(by, from_at, to_at, zone=self._zone)
        if after:
            require_ids([after])
        if not isinstance(ids_max, int) or not 1 <= ids_max <= IDS_MAX:
            raise InvalidSpan(f"export of {describe_value(ids_max)}: expected 1 to {IDS_MAX} items")
        found, ids = await store.export(self._postgres.reads, span, after=after, ids_max=ids_max)
        return ExportPage(rows=found, after=ids[-1] if len(ids) == ids_max else None)

    async def changes(self, after: str = "", *, rows_max: int = ROWS_MAX) -> ChangePage:
        """Changes after a position, oldest first per shard; empty: all were read.

        Without a position the page begins with the oldest change kept. `after="now"` returns the
        current position. Raises: ChangesOff, InvalidPosition, PositionLost, InvalidSpan,
        PostgresDown.
        """
        if not isinstance(rows_max, int) or not 1 <= rows_max <= ROWS_MAX:
            raise InvalidSpan(f"{describe_value(rows_max)} changes: expected 1 to {ROWS_MAX}")
        if after == "now":
            return ChangePage(changes=[], position=_text_of(await self._newest()))
        known = _position_of(after, self._shards) if after else [FIRST] * self._shards
        numbers = [number for number, _ in known]
        batches = await store.changes(self._postgres, numbers, rows_max=rows_max)
        if not batches:
            raise ChangesOff
        reached, found, seen = list(known), list[ExportRow](), set[int]()
        for batch in batches:
            place = _place_of(batch)
            if batch.is_known and place == known[batch.shard]:
                seen.add(batch.shard)
                continue
            expected = {reached[batch.shard][0] + 1}
            if not after and reached[batch.shard] == FIRST:
                expected = {batch.number}
            if batch.is_known or batch.number not in expected:
                raise PositionLost
            found += batch.rows
            reached[batch.shard] = place
        if after and len(seen) < self._shards:
            raise PositionLost
        return ChangePage(changes=found, position=_text_of(reached))

    async def _newest(self) -> list[tuple[int, int]]:
        batches = await store.newest_changes(self._postgres)
        if not batches:
            raise ChangesOff
        return [_place_of(batch) for batch in batches]


class RowWriter:
    """Write pages of rows to an open file as CSV with a head, or as Parquet.

    Raises: ExtraMissing if Parquet's library is not installed.
    """

    def __init__(self, file: BinaryIO, form: str) -> None:
        self._file = file
        self._parquet: Any = None
        if form == "csv":
            file.write((",".join(COLUMNS) + "\n").encode())
            return
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError as error:
            need = "the export as Parquet needs pyarrow, which is not installed"
            raise ExtraMissing("parquet", need=need) from error
        kinds = (pa.string(), pa.timestamp("us", tz="UTC"), pa.string(), pa.int64())
        self._schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)))
        self._record_batch = pa.record_batch
        self._parquet = parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, rows: Sequence[ExportRow]) -> None:
        """Append a page."""
        if self._parquet is not None:
            columns = [[getattr(row, name) for row in rows] for name in ExportRow.__struct_fields__]
            self._parquet.write_batch(self._record_batch(columns, schema=self._schema))
            return
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            (row.id, row.start_at.isoformat(), row.traffic, row.views) for row in rows
        )
        self._file.write(text.getvalue().encode())

    def close(self) -> None:
        """Write the end of the file, which stays open."""
        if self._parquet is not None:
            self._parquet.close()


def encoded(rows: Sequence[ExportRow], form: str) -> bytes:
    """One page as a file. Raises: ExtraMissing."""
    file = io.BytesIO()
    writer = RowWriter(file, form)
    writer.write(rows)
    writer.close()
    return file.getvalue()


@contextmanager
def whole_file(path: Path, form: str) -> Iterator[RowWriter]:
    """A file that is complete and synced under its name, or absent."""
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        writer = RowWriter(file, form)
        yield writer
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    rename_durably(path.parent, draft.name, path.name)


async def follow(exports: Exports, folder: Path, form: str) -> tuple[int, str]:
    """Write all changes since the last call to numbered files. Return their rows and the position.

    The position is stored after the file of its page, and an interrupted page gets the same name
    again. So the files contain every change once, whatever is killed.
    """
    number, position = _stored_position(folder)
    count = 0
    while (page := await exports.changes(position)).position != position:
        if page.changes:
            number += 1
            write_durably(folder, f"{number:09}.{form}", encoded(page.changes, form))
            count += len(page.changes)
            crash_point("views.followed")
        position = page.position
        write_durably(folder, "position", f"{number} {position}\n".encode())
    return count, position


def _stored_position(folder: Path) -> tuple[int, str]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        text = (folder / "position").read_text()
    except FileNotFoundError:
        return 0, ""
    found = re.fullmatch(r"([0-9]{1,15}) (\S+)\n", text)
    if found is None:
        raise InvalidPosition(text)
    return int(found[1]), found[2]


def _place_of(batch: store.ChangeBatch) -> tuple[int, int]:
    return batch.number, (batch.at - _EPOCH) // timedelta(microseconds=1)


def _position_of(text: Any, shards: int) -> list[tuple[int, int]]:
    parts = text.split(".") if isinstance(text, str) else []
    found = [_PART.fullmatch(part) for part in parts]
    if len(found) != shards or not all(found):
        raise InvalidPosition(text)
    return [(int(part[1], 16), int(part[2], 16)) for part in found if part]


def _text_of(position: Sequence[tuple[int, int]]) -> str:
    return ".".join(f"{number:x}-{at_us:x}" for number, at_us in position)
