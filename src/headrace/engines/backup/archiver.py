"""The archiver of a primary: writes new log to the archive, and takes base backups.

It runs in the process of `headrace up`, beside the server, and reads the server's log files up to
the flush position, as PostgreSQL's own senders do. A replication slot keeps the log that is not in
the archive yet, up to `backup.log_kept_max`. So no commit waits for the archive. A part of a
segment has its offset as name: written twice, after a crash, it has the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import asyncpg
import msgspec

from headrace.engines.backup.archive import (
    Archive,
    ArchiveTaken,
    BackupConfig,
    Fenced,
    Holder,
    fenced_by,
)
from headrace.engines.backup.base_backup import take_base
from headrace.engines.backup.wal import (
    FULL,
    SEGMENT_BYTES,
    BackupDamaged,
    decode_part,
    encode_part,
    format_lsn,
    part_name,
    part_offset,
    read_segment,
    segment_floor,
    segment_name,
    segment_start,
    unbroken,
)
from headrace.engines.blobs import BlobChanged
from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel import metrics
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import wait_event

IDENTITY_FILE: Final = "backup-identity"
"""In the data folder: its id, and that of the archive it holds or held."""
FENCED_FILE: Final = "fenced"
"""In the data folder of a former primary: the reason why it must not run."""
_BASE_RETRY_S: Final = 60.0
_SMALL_PARTS_MAX: Final = 32
_FAULTS: Final = (HeadraceError, OSError, asyncpg.PostgresError)
"""Backups must not stop the site, so these are logged, counted, and tried again."""
SQL: Final = load_queries("headrace.engines")
log = logger(__name__)
LAG: Final = metrics.gauge(
    "backup_archive_lag_seconds",
    "Seconds since all flushed log of PostgreSQL was in the archive: what a lost disk would lose.",
)
LOG_KEPT: Final = metrics.gauge(
    "backup_log_kept_bytes", "Log of PostgreSQL that is not in the archive yet."
)
BASE_AGE: Final = metrics.gauge(
    "backup_base_age_seconds", "Age of the newest base backup; -1 if there is none."
)
FAILURES: Final = metrics.counter(
    "backup_failures_total", "Failed writes to the archive, by what failed.", what=("log", "base")
)


class Identity(msgspec.Struct, frozen=True):
    """The id of a data folder, and the archive that it holds or held."""

    folder_id: str
    archive_id: str = ""


def read_identity(folder: Path) -> Identity:
    """The identity of the data folder, created on first use."""
    path = folder / IDENTITY_FILE
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    identity = Identity(secrets.token_hex(8))
    write_identity(folder, identity)
    return identity


def write_identity(folder: Path, identity: Identity) -> None:
    """Replace the identity of the data folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".{IDENTITY_FILE}"
    draft.write_bytes(msgspec.json.encode(identity))
    draft.replace(folder / IDENTITY_FILE)


def require_not_fenced(folder: Path) -> None:
    """Refuse a former primary, also while the archive is unavailable. Raises: Fenced."""
    path = folder / FENCED_FILE
    if path.exists():
        raise Fenced(json.loads(path.read_text())["reason"])


def note_fenced(folder: Path, error: Fenced) -> None:
    """Record that this folder is a former primary."""
    (folder / FENCED_FILE).write_text(json.dumps({"reason": error.text}))


def require_holder(holder: Holder | None, identity: Identity, archive: Archive) -> None:
    """Require that `holder` is this folder or nobody. Raises: Fenced, ArchiveTaken."""
    if holder is None or holder.folder_id == identity.folder_id:
        return
    if identity.archive_id == holder.archive_id:
        raise fenced_by(holder)
    raise ArchiveTaken(
        f"the archive {archive.name} is written by data folder {holder.folder} on {holder.host}:"
        " choose another backup.url; if this folder is to replace that one, run `headrace promote`"
    )


def new_holder(held: Holder | None, folder: Path, *, generation: int) -> Holder:
    """The data folder as the holder after `held`, in a new session."""
    return Holder(
        archive_id=held.archive_id if held is not None else secrets.token_hex(8),
        generation=generation,
        folder_id=read_identity(folder).folder_id,
        session=secrets.token_hex(8),
        host=socket.gethostname(),
        folder=str(folder),
        since=datetime.now(UTC),
    )


