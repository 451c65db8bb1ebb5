"""Record the minute history of one host.

Every role runs a `Recorder`; a lock on a file in the metrics folder lets one of them write, and
another continues within READ_EVERY_S after it ended. The writer reads the snapshot files of all
roles (`kernel/metrics.py`) every READ_EVERY_S and adds up what each series grew by:

- a process that was there at the first reading counts from that reading on, so the minutes in
  which nobody recorded are a gap, and never a spike;
- a process that appeared later counts from 0, and so does a counter that fell;
- a process that ended counts up to its last snapshot.

At the end of a minute the sums become a row, stamped with PostgreSQL's clock, so hosts whose
clocks differ agree about minutes. Rows that cannot be written wait in memory, up to WAITING_MAX of
them; the insert names its writer, so repeating it after a lost answer has no effect.

The writer also checks the engines (`web/outages.py`) and stores their outages.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import re
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from headrace.engines import Engines
from headrace.engines.postgres_errors import PostgresFull
from headrace.kernel.clock import Clock, SystemClock
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import SECRET_METRIC, START_METRIC
from headrace.web.history import (
    ALL,
    DOWN,
    HOUR_S,
    HOURS_KEPT_S,
    MINUTE_S,
    MINUTES_KEPT_S,
    RESTARTS,
    SERIES,
    SQL,
    STARTS,
    Series,
)
from headrace.web.outages import CHECK_EVERY_S, OutageWatch
from headrace.web.role_secrets import (
    RoleSecret,
    accepted_in,
    differing,
    note_secrets,
    read_secrets,
)

READ_EVERY_S: Final = 10.0
EARLY_S: Final = 2.0
"""A reading so early before a minute's end ends it: clocks are read over the network."""
CLOSE_S: Final = 1.0
START_UP_S: Final = 180.0
"""All roles of a host start within this time."""
FRESH_S: Final = 60.0
"""A process wrote its file so recently that it runs."""
DIED_S: Final = 600.0
"""A file that was left behind within this time is that of the process before."""
WAITING_MAX: Final = 120
DELETED_MAX: Final = 500
"""Rows of each table that a minute deletes at most."""
LOCK_FILE: Final = "history.lock"
_often: Final = SparseLogger(logger(__name__))
Key = tuple[str, str]
"""Series and key."""


