"""The site's own table of adverts: what its pages are made of.

A site has its own database; this one is SQLite in a file, to stay small. Items arrive at least
once and in order, each with a version, so writing is idempotent: a version that is not newer
has no effect. The `happening` table records what was done to the adverts, for the demo's check of
it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODERATED: Final = "bazaar.photos"
"""The queue of new photos, which visitors decide."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS advert (
  shop TEXT, item TEXT, version INTEGER NOT NULL, is_shown INTEGER NOT NULL, title TEXT NOT NULL,
  price TEXT NOT NULL, photos TEXT NOT NULL, PRIMARY KEY (shop, item));
CREATE TABLE IF NOT EXISTS happening (
  id INTEGER PRIMARY KEY, action TEXT NOT NULL, shop TEXT NOT NULL, item TEXT NOT NULL,
  version INTEGER NOT NULL, UNIQUE (shop, item, version));
CREATE TABLE IF NOT EXISTS opened (one INTEGER PRIMARY KEY CHECK (one = 1), n INTEGER NOT NULL);
INSERT OR IGNORE INTO opened VALUES (1, 0);
CREATE TABLE IF NOT EXISTS verdict (
  shop TEXT, item TEXT, verdict TEXT NOT NULL, PRIMARY KEY (shop, item));
"""
_SHOW: Final = """
INSERT INTO advert (shop, item, version, is_shown, title, price, photos)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (shop, item) DO UPDATE SET version = excluded.version, is_shown = excluded.is_shown,
  title = excluded.title, price = excluded.price, photos = excluded.photos
WHERE excluded.version > advert.version
"""
_HIDE: Final = (
    "UPDATE advert SET is_shown = 0, version = ? WHERE shop = ? AND item = ? AND version < ?"
)
_NOTE: Final = "INSERT OR IGNORE INTO happening (action, shop, item, version) VALUES (?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Photo:
    """One photo of an advert; `key` is empty while there is no good copy."""

    url: str
    key: str
    sha256: str
    outcome: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Advert:
    """One advert as the site shows it."""

    shop: str
    item: str
    version: int
    title: str
    price: str
    photos: tuple[Photo, ...]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that was done to an advert."""

    id: int
    action: str
    shop: str
    item: str


class Adverts:
    """The table, in `file`. Each call opens it, so that processes and threads share no state."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def create(self) -> None:
        """Make the tables where they are missing."""
        with self._connection() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)

    def show(self, advert: Advert, *, action: str) -> None:
        """Insert or update the advert; an older version has no effect."""
        photos = json.dumps(
            [[p.url, p.key, p.sha256, p.outcome, p.size_bytes] for p in advert.photos]
        )
        row = (advert.shop, advert.item, advert.version, 1, advert.title, advert.price, photos)
        with self._connection() as connection:
            connection.execute(_SHOW, row)
            connection.execute(_NOTE, (action, advert.shop, advert.item, advert.version))

    def hide(self, shop: str, item: str, *, version: int) -> None:
        """Take the advert off the site."""
        with self._connection() as connection:
            connection.execute(_HIDE, (version, shop, item, version))
            connection.execute(_NOTE, ("unpublish", shop, item, version))

    def shown(self, shop: str | None = None) -> list[Advert]:
        """The adverts on the site, of one shop or of all."""
        query = (
            "SELECT shop, item, version, title, price, photos FROM advert"
            " WHERE is_shown AND (?1 IS NULL OR shop = ?1) ORDER BY shop, item"
        )
        with self._connection() as connection:
            rows = connection.execute(query, (shop,)).fetchall()
        return [_advert(row) for row in rows]

    def find(self, shop: str, item: str) -> Advert | None:
        """The advert, if it is on the site."""
        query = (
            "SELECT shop, item, version, title, price, photos FROM advert"
            " WHERE is_shown AND shop = ? AND item = ?"
        )
        with self._connection() as connection:
            row = connection.execute(query, (shop, item)).fetchone()
        return None if row is None else _advert(row)

    def judge(self, shop: str, item: str, verdict: str) -> None:
        """Store what a visitor decided about the advert's photo; the last decision counts."""
        with self._connection() as connection:
            connection.execute("REPLACE INTO verdict VALUES (?, ?, ?)", (shop, item, verdict))

    def verdict(self, shop: str, item: str) -> str:
        """What a visitor decided about the advert's photo; empty if nobody did."""
        query = "SELECT verdict FROM verdict WHERE shop = ? AND item = ?"
        with self._connection() as connection:
            row = connection.execute(query, (shop, item)).fetchone()
        return "" if row is None else str(row[0])

    def note_opened(self) -> None:
        """Note that an advert's page is about to be shown and counted."""
        with self._connection() as connection:
            connection.execute("UPDATE opened SET n = n + 1")

    def opened(self) -> int:
        """How many times that was noted."""
        with self._connection() as connection:
            return int(connection.execute("SELECT n FROM opened").fetchone()[0])

    def happened(self, *, after: int = 0) -> list[Happening]:
        """What was done to adverts since happening `after`, oldest first."""
        query = "SELECT id, action, shop, item FROM happening WHERE id > ? ORDER BY id"
        with self._connection() as connection:
            return [Happening(*row) for row in connection.execute(query, (after,))]

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        # NORMAL is enough under WAL to survive any crash of a process.
        with closing(sqlite3.connect(self._file, timeout=20)) as connection:
            connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                yield connection


def _advert(row: Sequence[Any]) -> Advert:
    shop, item, version, title, price, photos = row
    kept = tuple(Photo(*photo) for photo in json.loads(photos))
    return Advert(shop, item, version, title, price, kept)


def field_text(fields: dict[str, Any], *names: str) -> str:
    """The first of the named fields that is there, as text."""
    return next((str(fields[name]) for name in names if fields.get(name) is not None), "")
