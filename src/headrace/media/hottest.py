"""The most requested objects: a sample of the requests, counted in a bounded, decaying table.

`note` is called for each request. About one in SAMPLED_EVERY is counted, at random steps, so that
regular request patterns do not bias the sample. Counts halve in HALF_LIFE_S, so rates are those of
the last minutes. The table holds KEPT_MAX keys. When it is full, a new key decrements all counts
and keys without a count are removed (Misra and Gries, 1982). So a key with more than one in
KEPT_MAX of the sampled requests is always in the table.

Each worker reports its top rows to its parent, which adds them up and writes `hottest.json` in the
node's folder for `app.media.hottest.list()`. Keys are not used as metric labels, which must be few.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

SAMPLED_EVERY: Final = 16
KEPT_MAX: Final = 512
HALF_LIFE_S: Final = 60.0
ROWS_MAX: Final = 100
"""Rows that a worker reports, and rows in the file."""
FILE: Final = "hottest.json"
_NOTHING: Final = 0.01
Row = tuple[str, float]
"""A key and its requests per second."""


class HottestFile(msgspec.Struct):
    """The file: when it was written, and the rows, the most requested first."""

    at_s: float
    rows: list[Row]


class Hottest:
    """Counts the requests of one process."""

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, dice: random.Random | None = None
    ) -> None:
        self._now_s = now_s
        self._dice = dice or random.Random()
        self._counts: dict[str, float] = {}
        self._faded_s = now_s()
        self._left = 1

    def note(self, key: str) -> None:
        """Count a request for `key`."""
        self._left -= 1
        if not self._left:
            self._left = self._dice.randint(1, 2 * SAMPLED_EVERY - 1)
            self.count(key)

    def top(self, keys_max: int = ROWS_MAX) -> list[Row]:
        """The most requested keys with their estimated requests per second."""
        self._fade()
        per_s = SAMPLED_EVERY * math.log(2) / HALF_LIFE_S
        return _hottest(((key, count * per_s) for key, count in self._counts.items()), keys_max)

    def count(self, key: str) -> None:
        """Count a request that was sampled already."""
        counts = self._counts
        if key in counts or len(counts) < KEPT_MAX:
            counts[key] = counts.get(key, 0.0) + 1.0
        else:
            self._counts = {other: count - 1.0 for other, count in counts.items() if count > 1.0}

    def _fade(self) -> None:
        now_s = self._now_s()
        share = 0.5 ** ((now_s - self._faded_s) / HALF_LIFE_S)
        self._faded_s = now_s
        faded = ((key, count * share) for key, count in self._counts.items())
        self._counts = {key: count for key, count in faded if count > _NOTHING}


HOTTEST: Final = Hottest()
"""The counts of this process."""


def merge_rows(parts: Iterable[Sequence[Row]]) -> list[Row]:
    """The rows of several processes combined."""
    rates: dict[str, float] = {}
    for rows in parts:
        for key, per_s in rows:
            rates[key] = rates.get(key, 0.0) + per_s
    return _hottest(rates.items(), ROWS_MAX)


def write_hottest(folder: Path, rows: Sequence[Row]) -> None:
    """Write the rows atomically. Raises: OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f"{FILE}.draft"
    draft.write_bytes(msgspec.json.encode(HottestFile(time.time(), list(rows))))
    draft.replace(folder / FILE)


def read_hottest(folder: Path, *, within_s: float) -> list[Row] | None:
    """The rows if written at most `within_s` ago; None: no node runs there."""
    try:
        stored = msgspec.json.decode((folder / FILE).read_bytes(), type=HottestFile)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return stored.rows if abs(time.time() - stored.at_s) <= within_s else None


def _hottest(rows: Iterable[Row], keys_max: int) -> list[Row]:
    return sorted(rows, key=lambda row: (-row[1], row[0]))[:keys_max]
