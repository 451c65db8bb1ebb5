"""What an archive can restore, how far it is behind its primary, and the rehearsal of a restore."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from headrace.engines.backup.archive import Archive, Base, Holder, Verified
from headrace.engines.backup.base_backup import count_migrations
from headrace.engines.backup.restore import plan_before, plan_of, plan_restore, restore_plan
from headrace.engines.backup.wal import BackupDamaged, decode_part
from headrace.engines.embedded.data_folder import is_locked
from headrace.engines.embedded.servers import PostgresServer
from headrace.engines.embedded.settings import endpoints_of, read_machine
from headrace.engines.postgres import Postgres, PostgresConfig, Tx
from headrace.engines.sql import load_queries

COUNT_S: Final = 3600.0
SQL: Final = load_queries("headrace.engines")


@dataclass(frozen=True, slots=True)
class Restorable:
    """A base backup and the time up to which the log after it is archived."""

    base: Base
    until: datetime | None
    """None if it cannot be restored; `fault` has the reason, or that of damage in later log."""
    fault: str
    verified_at: datetime | None


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The holder of an archive and its backups, oldest first."""

    holder: Holder | None
    backups: list[Restorable]
    verified: Verified | None
    """The last successful rehearsal."""
    unreadable: dict[str, str]
    """Base backups with a damaged record: the fault of each by id."""


async def read_state(archive: Archive) -> ArchiveState:
    """The state of the archive. Raises: Unavailable, BackupDamaged."""
    rehearsals = {one.base: one for one in await archive.verified()}
    verified = [one for one in rehearsals.values() if not one.fault]
    backups = []
    stored: dict[int, dict[str, list[str]]] = {}
    bases, unreadable = await archive.bases_and_faults()
    for base in bases:
        rehearsal = rehearsals.get(base.id)
        if base.generation not in stored:
            stored[base.generation] = await archive.segments(base.generation)
        try:
            plan, _ = await plan_of(archive, base, stored[base.generation])
            until: datetime | None = plan.until
            fault = ""
        except BackupDamaged as error:
            until, fault = await _until_damage(archive, base, stored, error), error.text
        if until is not None and rehearsal is not None and rehearsal.fault:
            until, fault = None, rehearsal.fault
        at = rehearsal.at if rehearsal is not None and not rehearsal.fault else None
        backups.append(Restorable(base, until, fault, at))
    newest = verified[-1] if verified else None
    return ArchiveState(await archive.holder(), backups, newest, unreadable)


async def _until_damage(
    archive: Archive, base: Base, stored: Mapping[int, dict[str, list[str]]], error: BackupDamaged
) -> datetime | None:
    """The last time that `base` restores in spite of a damaged log."""
    try:
        plan = await plan_before(archive, [base], stored[base.generation], error)
    except BackupDamaged:
        return None
    return plan.until


async def newest_log(archive: Archive, generation: int) -> tuple[int, datetime] | None:
    """The end of the archived log, and until when it has every commit; None if it is damaged."""
    stored = await archive.segments(generation)
    if not stored:
        return None
    name, parts = list(stored.items())[-1]
    try:
        part = decode_part(*await archive.get_part(generation, name, parts[-1]))
    except BackupDamaged:
        return None
    return part.end, part.head.read_at


async def log_behind(postgres: Postgres) -> int | None:
    """Bytes of flushed log that are not archived; None if nothing archives."""
    state: Any = await postgres.one(SQL.log_state)
    if state["wal_status"] in (None, "lost"):
        return None
    return max(0, int(state["flushed"] - state["kept_from"]))


async def release_log(postgres: Postgres) -> None:
    """Keep no log for an archive any more: `backup.url` is not set."""
    await postgres.value(SQL.drop_archive_slot)


async def verify(
    archive: Archive, data_folder: Path, *, postgres_bin: str | None = None
) -> Verified:
    """Restore the newest state into a scratch folder, count all rows, and record the result.

    An older base backup is never used in place of a damaged one. The folder is beside `data_folder`
    and removed at the end; folders of killed runs as well.
    Raises: as `restore`.
    """
    began_s = time.monotonic()
    plan = await plan_restore(archive, None)
    if plan.unused:
        base_id = max(plan.unused)
        raise BackupDamaged(plan.unused[base_id], base_id=base_id)
    for left in data_folder.parent.glob(f"{data_folder.name}.verify-*"):
        if not is_locked(left):
            await asyncio.to_thread(shutil.rmtree, left)
    scratch = data_folder.with_name(f"{data_folder.name}.verify-{secrets.token_hex(4)}")
    try:
        restored = await restore_plan(archive, plan, scratch, to=None, postgres_bin=postgres_bin)
        tables, rows = await _count(scratch, plan.base, postgres_bin)
    except BackupDamaged as error:
        took_s = round(time.monotonic() - began_s, 1)
        failure = Verified(plan.base.id, datetime.now(UTC), took_s, fault=error.text)
        await archive.put_verified(failure)
        raise
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    verified = Verified(
        base=restored.base,
        at=datetime.now(UTC),
        took_s=round(time.monotonic() - began_s, 1),
        tables=tables,
        rows=rows,
        restored_to=restored.committed_at,
    )
    await archive.put_verified(verified)
    return verified


async def _count(folder: Path, base: Base, postgres_bin: str | None) -> tuple[int, int]:
    """Start the restored server; return its tables and their rows. Raises: BackupDamaged."""
    server = PostgresServer(
        folder, read_machine(), durable=True, extra={}, bin_setting=postgres_bin
    )
    postgres = Postgres(endpoints_of(folder).postgres_url, PostgresConfig())
    try:
        await server.start()
        migrations = await count_migrations(postgres)
        if migrations < base.migrations:
            raise BackupDamaged(
                f"the restored schema has {migrations} migrations, the backup had {base.migrations}"
            )
        async with postgres.session() as session:
            await session.allow_long_statements(COUNT_S)
            tables = await session.all(SQL.schema_tables)
            # Reading every row also verifies the checksum of every page.
            rows = [await _rows_of(session, table[0]) for table in tables]
        return len(rows), sum(rows)
    finally:
        await postgres.close()
        await server.stop(asyncio.Event())


async def _rows_of(session: Tx, table: str) -> int:
    # The name is quoted by the server.
    statement = f"SELECT count(*) FROM {table}"  # noqa: S608
    return int(await session.connection.fetchval(statement, timeout=COUNT_S))
