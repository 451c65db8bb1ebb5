"""A warm standby: a second machine that replays the archive, and its promotion.

It reads the archive alone, so the two machines need no connection to each other. PostgreSQL takes
each segment from a folder that this process fills, and takes a segment again when it has grown.

A promotion begins with a new holder in the archive (`headrace promote`). The former primary finds
it at its next write or start, and stops. This process finds it too: it replays what is left, ends
recovery, and removes the marker of the folder, which is a primary's from then.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.engines.backup.archive import Archive, BackupConfig, Base, Holder
from headrace.engines.backup.archive_store import ArchiveMissing
from headrace.engines.backup.archiver import (
    Identity,
    new_holder,
    read_identity,
    require_not_fenced,
    write_identity,
)
from headrace.engines.backup.base_backup import fetch_base, program_beside
from headrace.engines.backup.restore import (
    RECOVERY_S,
    SPOOL,
    extend_segment,
    fetch_log,
    new_folder,
    plan_of,
    recovery_settings,
    write_segment,
)
from headrace.engines.backup.wal import (
    SEGMENT_BYTES,
    BackupDamaged,
    damaged,
    parse_lsn,
    segment_floor,
    segment_name,
    segment_start,
)
from headrace.engines.embedded.data_folder import (
    RECOVERED_FILE,
    RECOVERING_FILE,
    FolderLock,
    FolderUnusable,
    is_locked,
)
from headrace.engines.embedded.process import ENGINE_ENVIRONMENT, start_failure
from headrace.engines.embedded.servers import PostgresServer
from headrace.engines.embedded.settings import endpoints_of, read_machine
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import load_queries
from headrace.kernel import metrics
from headrace.kernel.errors import Conflict, HeadraceError, Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import crash_point

SPOOLED_MAX: Final = 16
"""Segments that wait for PostgreSQL; the rest waits in the archive."""
PROMOTED_S: Final = 300.0
_FULL_PAUSE_S: Final = 0.1
_PASSES_WITHOUT_MIN: Final = 2
_GAP_CHECK_S: Final = 60.0
_STUCK_S: Final = 5.0
"""The archived log ends inside a record if the replay makes no progress for this long."""
SQL: Final = load_queries("headrace.engines")
log = logger(__name__)
STANDBY_LAG: Final = metrics.gauge(
    "backup_standby_lag_seconds", "Age of the newest archived log that the standby has fetched."
)


class StandbyLeft(Conflict):
    """The archive has a generation that this standby cannot follow."""

    code = "backup.other_generation"


class PrimaryRuns(Conflict):
    """The engines of the folder to promote are running."""

    code = "backup.primary_runs"


class Source(msgspec.Struct, frozen=True):
    """What a standby follows; stored in the marker of its folder."""

    generation: int
    timeline: int
    start: int
    """The position from which its base backup needs the log."""


def is_standby(folder: Path) -> bool:
    """Whether the data folder follows an archive."""
    marker = folder / RECOVERING_FILE
    return marker.exists() and marker.stat().st_size > 0


async def make_standby(archive: Archive, folder: Path) -> None:
    """Make a standby of the newest undamaged base backup in the new folder `folder`.

    An attempt that was killed is repeated.

    Raises: ArchiveMissing, RestoreFolderExists, BackupDamaged, Unavailable.
    """
    holder = await archive.holder()
    bases = [
        base
        for base in await archive.bases()
        if holder is not None and base.generation == holder.generation
    ]
    if not bases:
        raise ArchiveMissing(
            f"{archive.name} has no complete base backup of its current primary: `headrace up`"
            " takes the first one within minutes of its start"
        )
    stored = await archive.segments(bases[-1].generation)
    for base in reversed(bases):
        try:
            await _unpack_standby(archive, base, stored, folder)
        except BackupDamaged as error:
            if not error.base_id or base is bases[0]:
                raise
            log.warning("base_backup_not_used", id=base.id, error=error.text)
        else:
            return


async def _unpack_standby(
    archive: Archive, base: Base, stored: Mapping[str, Sequence[str]], folder: Path
) -> None:
    plan, _ = await plan_of(archive, base, stored)
    async with new_folder(folder, repeats=True) as path:
        await fetch_base(archive, base, path)
        spool = path / "postgres" / SPOOL
        spool.mkdir(mode=0o700)
        await fetch_log(archive, plan, spool, to=base.ended_at)
        (path / "postgres" / "standby.signal").touch()
        source = Source(base.generation, base.timeline, base.start)
        (path / RECOVERING_FILE).write_bytes(msgspec.json.encode(source))


async def promote(archive: Archive, folder: Path, *, again: bool = False) -> tuple[Holder, bool]:
    """Make the data folder `folder` the holder of the archive, in a new generation.

    Return the holder, and whether this call made it so: a folder that holds the archive already
    gets a further generation only with `again`. A running standby then ends its recovery.

    Raises: ArchiveMissing, PrimaryRuns, StandbyLeft, Fenced, BlobChanged, Unavailable.
    """
    require_not_fenced(folder)
    if not (folder / "postgres").is_dir():
        raise FolderUnusable(f"data folder {folder} has no database: name a standby with --data")
    held = await archive.holder()
    if held is None:
        raise ArchiveMissing(f"{archive.name} is empty: start `headrace up`, which begins it")
    identity = read_identity(folder)
    if held.folder_id == identity.folder_id and not (again and not is_standby(folder)):
        write_identity(folder, Identity(held.folder_id, held.archive_id))
        return held, False
    if is_standby(folder):
        require_generation(held, source_of(folder))
    elif (folder / RECOVERING_FILE).exists():
        raise FolderUnusable(f"data folder {folder}: its restore did not end, so restore again")
    elif is_locked(folder):
        raise PrimaryRuns(f"the engines of data folder {folder} run: stop `headrace up` first")
    own = new_holder(held, folder, generation=held.generation + 1)
    await archive.claim(own)
    write_identity(folder, Identity(own.folder_id, own.archive_id))
    return own, True


class Standby:
    """The standby in `folder`, made by `make_standby`."""

    def __init__(
        self,
        archive: Archive,
        folder: Path,
        config: BackupConfig,
        *,
        postgres_bin: str | None = None,
    ) -> None:
        self._archive = archive
        self._postgres_bin = postgres_bin
        self._folder = folder
        self._every_s = config.every_s
        self._spool = folder / "postgres" / SPOOL
        self._source = source_of(folder)
        self._position = 0
        self._data = bytearray()
        """The fetched bytes of the current segment."""
        self._fetched_at: datetime | None = None
        self._passes_without = 0
        """Consecutive attempts that fetched nothing."""
        self._drains = False
        self._is_final = False
        """Whether the current segment was read again for the promotion."""
        self._gap_checked_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> bool:
        """Follow until `stop`; return True once this folder is promoted.

        Raises: StandbyLeft, FolderInUse, StartFailed.
        """
        lock = FolderLock(self._folder)
        lock.acquire()
        settings = recovery_settings("mv", wal_retrieve_retry_interval="500ms")
        server = PostgresServer(
            self._folder,
            read_machine(),
            durable=True,
            extra=settings,
            bin_setting=self._postgres_bin,
        )
        tasks: list[asyncio.Task[Any]] = []
        try:
            self._spool.mkdir(mode=0o700, exist_ok=True)
            self._position = await self._first_position()
            stopping = asyncio.create_task(stop.wait())
            tasks += [stopping, asyncio.create_task(self._feed())]
            tasks.append(asyncio.create_task(server.start(ready_s=RECOVERY_S)))
            if await _first_of(tasks) is stopping:
                return False
            assert server.process is not None
            tasks[2:] = [
                asyncio.create_task(server.process.wait()),
                asyncio.create_task(self._wait_promoted()),
            ]
            ended = await _first_of(tasks)
            if ended is tasks[2]:
                raise start_failure("postgres", "ended", self._folder / "logs" / "postgres.log")
            return ended is tasks[3]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(asyncio.Event())
            lock.release()

    async def _first_position(self) -> int:
        """The start of the segment from which PostgreSQL continues."""
        data = self._folder / "postgres"
        if (data / "backup_label").exists():
            return self._source.start
        process = await asyncio.create_subprocess_exec(
            await program_beside(self._postgres_bin, "pg_controldata"),
            str(data),
            env=ENGINE_ENVIRONMENT,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        found = re.search(rb"REDO location: +([0-9A-F/]+)", output)
        if found is None:
            raise damaged(str(data), "pg_controldata prints no REDO location")
        return segment_floor(parse_lsn(found[1].decode()))

    async def _feed(self) -> None:
        """Fetch archived log for PostgreSQL, without end."""
        often = SparseLogger(log)
        while True:
            has_new = False
            try:
                if sum(1 for _ in self._spool.glob("0*")) >= SPOOLED_MAX:
                    await asyncio.sleep(_FULL_PAUSE_S)
                    continue
                has_new = await self._fetch()
            except (HeadraceError, OSError) as error:
                often.warning("log_not_fetched", error=str(error))
            if self._fetched_at is not None:
                lag_s = (datetime.now(UTC) - self._fetched_at).total_seconds()
                STANDBY_LAG.set(lag_s)
                often.info("standby_follows", lag_s=round(lag_s, 1))
            self._passes_without = 0 if has_new else self._passes_without + 1
            if not has_new:
                await asyncio.sleep(_FULL_PAUSE_S if self._drains else self._every_s)

    async def _fetch(self) -> bool:
        """Fetch new log of the current segment; return whether there was any."""
        if self._drains and not self._is_final:
            # A part may have been written again, longer, so read the segment from its begin.
            self._is_final, self._data, self._passes_without = True, bytearray(), 0
        name = segment_name(self._source.timeline, self._position)
        generation = self._source.generation
        fetched_at = await extend_segment(self._archive, generation, name, self._data)
        self._fetched_at = fetched_at or self._fetched_at
        end = segment_start(name) + len(self._data)
        if end <= self._position:
            if time.monotonic() - self._gap_checked_s > _GAP_CHECK_S:
                self._gap_checked_s = time.monotonic()
                await self._require_no_gap(name)
            return False
        await asyncio.to_thread(write_segment, self._spool, name, self._data)
        self._position = end
        if len(self._data) == SEGMENT_BYTES:
            self._data = bytearray()
        return True

    async def _require_no_gap(self, name: str) -> None:
        """Require that no later segment is archived. Raises: BackupDamaged."""
        later = [one for one in await self._archive.segments(self._source.generation) if one > name]
        if later:
            raise damaged(
                name, f"the log before {later[0]} is missing; make a new standby in a new folder"
            )

    async def _wait_promoted(self) -> None:
        """Wait until this folder is the holder, then end recovery. Raises: StandbyLeft."""
        often = SparseLogger(log)
        own_id = read_identity(self._folder).folder_id
        while True:
            try:
                held = await self._archive.holder()
                if held is not None and held.folder_id == own_id:
                    await self._end_recovery(held)
                    return
                if held is not None:
                    require_generation(held, self._source)
            except (Unavailable, OSError) as error:
                often.warning("archive_not_read", error=str(error))
            await asyncio.sleep(min(self._every_s, 1.0))

    async def _end_recovery(self, held: Holder) -> None:
        """Replay the rest of the archived log, end recovery and remove the marker."""
        config = PostgresConfig(statement_timeout_s=90)
        postgres = Postgres(endpoints_of(self._folder).postgres_url, config)
        try:
            await self._drain(postgres)
            state: Any = await postgres.one(SQL.standby_state)
            log.info(
                "standby_promotes", generation=held.generation, committed_at=state["committed_at"]
            )
            if state["recovers"]:
                await postgres.value(SQL.promote)
            crash_point("standby_promoted")
            shutil.rmtree(self._spool, ignore_errors=True)
            (self._folder / RECOVERING_FILE).replace(self._folder / RECOVERED_FILE)
        finally:
            await postgres.close()

    async def _drain(self, postgres: Postgres) -> None:
        """Wait until everything archived is replayed."""
        self._drains = True
        replayed, since_s = -1, time.monotonic()
        while True:
            state: Any = await postgres.one(SQL.standby_state)
            if not state["recovers"]:
                return
            is_fetched = self._is_final and self._passes_without >= _PASSES_WITHOUT_MIN
            if state["replayed"] != replayed or not is_fetched:
                replayed, since_s = state["replayed"], time.monotonic()
            elif replayed >= self._position or time.monotonic() - since_s > _STUCK_S:
                return
            await asyncio.sleep(_FULL_PAUSE_S)


async def _first_of(tasks: list[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    """Wait for the first of `tasks` to end, and raise its error; the first in order wins."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first = next(task for task in tasks if task in done)
    first.result()
    return first


def source_of(folder: Path) -> Source:
    """What the standby in `folder` follows. Raises: FolderUnusable."""
    if not is_standby(folder):
        raise FolderUnusable(f"data folder {folder} is no standby: choose a new folder with --data")
    return msgspec.json.decode((folder / RECOVERING_FILE).read_bytes(), type=Source)


def require_generation(held: Holder, source: Source) -> None:
    """Require that the archive still has the generation of `source`. Raises: StandbyLeft."""
    if held.generation != source.generation:
        raise StandbyLeft(
            f"the archive is at generation {held.generation}, written by {held.folder} on"
            f" {held.host}, and this standby follows generation {source.generation}: make a new"
            " standby in a new folder"
        )
