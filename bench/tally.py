"""How handlers report starts: cheaply, without the database, so that reporting is not what is
measured.

`Tally` is one mapped page a process: calls counted, first and last start. `Starts` appends 16
bytes a start to a file a process, whole even after SIGKILL. Clocks are CLOCK_MONOTONIC in ns,
which all processes of a machine share. Nothing here imports the product: peers use it from an
environment of their own.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "BENCH_TALLY"
_PAGE = struct.Struct("<qqq")
_START = struct.Struct("<qq")


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


class Tally:
    """Counts handler starts of this process; a forked child opens a page of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._count = self._first_ns = 0

    def add(self, jobs: int = 1) -> None:
        """Count `jobs` that start now."""
        now_ns = time.monotonic_ns()
        if self._pid != os.getpid():
            self._open(now_ns)
        self._count += jobs
        _PAGE.pack_into(self._page, 0, self._count, self._first_ns, now_ns)

    def _open(self, now_ns: int) -> None:
        self._pid = os.getpid()
        self._count, self._first_ns = 0, now_ns
        with (_folder() / f"tally-{self._pid}").open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)


@dataclass(frozen=True)
class Tallied:
    """What all processes of a folder counted."""

    count: int
    first_ns: int
    last_ns: int

    @property
    def seconds(self) -> float:
        """From the first start to the last."""
        return (self.last_ns - self.first_ns) / 1e9

    @property
    def rate_per_s(self) -> float:
        """Starts a second between the first start and the last."""
        return self.count / self.seconds if self.seconds > 0 else 0.0


def read_tally(folder: Path) -> Tallied:
    """Add the pages of `folder` up."""
    pages = [path.read_bytes()[: _PAGE.size] for path in folder.glob("tally-*")]
    # A page that was just made is empty still.
    rows = [row for page in pages if len(page) == _PAGE.size and (row := _PAGE.unpack(page))[0]]
    if not rows:
        return Tallied(0, 0, 0)
    return Tallied(sum(r[0] for r in rows), min(r[1] for r in rows), max(r[2] for r in rows))


class Starts:
    """Appends (key, moment in ns) of each start of this process to a file of its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._file = -1

    def add(self, at_ns: int, *keys: int) -> None:
        """Record the start of `keys` at `at_ns`, read as the handler's first step.

        A process that was stopped between the payloads and this clock recorded its starts late:
        165 windows that were none (2 batches, 2 cores, 2026-11-21).
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = _folder() / f"starts-{self._pid}"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._file, b"".join(_START.pack(key, at_ns) for key in keys))


def read_starts(folder: Path) -> list[tuple[int, int]]:
    """Every (key, moment in ns) of `folder`, by moment."""
    found: list[tuple[int, int]] = []
    for path in folder.glob("starts-*"):
        data = path.read_bytes()
        found += _START.iter_unpack(data[: len(data) // _START.size * _START.size])
    return sorted(found, key=lambda row: row[1])
