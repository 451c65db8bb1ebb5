"""The site's own table of adverts: what its pages are made of.

A site has its own database; this one is SQLite in a file, to stay small. Items arrive at least
once and in order, each with a version, so writing is idempotent: a version that is not newer
has no effect. The `happening` table records what was done to the adverts, for the demo's check of
it.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODERATED: Final = "bazaar.photos"
"""The queue of new photos, which visitors decide."""
VARIANT_WIDTHS: Final = (480, 160)
"""Widths of the smaller variants that the site makes of an advert's first photo."""
SEARCHED_WORDS: Final = 8
"""Further words of a search are ignored."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS advert (
  shop TEXT, item TEXT, version INTEGER NOT NULL, is_shown INTEGER NOT NULL, title TEXT NOT NULL,
  price TEXT NOT NULL, photos TEXT NOT NULL, category TEXT NOT NULL, text TEXT NOT NULL,
  PRIMARY KEY (shop, item));
CREATE TABLE IF NOT EXISTS word (
  word TEXT, shop TEXT, item TEXT, PRIMARY KEY (word, shop, item)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS variant (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS news (
  id INTEGER PRIMARY KEY, shop TEXT NOT NULL, item TEXT NOT NULL, version INTEGER NOT NULL,
  title TEXT NOT NULL, at REAL NOT NULL, UNIQUE (shop, item, version));
CREATE TABLE IF NOT EXISTS happening (
  id INTEGER PRIMARY KEY, action TEXT NOT NULL, shop TEXT NOT NULL, item TEXT NOT NULL,
  version INTEGER NOT NULL, UNIQUE (shop, item, version));
CREATE TABLE IF NOT EXISTS opened (is_counted INTEGER PRIMARY KEY, n INTEGER NOT NULL);
INSERT OR IGNORE INTO opened VALUES (0, 0), (1, 0);
CREATE TABLE IF NOT EXISTS verdict (
  shop TEXT, item TEXT, verdict TEXT NOT NULL, PRIMARY KEY (shop, item));
"""
_SHOW: Final = """
INSERT INTO advert (shop, item, version, is_shown, title, price, photos, category, text)
VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?)
ON CONFLICT (shop, item) DO UPDATE SET version = excluded.version, is_shown = excluded.is_shown,
  title = excluded.title, price = excluded.price, photos = excluded.photos,
  category = excluded.category, text = excluded.text
WHERE excluded.version > advert.version
"""
_SELECT: Final = "SELECT shop, item, version, title, price, photos, category, text FROM advert"
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
    category: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class News:
    """An advert that was just published, as the site announces it."""

    shop: str
    item: str
    title: str
    at: float


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
        """Make the file and its tables where they are missing.

        Raises: sqlite3.OperationalError, when there are those of another version.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._connection() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)
            connection.execute("SELECT category, is_counted FROM advert, opened LIMIT 0")

    def show(self, advert: Advert, *, action: str) -> None:
        """Insert or update the advert; an older version has no effect."""
        photos = json.dumps(
            [[p.url, p.key, p.sha256, p.outcome, p.size_bytes] for p in advert.photos]
        )
        facts = (advert.title, advert.price, photos, advert.category, advert.text)
        row = (advert.shop, advert.item, advert.version, *facts)
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
        query = _SELECT + " WHERE is_shown AND (?1 IS NULL OR shop = ?1) ORDER BY shop, item"
        with self._connection() as connection:
            rows = connection.execute(query, (shop,)).fetchall()
        return [_advert(row) for row in rows]

    def find(self, shop: str, item: str) -> Advert | None:
        """The advert, if it is on the site."""
        query = _SELECT + " WHERE is_shown AND shop = ? AND item = ?"
        with self._connection() as connection:
            row = connection.execute(query, (shop, item)).fetchone()
        return None if row is None else _advert(row)

    def index(self, shop: str, item: str, text: str) -> None:
        """Let searches find the advert by these words."""
        rows = [(word, shop, item) for word in words_in(text)]
        with self._connection() as connection:
            connection.execute("DELETE FROM word WHERE shop = ? AND item = ?", (shop, item))
            connection.executemany("INSERT OR IGNORE INTO word VALUES (?, ?, ?)", rows)

    def search(self, text: str) -> list[Advert]:
        """The shown adverts that have every word of `text`, or a word that begins so."""
        words = words_in(text)[:SEARCHED_WORDS]
        if not words:
            return []
        part = "SELECT shop, item FROM word WHERE word >= ? AND word < ? || char(1114111)"
        query = _SELECT + " WHERE is_shown AND (shop, item) IN ("
        query += " INTERSECT ".join([part] * len(words)) + ") ORDER BY shop, item"
        with self._connection() as connection:
            rows = connection.execute(query, [word for word in words for _ in range(2)]).fetchall()
        return [_advert(row) for row in rows]

    def add_variants(self, key: str) -> None:
        """Note that the photo has its smaller variants."""
        with self._connection() as connection:
            connection.execute("INSERT OR IGNORE INTO variant VALUES (?)", (key,))

    def variants(self) -> frozenset[str]:
        """The photos that have smaller variants."""
        with self._connection() as connection:
            return frozenset(row[0] for row in connection.execute("SELECT key FROM variant"))

    def announce(self, advert: Advert) -> None:
        """Put the advert among the news, once a version."""
        row = (advert.shop, advert.item, advert.version, advert.title, time.time())
        with self._connection() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO news (shop, item, version, title, at)"
                " VALUES (?, ?, ?, ?, ?)",
                row,
            )

    def news(self, most: int) -> list[News]:
        """The latest news of adverts that are on the site."""
        query = (
            "SELECT n.shop, n.item, n.title, n.at FROM news n JOIN advert a"
            " ON a.shop = n.shop AND a.item = n.item WHERE a.is_shown ORDER BY n.id DESC LIMIT ?"
        )
        with self._connection() as connection:
            return [News(*row) for row in connection.execute(query, (most,))]

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

    def note_opened(self, *, is_counted: bool = False) -> None:
        """Note that an advert's page is about to be shown and counted, or was counted."""
        with self._connection() as connection:
            connection.execute("UPDATE opened SET n = n + 1 WHERE is_counted = ?", (is_counted,))

    def opened(self, *, is_counted: bool = False) -> int:
        """How many times that was noted."""
        query = "SELECT n FROM opened WHERE is_counted = ?"
        with self._connection() as connection:
            return int(connection.execute(query, (is_counted,)).fetchone()[0])

    def ever_shown(self) -> list[tuple[str, str]]:
        """(shop, item) of every advert that was ever on the site."""
        with self._connection() as connection:
            return connection.execute("SELECT shop, item FROM advert ORDER BY 1, 2").fetchall()

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
    shop, item, version, title, price, photos, category, text = row
    kept = tuple(Photo(*photo) for photo in json.loads(photos))
    return Advert(shop, item, version, title, price, kept, category, text)


def variant_key(photo: str, width: int) -> str:
    """Where a smaller variant of a stored photo is kept."""
    return f"variants/{width}/{photo.rpartition('/')[2].partition('.')[0]}.jpg"


def words_in(text: str) -> list[str]:
    """The words of `text` in lower case, each once."""
    return list(dict.fromkeys(re.findall(r"\w+", text.casefold())))


def field_text(fields: dict[str, Any], *names: str) -> str:
    """The first of the named fields that is there, as text."""
    return next((str(fields[name]) for name in names if fields.get(name) is not None), "")