@dataclass(slots=True)
class Minute:
    """What was read in one minute, or in the part of it that this process recorded."""

    began_s: float
    """Monotonic, as the next."""
    ended_s: float
    until_s: float
    """When it ends by the clock."""
    sums: defaultdict[Key, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[Key, float] = field(default_factory=dict)
    writer: int = field(default_factory=lambda: random.getrandbits(62))
    at_s: int | None = None
    """Its begin by PostgreSQL's clock, once known."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The kept series of a snapshot file."""

    modified_ns: int
    sums: Mapping[Key, float]
    """Buckets hold the values up to their bound, as in the file."""
    peaks: Mapping[Key, float]
    version: str = ""
    started_s: float = 0.0
    """Seconds since 1970; 0 if unknown."""
    secret: tuple[str, str] | None = None
    """The fingerprints of the secret and of accepted ones, as in the file."""

    @classmethod
    def parse(cls, text: str, modified_ns: int = 0) -> Snapshot:
        """The kept series in an exposition text."""
        sums: defaultdict[Key, float] = defaultdict(float)
        peaks: dict[Key, float] = {}
        version, started_s, secret = "", 0.0, None
        for name, given, number in _LINE.findall(text):
            value, labels = float(number), dict(_LABELS.findall(given))
            if name == START_METRIC:
                version, started_s = labels.get("version", ""), value
            if name == SECRET_METRIC:
                secret = labels.get("secret", ""), labels.get("accepted", "")
            for series in _OF_SAMPLE.get(name, ()):
                if series.kind == "peak":
                    peaks[series.name, ALL] = value
                else:
                    label = "le" if series.kind == "time" else series.label
                    sums[series.name, labels.get(label, ALL)] += value
        return cls(modified_ns, sums, peaks, version, started_s, secret)

    def growth_since(self, before: Snapshot | None) -> dict[Key, float]:
        """Growth by key; buckets hold the values above the bound before theirs.

        The bound below a bucket with values is kept too, as percentiles need both.
        """
        grown: dict[Key, float] = {}
        for key, value in self.sums.items():
            was = before.sums.get(key, 0.0) if before is not None else 0.0
            grown[key] = value - was if value >= was else value
        kept = {key: value for key, value in grown.items() if value > 0}
        for name in {name for name, _ in grown if SERIES[name].kind == "time"}:
            below: Key | None
            keys = sorted((key for key in grown if key[0] == name), key=lambda key: float(key[1]))
            for below, key in zip([None, *keys], keys, strict=False):
                kept.pop(key, None)
                inside = grown[key] - (grown[below] if below is not None else 0.0)
                if inside > 0:
                    kept[key] = inside
                    if below is not None:
                        kept.setdefault(below, 0.0)
        return kept


def _sample_of(series: Series) -> str:
    return f"{series.metric}_bucket" if series.kind == "time" else series.metric


_OF_SAMPLE: Final[Mapping[str, list[Series]]] = {
    name: [one for one in SERIES.values() if _sample_of(one) == name]
    for name in {_sample_of(one) for one in SERIES.values() if one.metric}
}
_LINE: Final = re.compile(
    rf"^({'|'.join(sorted([*_OF_SAMPLE, START_METRIC, SECRET_METRIC]))})(?:\{{(.*)\}})? (\S+)$",
    re.MULTILINE,
)
_LABELS: Final = re.compile(r'(\w+)="([^"]*)"')


class Recorder:
    """Writes the history of `host` while no other process of the metrics folder does.

    `engines` may raise a HeadraceError while there are none. Call `run`, cancel it, then `close`.
    """

    def __init__(
        self,
        folder: Path,
        engines: Callable[[], Engines],
        *,
        host: str,
        center: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._folder = folder
        self._engines = engines
        self._host, self._center = host, center
        self._clock = clock or SystemClock()
        self._lock: int | None = None
        self._seen: dict[str, Snapshot] | None = None
        self._minute: Minute | None = None
        self._waiting: deque[Minute] = deque(maxlen=WAITING_MAX)
        self.watch = OutageWatch(engines, self._clock)
        self._noted: list[RoleSecret] = []
        self._note_from_s = 0.0

    async def run(self, *, wait_s: float = 0.0) -> None:
        """Record until cancelled; try for the lock after `wait_s`."""
        await self._clock.sleep(wait_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.check_engines, CHECK_EVERY_S))
            group.create_task(self._repeat(self.step, READ_EVERY_S))

    async def _repeat(self, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            try:
                await step()
            except (HeadraceError, OSError) as error:
                _often.warning("history_not_recorded", error=str(error))
            await self._clock.sleep(every_s - self._now_s() % every_s)

    async def check_engines(self) -> None:
        """Check the engines, if this process holds the lock."""
        if self._holds_lock():
            await self.watch.check()

    async def step(self) -> None:
        """Read once, if this process holds the lock; write the minutes that ended."""
        if not self._holds_lock():
            return
        if self.watch.offset_s is None:
            await self.watch.check()
        await self._read()
        minute = self._minute
        if minute is not None and minute.ended_s >= minute.until_s - EARLY_S:
            self._end_minute()
        if not self.watch.takes_writes:
            # A single late check is no outage, and the next step writes what waits.
            if cause := self.watch.cause_of("postgres"):
                _often.warning("history_not_recorded", error=f"PostgreSQL: {cause}")
            return
        await self._write()
        await self._note_secrets()

    async def close(self) -> None:
        """Write what was read since the last minute, for up to CLOSE_S; release the lock."""
        if self._lock is None:
            return
        with suppress(HeadraceError, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._read()
                self._end_minute()
                await self._write()
        os.close(self._lock)
        self._lock = None

    async def _note_secrets(self) -> None:
        """Store the fingerprints of this host's secrets once a minute and when they change."""
        found = [
            RoleSecret(
                host=self._host,
                role=_role_of(name),
                fingerprint=one.secret[0],
                accepted=accepted_in(one.secret[1]),
            )
            for name, one in sorted((self._seen or {}).items(), key=lambda item: item[1].started_s)
            if one.secret is not None
        ]
        # A role that was restarted may have left a file: its newest process counts.
        found = list({one.role: one for one in found}.values())
        now_s = self._clock.monotonic_s()
        if found == self._noted and (not found or now_s < self._note_from_s):
            return
        postgres = self._engines().postgres
        await note_secrets(postgres, self._host, found)
        self._noted, self._note_from_s = found, now_s + MINUTE_S - READ_EVERY_S / 2
        for text in differing(await read_secrets(postgres)).values():
            _often.warning("secrets_differ", reason=text)

    def _holds_lock(self) -> bool:
        if self._lock is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def _now_s(self) -> float:
        """The time by PostgreSQL's clock, or by that of the host until it is known."""
        if self.watch.offset_s is None:
            return self._clock.now().timestamp()
        return self._clock.monotonic_s() + self.watch.offset_s

    def _begin_of(self, monotonic_s: float) -> int:
        now_s = self._now_s() - self._clock.monotonic_s() + monotonic_s
        return int(now_s // MINUTE_S) * MINUTE_S

    async def _read(self) -> None:
        """Add what happened since the last reading to the minute."""
        found = await asyncio.to_thread(read_folder, self._folder, self._seen or {})
        at_s = self._clock.monotonic_s()
        if self._minute is None:
            self._minute = self._new_minute(at_s)
        minute = self._minute
        minute.ended_s = at_s
        for name in found:
            self._add(name, found, minute)
        for engine, seconds in self.watch.take_down_s().items():
            minute.sums[DOWN, engine] += seconds
        self._seen = found

    def _add(self, name: str, found: Mapping[str, Snapshot], minute: Minute) -> None:
        """Add one file. At the first reading only a process that just started is news."""
        snapshot = found[name]
        before = None if self._seen is None else self._seen.get(name)
        is_new = before is None
        if self._seen is None:
            is_new = self._clock.now().timestamp() - snapshot.started_s < MINUTE_S
        elif before is None or before.modified_ns != snapshot.modified_ns:
            for key, value in snapshot.growth_since(before).items():
                minute.sums[key] += value
        role = name.rpartition("-")[0]
        is_worker = "." in role
        if is_new and snapshot.version and not is_worker:
            started = f"{role} {snapshot.version}"
            minute.sums[STARTS, started] += 1
            minute.sums[RESTARTS, started] += self._is_restart(name, found)
        if is_new or before is None or before.modified_ns != snapshot.modified_ns:
            for key, value in snapshot.peaks.items():
                minute.peaks[key] = max(value, minute.peaks.get(key, 0.0))

    def _is_restart(self, name: str, found: Mapping[str, Snapshot]) -> bool:
        """Whether a process replaced one that died, or started long after the other roles.

        A process that ends in order deletes its file and those of its dead predecessors. If the
        roles of a host start together, this is the start of the host.
        """
        role, started_s = name.rpartition("-")[0], found[name].started_s
        now_s = self._clock.now().timestamp()
        for other, snapshot in found.items():
            idle_s, age_s = now_s - snapshot.modified_ns / 1e9, started_s - snapshot.started_s
            if not snapshot.started_s or age_s <= 0:
                continue
            if other.rpartition("-")[0] == role and idle_s < DIED_S:
                return True
            if age_s >= START_UP_S and idle_s < FRESH_S:
                return True
        return False

    def _end_minute(self) -> None:
        minute = self._minute
        if minute is not None and minute.ended_s > minute.began_s:
            self._waiting.append(minute)
            self._minute = self._new_minute(minute.ended_s)

    def _new_minute(self, at_s: float) -> Minute:
        """A minute from `at_s` on. One that is nearly over belongs to the next."""
        left_s = MINUTE_S - (at_s - self._clock.monotonic_s() + self._now_s()) % MINUTE_S
        return Minute(at_s, at_s, at_s + left_s + (MINUTE_S if left_s < READ_EVERY_S / 2 else 0))

    async def _write(self) -> None:
        """Write the outages and minutes that wait, oldest first. Raises: PostgresDown."""
        try:
            await self.watch.write(self._host, kept_s=HOURS_KEPT_S)
            while self._waiting and self.watch.offset_s is not None:
                minute = self._waiting[0]
                if minute.at_s is None:
                    minute.at_s = self._begin_of((minute.began_s + minute.ended_s) / 2)
                await self._insert(minute, minute.at_s)
                self.watch.note_full(is_full=False)
                self._waiting.popleft()
        except PostgresFull:
            # A check reads, so only a write shows this.
            self.watch.note_full(is_full=True)
            raise

    async def _insert(self, minute: Minute, at_s: int) -> None:
        async with self._engines().postgres.transaction() as tx:
            await tx.run(
                SQL.insert_minute,
                at_s=float(at_s),
                host=self._host,
                writer=minute.writer,
                center=self._center,
                seconds=minute.ended_s - minute.began_s,
                sums=_document(minute.sums),
                peaks=_document(minute.peaks),
            )
            hour_s = float(at_s // HOUR_S * HOUR_S)
            await tx.value(SQL.sum_history_hour, hour_s=hour_s, host=self._host)
            await tx.run(SQL.delete_old_minutes, kept_s=MINUTES_KEPT_S, rows_max=DELETED_MAX)
            await tx.run(SQL.delete_old_hours, kept_s=HOURS_KEPT_S, rows_max=DELETED_MAX)


def read_folder(folder: Path, seen: Mapping[str, Snapshot]) -> dict[str, Snapshot]:
    """The snapshots of a folder by name; files that did not change since `seen` are not parsed."""
    found: dict[str, Snapshot] = {}
    for path in folder.glob("*.prom"):
        with suppress(FileNotFoundError):
            modified_ns = path.stat().st_mtime_ns
            before = seen.get(path.stem)
            if before is not None and before.modified_ns == modified_ns:
                found[path.stem] = before
            else:
                found[path.stem] = Snapshot.parse(path.read_text(), modified_ns)
    return found


def _role_of(name: str) -> str:
    """The role in the name of a snapshot file, such as `api-17`."""
    process = name.partition(".")[0]
    return process.rpartition("-")[0] or process


def _document(values: Mapping[Key, float]) -> str:
    """`{series: {key: value}}`, without zeros except of buckets."""
    found: dict[str, dict[str, float]] = {}
    for (series, key), value in values.items():
        if value or SERIES[series].kind == "time":
            found.setdefault(series, {})[key] = round(value, 6)
    return msgspec.json.encode(found).decode()
