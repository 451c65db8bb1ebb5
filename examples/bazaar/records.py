"""What the demo writes down by itself, to compare with what Headrace answers.

An *errand* is a job that the demo enqueues: it is recorded before the call and again once Headrace
accepted it. Its handler records each run, and its effect once. So this table alone shows what was
lost or done twice, whatever was killed in between. It also has the faults that visitors ask for on
the page `/break`, which the demo's own process carries out, and the last ledger.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BREAKS: Final = ("slot", "seller", "valkey", "postgres", "media")
"""Faults that can be requested."""
ASKED_S: Final = 30.0
"""A fault that nobody carries out within this time is forgotten: the demo was not running."""
FOLDED_AFTER_S: Final = 600.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS errand (
  uid TEXT PRIMARY KEY, queue TEXT NOT NULL, asked_at REAL NOT NULL, accepted_at REAL)
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS run (
  id INTEGER PRIMARY KEY, uid TEXT NOT NULL, pid INTEGER NOT NULL, began_at REAL NOT NULL,
  ended_at REAL);
CREATE INDEX IF NOT EXISTS run_uid ON run (uid);
CREATE TABLE IF NOT EXISTS effect (
  id INTEGER PRIMARY KEY, uid TEXT NOT NULL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS effect_uid ON effect (uid);
CREATE TABLE IF NOT EXISTS break (
  id INTEGER PRIMARY KEY, kind TEXT NOT NULL, asked_at REAL NOT NULL, began_at REAL,
  ended_at REAL, recovered_at REAL, note TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS folded (
  one INTEGER PRIMARY KEY CHECK (one = 1), done INTEGER NOT NULL, repeated INTEGER NOT NULL);
INSERT OR IGNORE INTO folded VALUES (1, 0, 0);
CREATE TABLE IF NOT EXISTS paper (name TEXT PRIMARY KEY, at REAL NOT NULL, text TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Break:
    """A requested fault. Times are of the wall clock."""

    id: int
    kind: str
    asked_at: float
    began_at: float | None
    ended_at: float | None
    """When the fault itself was over, such as when PostgreSQL could start again."""
    recovered_at: float | None
    note: str

    @property
    def is_open(self) -> bool:
        """Whether it waits, lasts or is not yet recovered from."""
        if self.began_at is None:
            return time.time() - self.asked_at < ASKED_S
        is_given_up = self.note.startswith(("not done", "not recovered"))
        return self.recovered_at is None and not is_given_up

    @property
    def fault_s(self) -> float:
        """How long the fault itself lasted."""
        return (
            0.0 if self.ended_at is None or self.began_at is None else self.ended_at - self.began_at
        )

    @property
    def recovery_s(self) -> float | None:
        """How long recovery took, from the end of the fault."""
        if self.recovered_at is None or self.ended_at is None:
            return None
        return max(0.0, self.recovered_at - self.ended_at)


@dataclass(frozen=True, slots=True)
class Errands:
    """Counts of the errands until now."""

    accepted: int
    done: int
    """Accepted ones whose effect is there."""
    doubled: int
    """Effects beyond the first of an errand."""
    repeated: int
    """Runs that a crash cut off, so that another run followed."""


class Records:
    """The tables, in `file`. Each call opens it, so that processes and threads share no state."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def create(self) -> None:
        """Make the tables where they are missing."""
        with self._connection() as connection:
            connection.executescript(_SCHEMA)

    def begin_run(self) -> None:
        """Forget what an earlier run counted and broke, before anything of this one is started.

        Its errands stay: the open ones are done in this run.
        """
        with self._connection() as connection:
            connection.execute("DELETE FROM break")
            connection.execute("DELETE FROM paper")
            # Cut off by the end of the earlier run, and not by a fault of this one.
            connection.execute("UPDATE run SET ended_at = began_at WHERE ended_at IS NULL")
            connection.execute("UPDATE folded SET repeated = 0")
            connection.execute(
                "DELETE FROM effect WHERE id NOT IN (SELECT min(id) FROM effect GROUP BY uid)"
            )

    def ask(self, errands: Iterable[tuple[str, str]]) -> None:
        """Note that these (uid, queue) are about to be sent."""
        rows = [(uid, queue, time.time()) for uid, queue in errands]
        with self._connection() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO errand (uid, queue, asked_at) VALUES (?, ?, ?)", rows
            )

    def accept(self, uids: Iterable[str]) -> None:
        """Note that Headrace has accepted them: none may be lost now."""
        rows = [(time.time(), uid) for uid in uids]
        with self._connection() as connection:
            connection.executemany("UPDATE errand SET accepted_at = ? WHERE uid = ?", rows)

    @contextmanager
    def running(self, uid: str) -> Iterator[int]:
        """Note a run of the errand, and its end, also by an error; gives the run's number."""
        with self._connection() as connection:
            run = connection.execute(
                "INSERT INTO run (uid, pid, began_at) VALUES (?, ?, ?)",
                (uid, os.getpid(), time.time()),
            ).lastrowid
            number = connection.execute(
                "SELECT count(*) FROM run WHERE uid = ? AND id <= ?", (uid, run)
            ).fetchone()[0]
        try:
            yield int(number)
        finally:
            with self._connection() as connection:
                connection.execute("UPDATE run SET ended_at = ? WHERE id = ?", (time.time(), run))

    def take_effect(self, uid: str) -> None:
        """Write the errand's effect, unless an earlier run has: a job may run again."""
        with self._connection() as connection:
            connection.execute(
                "INSERT INTO effect (uid, at) SELECT ?1, ?2"
                " WHERE NOT EXISTS (SELECT 1 FROM effect WHERE uid = ?1)",
                (uid, time.time()),
            )

    def errands(self) -> Errands:
        """The counts."""
        query = """
            SELECT done + (SELECT count(*) FROM errand WHERE accepted_at IS NOT NULL),
              done + (SELECT count(*) FROM errand e WHERE accepted_at IS NOT NULL
                AND EXISTS (SELECT 1 FROM effect f WHERE f.uid = e.uid)),
              (SELECT count(*) - count(DISTINCT uid) FROM effect),
              repeated + (SELECT count(*) FROM run r WHERE ended_at IS NULL
                AND EXISTS (SELECT 1 FROM run n WHERE n.uid = r.uid AND n.id > r.id))
            FROM folded
        """
        with self._connection() as connection:
            return Errands(*connection.execute(query).fetchone())

    def fold(self, *, older_than_s: float = FOLDED_AFTER_S) -> None:
        """Replace old errands that were done once by their number, so that the tables stay small.

        Those that are open or doubled stay.
        """
        chosen = """
            CREATE TEMP TABLE chosen AS SELECT uid FROM errand e WHERE accepted_at < ?
              AND (SELECT count(*) FROM effect f WHERE f.uid = e.uid) = 1
        """
        with self._connection() as connection:
            connection.execute(chosen, (time.time() - older_than_s,))
            connection.execute("""
                UPDATE folded SET done = done + (SELECT count(*) FROM chosen),
                  repeated = repeated + (SELECT count(*) FROM run r JOIN chosen USING (uid)
                    WHERE r.ended_at IS NULL
                    AND EXISTS (SELECT 1 FROM run n WHERE n.uid = r.uid AND n.id > r.id))
            """)
            for table in ("errand", "run", "effect"):
                connection.execute(f"DELETE FROM {table} WHERE uid IN (SELECT uid FROM chosen)")

    def open_runs(self) -> dict[int, set[str]]:
        """By process: errands that its handlers work on, or worked on when it was killed."""
        query = """
            SELECT pid, uid FROM run r WHERE ended_at IS NULL
              AND NOT EXISTS (SELECT 1 FROM effect f WHERE f.uid = r.uid)
        """
        found: dict[int, set[str]] = {}
        with self._connection() as connection:
            for pid, uid in connection.execute(query):
                found.setdefault(pid, set()).add(uid)
        return found

    def effects_of(self, uids: Sequence[str]) -> set[str]:
        """Those of the errands whose effect is there."""
        marks = ", ".join("?" * len(uids))
        with self._connection() as connection:
            rows = connection.execute(f"SELECT uid FROM effect WHERE uid IN ({marks})", uids)
            return {row[0] for row in rows}

    def ask_break(self, kind: str) -> int:
        """Ask for a fault, unless one of this kind is still open; returns its id, else 0."""
        if any(one.kind == kind and one.is_open for one in self.breaks(20)):
            return 0
        with self._connection() as connection:
            return (
                connection.execute(
                    "INSERT INTO break (kind, asked_at) VALUES (?, ?)", (kind, time.time())
                ).lastrowid
                or 0
            )

    def keep_asked(self) -> None:
        """Keep requested faults that wait for the end of another one from being forgotten."""
        now = time.time()
        with self._connection() as connection:
            connection.execute(
                "UPDATE break SET asked_at = ? WHERE began_at IS NULL AND asked_at > ?",
                (now, now - ASKED_S),
            )

    def next_break(self) -> Break | None:
        """The oldest requested fault that has not begun."""
        waiting = [one for one in self.breaks(20) if one.began_at is None and one.is_open]
        return waiting[-1] if waiting else None

    def note_break(self, break_id: int, **values: float | str) -> None:
        """Set columns of a fault, such as `began_at`."""
        names = ", ".join(f"{name} = ?" for name in values)
        with self._connection() as connection:
            connection.execute(
                f"UPDATE break SET {names} WHERE id = ?", (*values.values(), break_id)
            )

    def breaks(self, most: int) -> list[Break]:
        """The latest faults, newest first."""
        query = (
            "SELECT id, kind, asked_at, began_at, ended_at, recovered_at, note FROM break"
            " ORDER BY id DESC LIMIT ?"
        )
        with self._connection() as connection:
            return [Break(*row) for row in connection.execute(query, (most,))]

    def put_paper(self, name: str, value: Any) -> None:
        """Keep a JSON value, such as the last ledger."""
        row = (name, time.time(), json.dumps(value))
        with self._connection() as connection:
            connection.execute("REPLACE INTO paper VALUES (?, ?, ?)", row)

    def paper(self, name: str) -> tuple[float, Mapping[str, Any]] | None:
        """When the value was kept, and the value; None: it never was."""
        with self._connection() as connection:
            row = connection.execute(
                "SELECT at, text FROM paper WHERE name = ?", (name,)
            ).fetchone()
        return None if row is None else (float(row[0]), json.loads(row[1]))

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file, timeout=20)) as connection:
            connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                yield connection