class Archiver:
    """Archives the log of the running PostgreSQL of data folder `folder`."""

    def __init__(
        self,
        archive: Archive,
        postgres: Postgres,
        folder: Path,
        config: BackupConfig,
        *,
        postgres_bin: str | None = None,
    ) -> None:
        self._postgres_bin = postgres_bin
        self.archive = archive
        self._postgres = postgres
        self._folder = folder
        self._config = config
        self._wal = folder / "postgres" / "pg_wal"
        self._holder: Holder | None = None
        self._position = 0
        """Everything before it, in this generation, is in the archive or in an earlier gap."""
        self._small: list[int] = []
        """The positions of parts of the current segment that are not written as one yet."""
        self._complete_s = time.monotonic()
        self._has_gap = False
        self._opened = asyncio.Event()

    async def run(self, stop: asyncio.Event, *, version: str) -> None:
        """Archive until `stop`. Raises: Fenced, ArchiveTaken."""
        often = SparseLogger(log)
        bases = asyncio.create_task(self._keep_bases(version))
        try:
            while not stop.is_set() and not bases.done():
                try:
                    await self.step()
                except (Fenced, ArchiveTaken):
                    raise
                except _FAULTS as error:
                    metrics.bound(FAILURES, "backup_failures_total", what="log").inc()
                    often.warning("log_not_archived", error=str(error))
                LAG.set(time.monotonic() - self._complete_s)
                await wait_event(stop, self._config.every_s)
        finally:
            bases.cancel()
            await asyncio.gather(bases, return_exceptions=True)
        if bases.done() and not bases.cancelled():
            bases.result()

    async def close(self) -> None:
        """Close the connections to PostgreSQL."""
        await self._postgres.close()

    async def step(self) -> None:
        """Write all flushed log to the archive. Raises: Fenced, ArchiveTaken, Unavailable."""
        if self._holder is None:
            self._holder = await self._open()
            self._opened.set()
        await self.archive.require_session(self._holder.session)
        state = await self._state()
        if state["wal_status"] == "lost":
            state = await self._begin_after_gap()
        flushed = state["flushed"]
        LOG_KEPT.set(flushed - self._position)
        while self._position < flushed:
            await self._write_part(flushed, state["read_at"])
            LOG_KEPT.set(flushed - self._position)
        if self._position > state["kept_from"]:
            position = format_lsn(self._position)
            await self._postgres.value(SQL.advance_archive_slot, position=position)
        self._complete_s = time.monotonic()

    async def _write_part(self, flushed: int, read_at: datetime) -> None:
        """Write the log from the position to `flushed` or to the end of the segment."""
        assert self._holder is not None
        generation = self._holder.generation
        name = segment_name(self._holder.timeline, self._position)
        first = segment_start(name)
        end = min(flushed, first + SEGMENT_BYTES)
        small = [*self._small, self._position]
        begin, covered = self._position, list[str]()
        part = ""
        if end == first + SEGMENT_BYTES:
            begin, part, small = first, FULL, []
            covered = [one for one in await self.archive.parts(generation, name) if one != FULL]
        elif len(small) > _SMALL_PARTS_MAX:
            # Write them again as one: a quiet segment would get thousands.
            begin, covered, small = small[0], [part_name(one) for one in small[1:-1]], []

        def read() -> bytes:
            data = read_segment(self._wal, name, begin - first, end - first)
            return encode_part(begin, data, read_at)

        stored = await asyncio.to_thread(read)
        await self.archive.put_part(generation, name, part or part_name(begin), stored)
        self._position, self._small = end, small
        await self.archive.drop_parts(generation, name, covered)

    async def _open(self) -> Holder:
        """Begin a session as the holder, and continue at the end of the archived log."""
        state = await self._state()
        identity = read_identity(self._folder)
        held = await self.archive.holder()
        require_holder(held, identity, self.archive)
        if held is not None and held.system not in ("", state["system"]):
            raise ArchiveTaken(
                f"the archive {self.archive.name} has another database (system {held.system}, here"
                f" {state['system']}): choose another backup.url"
            )
        if held is not None and held.timeline not in (0, state["timeline"]):
            raise self._diverged(f"its log is on timeline {held.timeline}")
        generation = held.generation if held is not None else 1
        own = new_holder(held, self._folder, generation=generation)
        own = msgspec.structs.replace(own, system=state["system"], timeline=state["timeline"])
        segments = await self.archive.segments(own.generation)
        self._position = await self._archived_end(own.generation, segments)
        if self._position > state["flushed"]:
            raise self._diverged(f"it ends at {format_lsn(self._position)}")
        try:
            await self.archive.claim(own)
        except BlobChanged:
            require_holder(await self.archive.holder(), identity, self.archive)
            raise
        write_identity(self._folder, Identity(identity.folder_id, own.archive_id))
        if state["wal_status"] in (None, "lost"):
            state = await self._new_slot()
        first = segment_floor(state["kept_from"])
        if first > self._position:
            # Also for an empty archive. A part of a segment without its begin is of no use.
            self._position, self._has_gap = first, bool(segments)
        return own

    async def _archived_end(self, generation: int, segments: dict[str, list[str]]) -> int:
        if not segments:
            return 0
        name, parts = list(segments.items())[-1]
        key, stored = await self.archive.get_part(generation, name, parts[-1])
        try:
            return (await asyncio.to_thread(decode_part, key, stored)).end
        except BackupDamaged as error:
            # Write it again; if its log is not kept any more, there is a gap.
            log.warning("archive_damaged", error=error.text)
            return segment_start(name) + part_offset(parts[-1])

    def _diverged(self, fact: str) -> ArchiveTaken:
        return ArchiveTaken(
            f"the archive {self.archive.name} is ahead of the database in {self._folder} ({fact}):"
            " this is an old copy; use the newer data folder, or run `headrace promote --again` to"
            " begin a new generation with this one"
        )

    async def _begin_after_gap(self) -> Any:
        """Continue after PostgreSQL removed log that was not archived."""
        state = await self._new_slot()
        log.error(
            "archive_gap", begin=format_lsn(self._position), end=format_lsn(state["kept_from"])
        )
        self._position, self._small = segment_floor(state["kept_from"]), []
        self._has_gap = True
        return state

    async def _new_slot(self) -> Any:
        await self._postgres.value(SQL.drop_archive_slot)
        await self._postgres.value(SQL.create_archive_slot)
        return await self._state()

    async def _state(self) -> Any:
        return await self._postgres.one(SQL.log_state)

    async def _keep_bases(self, version: str) -> None:
        """Take base backups when they are due, and delete those that are no longer needed."""
        often = SparseLogger(log)
        await self._opened.wait()
        is_pruned = False
        while True:
            try:
                if not is_pruned:
                    # `backup.keep` may be shorter since the last start, to free a full archive.
                    await self._prune()
                    is_pruned = True
                wait_s = await self._take_due_base(version)
            except (Fenced, ArchiveTaken):
                raise
            except _FAULTS as error:
                metrics.bound(FAILURES, "backup_failures_total", what="base").inc()
                often.warning("base_backup_failed", error=str(error))
                wait_s = _BASE_RETRY_S
            await asyncio.sleep(min(wait_s, _BASE_RETRY_S))

    async def _take_due_base(self, version: str) -> float:
        """Take a base backup if it is due; return the seconds until the next one is."""
        assert self._holder is not None
        generation = self._holder.generation
        bases = [base for base in await self.archive.bases() if base.generation == generation]
        newest = bases[-1] if bases else None
        age_s = (datetime.now(UTC) - newest.ended_at).total_seconds() if newest else -1.0
        BASE_AGE.set(age_s)
        if newest is not None and age_s < self._config.base_every_s and not self._has_gap:
            _, has_gap = unbroken(await self.archive.segments(generation), newest.start)
            if not has_gap:
                return self._config.base_every_s - age_s
        self._has_gap = False
        await self._prune()
        base = await take_base(
            self.archive,
            self._postgres,
            self._folder,
            holder=self._holder,
            version=version,
            postgres_bin=self._postgres_bin,
        )
        log.info("base_backup_taken", id=base.id, stored_bytes=base.stored_bytes)
        BASE_AGE.set(0)
        return self._config.base_every_s

    async def _prune(self) -> None:
        """Delete what no restore within `backup.keep` needs."""
        oldest_needed = datetime.now(UTC) - timedelta(seconds=self._config.keep_s)
        deleted = await self.archive.prune(oldest_needed)
        if deleted:
            log.info("base_backups_deleted", ids=deleted)
