"""The truth of a feed copied into PostgreSQL, millions of rows in a minute.

Columns of numpy are what COPY takes, except the lengths in between, so rows are made without a
loop.

The one index that they would fill at random is made after them, and the tables are vacuumed as
autovacuum would have done by the time that so much is there.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import numpy as np

HEAD = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
TAIL = struct.pack(">h", -1)
ROWS_PER_CHUNK = 100_000
EPOCH_US = 946_684_800_000_000
"""PostgreSQL counts microseconds from the year 2000 on."""
AUTHOR_INDEX = "feed_post_author"
Column = tuple[str, Any]
"""A type of numpy, big-endian, and the values, or the one value of all rows."""


async def copy_posts(url: str, ids: Any, authors: Any, scores: Any) -> None:
    """Shown posts, and the versions of their authors."""
    connection = await asyncpg.connect(url)
    try:
        definition = await connection.fetchval(
            "SELECT indexdef FROM pg_indexes WHERE indexname = $1", AUTHOR_INDEX
        )
        await connection.execute(f"DROP INDEX headrace.{AUTHOR_INDEX}")
        columns: dict[str, Column] = {
            "id": (ids.dtype.str, ids),
            "author": (">i8", authors),
            "score": (">i8", scores),
            "state": (">i2", 0),
            "visible_at": (">i8", scores // 2048 * 1000 - EPOCH_US),
        }
        await _copy(connection, "feed_post", columns, len(ids))
        await connection.execute(definition)
        await _copy_versions(connection, 1, np.unique(authors))
        await _settle(connection)
    finally:
        await connection.close()


async def copy_follows(url: str, viewers: Any, authors: Any) -> None:
    """Follows, and the versions of the viewers."""
    connection = await asyncpg.connect(url)
    try:
        columns: dict[str, Column] = {
            "viewer": (">i8", viewers),
            "author": (">i8", authors),
            "followed_at": (">i8", 0),
            "is_shown": (">i1", 1),
        }
        await _copy(connection, "feed_follow", columns, len(viewers))
        await _copy_versions(connection, 0, np.unique(viewers))
        await _settle(connection)
    finally:
        await connection.close()


async def _copy_versions(connection: Any, kind: int, entities: Any) -> None:
    columns: dict[str, Column] = {
        "kind": (">i2", kind),
        "entity": (">i8", entities),
        "version": (">i8", 1),
    }
    await _copy(connection, "feed_version", columns, len(entities))


async def _settle(connection: Any) -> None:
    for name in ("feed_post", "feed_follow", "feed_version"):
        await connection.execute(f"VACUUM (ANALYZE) headrace.{name}")


async def _copy(connection: Any, name: str, columns: dict[str, Column], count: int) -> None:
    await connection.copy_to_table(
        name,
        schema_name="headrace",
        columns=list(columns),
        format="binary",
        source=_rows(columns, count),
    )


async def _rows(columns: dict[str, Column], count: int) -> AsyncIterator[bytes]:
    """The rows as COPY's binary format has them: how many fields, then each with its length."""
    kinds: list[tuple[str, str]] = [("fields", ">i2")]
    for name, (kind, _) in columns.items():
        kinds += [(f"{name} length", ">i4"), (name, kind)]
    yield HEAD
    for start in range(0, count, ROWS_PER_CHUNK):
        rows = np.empty(min(ROWS_PER_CHUNK, count - start), dtype=kinds)
        rows["fields"] = len(columns)
        for name, (kind, values) in columns.items():
            rows[f"{name} length"] = np.dtype(kind).itemsize
            rows[name] = values if np.ndim(values) == 0 else values[start : start + len(rows)]
        yield rows.tobytes()
    yield TAIL
