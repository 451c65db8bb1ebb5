"""Checks of `headrace doctor` for backups: archive, base backups, log, rehearsal, standby.

A data folder that is a standby, a former primary or an incomplete restore runs no engines of a
site. `special_folder` finds it, and its own checks replace those of the engines.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from headrace.cli.app_context import App
from headrace.cli.backup import mib, opened
from headrace.cli.doctor_engines import Finding, store_fault
from headrace.engines import Engines
from headrace.engines.backup.archive import Archive, BackupConfig, Fenced, Holder
from headrace.engines.backup.archive_store import ArchiveDown, ArchiveMissing
from headrace.engines.backup.archiver import read_identity, require_not_fenced
from headrace.engines.backup.service import is_late
from headrace.engines.backup.standby import is_standby, require_generation, source_of
from headrace.engines.backup.state import ArchiveState, log_behind, newest_log, read_state
from headrace.engines.embedded import FolderUnusable
from headrace.engines.embedded.data_folder import is_locked, require_recovered
from headrace.engines.embedded.settings import endpoints_of
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import load_queries
from headrace.kernel.errors import Conflict, HeadraceError
from headrace.kernel.terminal import pluralize

VERIFIED_AGE_MAX: Final = timedelta(days=30)
FIRST_BASE_S: Final = 600.0
"""A new generation may be without a base backup for this long."""
NOT_PROMOTED_FIX: Final = (
    "to replace that one with this folder, run `headrace promote`, then `headrace up`; only to look"
    " at it, run `headrace up --engines-only`"
)
STANDBY_BEHIND_BYTES_MAX: Final = 64 * 2**20
SQL: Final = load_queries("headrace.engines")


def special_folder(app: App) -> list[Finding] | None:
    """The findings for a folder that is no site: none for a standby; None for a site."""
    folder = app.data_folder
    if app.configured_urls().postgres_url:
        return None
    try:
        require_not_fenced(folder)
        if is_standby(folder):
            return []
        require_recovered(folder)
    except Fenced as error:
        fix = "use the other folder; this one may have commits that were not archived: keep it"
        return [Finding("data folder", "fail", f"it was the primary: {error.text}", fix)]
    except FolderUnusable as error:
        return [Finding("data folder", "fail", error.text, "delete it, and restore again")]
    except PermissionError:
        return None  # later checks name the folder and the user
    return None


async def check_backup(app: App, engines: Engines) -> list[Finding]:
    """Check that the archive can be written, its newest base backup, its log and its rehearsal."""
    config = app.config.section(BackupConfig)
    if app.configured_urls().postgres_url or config.url is None:
        return _check_unused(app, config)
    behind_bytes = await log_behind(engines.postgres)
    async with opened(app, config) as archive:
        found = await _check_writes(archive)
        if found[-1].state == "fail":
            return found
        try:
            state = await read_state(archive)
        except HeadraceError as error:
            return [*found, Finding("backup", "fail", error.text)]
        holder = state.holder
        other = _other_holder(holder, app.data_folder)
        if other is not None:
            return [*found, other]
        log = await newest_log(archive, holder.generation) if holder is not None else None
    return [
        *found,
        _check_base(state, config),
        _check_log(log[1] if log else None, config, behind_bytes),
        _check_verified(state),
    ]


def _check_unused(app: App, config: BackupConfig) -> list[Finding]:
    if not app.configured_urls().postgres_url:
        fix = "set backup.url (HEADRACE_BACKUP_URL) to another disk or a bucket: docs/backup.md"
        return [Finding("backup", "warn", "no backups: backup.url is not set", fix)]
    if config.url is None:
        return []
    text = "backup.url has no effect, because postgres.url is set"
    return [Finding("backup", "warn", text, "unset it; back that server up with its own tool")]


async def check_archive(app: App) -> list[Finding]:
    """Check that the archive can be written, while no engines run."""
    config = app.config.section(BackupConfig)
    if config.url is None or app.configured_urls().postgres_url:
        return []
    async with opened(app, config) as archive:
        found = await _check_writes(archive)
        if found[-1].state == "fail" or not (app.data_folder / "postgres").is_dir():
            return found
        other = _other_holder(await archive.holder(), app.data_folder)
        return [*found, other] if other is not None else found


def _other_holder(holder: Holder | None, folder: Path) -> Finding | None:
    """The finding for a restored folder that is not promoted, with the next step."""
    if holder is None or holder.folder_id == read_identity(folder).folder_id:
        return None
    text = f"this folder does not write to the archive: {holder.folder} on {holder.host} does"
    return Finding("backup", "warn", text, NOT_PROMOTED_FIX)


async def _check_writes(archive: Archive) -> list[Finding]:
    """Store, replace and delete an object, as the archiver and a promotion do."""
    try:
        fault = await store_fault(archive.store)
    except ArchiveMissing as error:
        return [Finding("backup archive", "warn", error.text, "start `headrace up`")]
    except ArchiveDown as error:
        return [Finding("backup archive", "fail", error.fault, error.fix)]
    if fault:
        text = f"{archive.name} {fault}: two primaries may both write, or none can be promoted"
        fix = "use a store with conditional writes (docs/s3.md), or a folder"
        return [Finding("backup archive", "fail", text, fix)]
    return [Finding("backup archive", "ok", f"stored and deleted an object in {archive.name}")]


def _check_base(state: ArchiveState, config: BackupConfig) -> Finding:
    now = datetime.now(UTC)
    holder = state.holder
    newest = state.backups[-1] if state.backups else None
    fix = "see log lines `base_backup_failed` of `headrace up`"
    if newest is None or (holder is not None and newest.base.generation != holder.generation):
        since = holder.since if holder is not None else now
        generation = holder.generation if holder is not None else 1
        age_s = (now - since).total_seconds()
        text = (
            f"no complete base backup of generation {generation}, begun {age_s:.0f} s ago: its"
            " commits cannot be restored yet"
        )
        if age_s < FIRST_BASE_S:
            return Finding("backup", "warn", text, f"wait a minute for it; else {fix}")
        return Finding("backup", "fail", text, fix)
    unreadable = [fault for one, fault in state.unreadable.items() if one > newest.base.id]
    if newest.fault or unreadable:
        text = newest.fault or unreadable[-1]
        return Finding("backup", "fail", text, "run `headrace backup`")
    age = now - newest.base.ended_at
    text = f"newest base backup {newest.base.id}, {_hours(age)} old"
    if age.total_seconds() > 2 * config.base_every_s:
        return Finding("backup", "fail", text, fix)
    return Finding("backup", "ok", text)


def _check_log(until: datetime | None, config: BackupConfig, behind_bytes: int | None) -> Finding:
    if behind_bytes is None:
        fix = "run `headrace up` with backup.url, and see its log lines `log_not_archived`"
        return Finding("backup log", "fail", "nothing archives the write-ahead log", fix)
    if behind_bytes == 0:
        return Finding("backup log", "ok", "all write-ahead log is archived")
    text = f"{mib(behind_bytes)} not archived"
    if until is None:
        return Finding("backup log", "warn", f"{text}, and none of this generation is archived yet")
    age_s = (datetime.now(UTC) - until).total_seconds()
    text = f"{text}, the newest archived log is {age_s:.0f} s old"
    if is_late(behind_bytes, until, config):
        fix = "see log lines `log_not_archived` of `headrace up`"
        return Finding("backup log", "fail", text, fix)
    return Finding("backup log", "ok", text)


def _check_verified(state: ArchiveState) -> Finding:
    fix = "run `headrace backup verify`, from cron each month"
    if state.verified is None:
        return Finding("backup verify", "warn", "no restore was tested yet", fix)
    age = datetime.now(UTC) - state.verified.at
    text = f"last test of a restore {_hours(age)} ago, {pluralize(state.verified.rows, 'row')}"
    if age > VERIFIED_AGE_MAX:
        return Finding("backup verify", "warn", text, fix)
    return Finding("backup verify", "ok", text)


def _hours(age: timedelta) -> str:
    return f"{age.total_seconds() / 3600:.1f} h"


async def check_standby(app: App) -> list[Finding]:
    """Check that the standby in the data folder runs and has replayed the archived log."""
    folder, config = app.data_folder, app.config.section(BackupConfig)
    if config.url is None:
        fix = "set backup.url (HEADRACE_BACKUP_URL) to the archive that it follows"
        return [Finding("standby", "fail", "backup.url is not set", fix)]
    async with opened(app, config) as archive:
        held = await archive.holder()
        if held is None:
            return [Finding("standby", "fail", f"{archive.name} has no primary")]
        try:
            return [await _standby_state(archive, held, folder)]
        except PostgresDown as error:
            if not error.is_starting:
                raise
            text = "is starting: it replays the log up to a consistent state"
            return [Finding("standby", "warn", text, "run this again in a minute")]


async def _standby_state(archive: Archive, held: Holder, folder: Path) -> Finding:
    source, runs = source_of(folder), is_locked(folder)
    fix = "" if runs else "start `headrace standby`"
    if held.folder_id == read_identity(folder).folder_id:
        text = f"promoted to generation {held.generation}, and its recovery has not ended"
        return Finding("standby", "warn" if runs else "fail", text, fix)
    try:
        require_generation(held, source)
    except Conflict as error:
        return Finding("standby", "fail", error.text, "`headrace standby --data NEW`")
    text = f"follows {held.folder} on {held.host}, generation {held.generation}"
    if not runs:
        return Finding("standby", "fail", f"{text}, and does not run", fix)
    log = await newest_log(archive, source.generation)
    if log is None:
        return Finding("standby", "fail", f"{text}, whose newest archived log is damaged")
    age_s = (datetime.now(UTC) - log[1]).total_seconds()
    behind_bytes = max(0, log[0] - await _replayed(folder))
    text = f"{text}: {mib(behind_bytes)} to replay, newest archived log {age_s:.0f} s old"
    if behind_bytes > STANDBY_BEHIND_BYTES_MAX:
        return Finding("standby", "warn", text, "see its log lines `log_not_fetched`")
    return Finding("standby", "ok", text)


async def _replayed(folder: Path) -> int:
    """The position up to which the running standby has replayed. Raises: Unavailable."""
    postgres = Postgres(endpoints_of(folder).postgres_url, PostgresConfig())
    try:
        state: Any = await postgres.one(SQL.standby_state)
    finally:
        await postgres.close()
    return int(state["replayed"] or 0)
