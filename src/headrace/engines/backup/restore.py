"""Restore of the newest state, or of a point in time, into a new data folder.

The newest base backup before the time is unpacked and compared with the server's manifest, then
PostgreSQL replays the archived log up to the time. Without log of a commit after the time, it
replays all. If that backup is damaged, the one before it and the log since then restore the same
state. The folder has a marker until the end, so that an interrupted restore is never started as a
site.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from headrace.engines.backup.archive import (
    KEY_FILES,
    Archive,
    Base,
    base_id_at,
)
from headrace.engines.backup.archive_store import ArchiveMissing
from headrace.engines.backup.base_backup import fetch_base
from headrace.engines.backup.wal import (
    FULL,
    SEGMENT_BYTES,
    BackupDamaged,
    damaged,
    decode_part,
    format_lsn,
    part_offset,
    segment_name,
    segment_start,
    unbroken,
)
from headrace.engines.embedded.data_folder import (
    RECOVERED_FILE,
    RECOVERING_FILE,
    FolderLock,
    StartFailed,
    lay_out,
    usable_folder,
)
from headrace.engines.embedded.servers import PostgresServer
from headrace.engines.embedded.settings import endpoints_of, read_machine
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import load_queries
from headrace.kernel.errors import Conflict, InvalidInput
from headrace.kernel.resilience import crash_point

SPOOL: Final = "archive-log"
"""In PostgreSQL's folder: log that it has not replayed yet."""
RECOVERY_S: Final = 24 * 3600.0
_AFTER_TIME: Final = timedelta(minutes=1)
"""Log of this much later is fetched: a commit reaches the log after its time was taken."""
_NOT_REACHED: Final = "recovery ended before configured recovery target was reached"
_MARGIN_BYTES: Final = 256 * 2**20
_OF_ROLES: Final = {"run"}
"""Created by any role before it uses its data folder, for its metrics."""
SQL: Final = load_queries("headrace.engines")


class RestoreFolderExists(Conflict):
    """A restore needs a new folder."""

    code = "backup.folder_exists"


class OutsideArchive(InvalidInput):
    """The archive cannot restore this time."""

    code = "backup.outside_archive"


class NoSpace(InvalidInput):
    """The disk has no space for the restored data."""

    code = "backup.no_space"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a restore reads: a base backup and the segments after it."""

    base: Base
    segments: list[str]
    until: datetime
    """Every commit up to then is in the archived log."""
    end: int
    """The position after the archived log."""
    unused: Mapping[str, str]
    """Damaged base backups in its place: the fault of each by id."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A finished restore."""

    folder: str
    base: str
    generation: int
    committed_at: datetime | None
    """The time of the last restored commit; None if the log after the base has none."""
    log_bytes: int
    unused: Mapping[str, str]
    """Newer base backups that are damaged: the fault of each by id."""


async def plan_restore(
    archive: Archive, to: datetime | None, *, unused: Mapping[str, str] = MappingProxyType({})
) -> Plan:
    """The backup and log for a restore to `to`, None for the newest state, without `unused` ones.

    Raises: ArchiveMissing, OutsideArchive, BackupDamaged.
    """
    found, unreadable = await archive.bases_and_faults()
    faults = unreadable | dict(unused)
    bases = [base for base in found if base.id not in faults]
    if not bases and faults:
        raise _all_damaged(faults)
    if not bases:
        raise ArchiveMissing(
            f"{archive.name} has no complete base backup: `headrace up` takes the first one within"
            " minutes of its start, `headrace backup` takes one now"
        )
    base = bases[-1]
    if to is not None:
        # An id begins with the time at which its backup began.
        faults = {one: fault for one, fault in faults.items() if one < base_id_at(to)}
        base = _last_base(bases, to, faults)
    stored = await archive.segments(base.generation)
    try:
        plan, has_gap = await plan_of(archive, base, stored)
    except BackupDamaged as error:
        bases = [one for one in bases if one.generation == base.generation and one.id <= base.id]
        plan, has_gap = await plan_before(archive, bases, stored, error), True
        if to is None or to > plan.until:
            raise _with_time(error, plan.until) from error
    if to is not None and to > plan.until:
        later = [one for one in bases if one.ended_at > to]
        rest = f", or from {_text(later[0].ended_at)} on" if later else ""
        raise OutsideArchive(
            f"{_text(to)} is after the archived log: choose a time up to {_text(plan.until)}{rest},"
            " or leave out --to for the newest state"
        )
    if to is None and has_gap:
        raise OutsideArchive(
            f"the archived log has a gap after {_text(plan.until)}, and no base backup"
            f" {'after it can be used' if faults else 'is newer'}: restore with --to"
            f" {_text(plan.until)}"
        )
    if to is None and await archive.has_log_after(base.generation):
        raise OutsideArchive(
            f"no base backup of the newest generation can be used, so its commits cannot be"
            f" restored: for the last state of generation {base.generation} restore with --to"
            f" {_text(plan.until)}"
        )
    newer = {one: fault for one, fault in faults.items() if one > base.id}
    return replace(plan, unused=newer)


def _last_base(bases: Sequence[Base], to: datetime, faults: Mapping[str, str]) -> Base:
    """The newest base backup before `to`. Raises: OutsideArchive, BackupDamaged."""
    older = [one for one in bases if one.ended_at <= to]
    if not older and faults:
        raise _all_damaged(faults)
    if not older:
        raise OutsideArchive(
            f"{_text(to)} is before the oldest base backup: choose a time from"
            f" {_text(bases[0].ended_at)} on"
        )
    return older[-1]


def _all_damaged(faults: Mapping[str, str]) -> BackupDamaged:
    texts = "; ".join(faults[one] for one in sorted(faults))
    return BackupDamaged(f"no undamaged base backup is left for this restore: {texts}")


async def plan_of(
    archive: Archive, base: Base, stored: Mapping[str, Sequence[str]]
) -> tuple[Plan, bool]:
    """A restore of all log after `base`, and whether it ends at a gap. Raises: BackupDamaged."""
    names, has_gap = unbroken(stored, base.start)
    if not names:
        raise _log_missing(base, base.start)
    data = bytearray()
    until = await extend_segment(archive, base.generation, names[-1], data)
    end = segment_start(names[-1]) + len(data)
    if until is None or end < base.end:
        raise _log_missing(base, end)
    return Plan(base, names, until, end, {}), has_gap


async def plan_before(
    archive: Archive,
    bases: Sequence[Base],
    stored: Mapping[str, Sequence[str]],
    error: BackupDamaged,
) -> Plan:
    """The latest restore from the log before the damage of its newest segment. Raises: `error`."""
    for base in reversed(bases):
        names, _ = unbroken(stored, base.start)
        data, until = bytearray(), error.known_until
        if until is None:
            names = names[:-1]
        if until is None and names:
            until = await extend_segment(archive, base.generation, names[-1], data)
        if until is not None and until >= base.ended_at:
            return Plan(base, names, until, segment_start(names[-1]) + len(data), {})
    raise error


def _with_time(error: BackupDamaged, until: datetime) -> BackupDamaged:
    """`error` with the last time that can be restored."""
    return BackupDamaged(f"{error.text}; the log before the damage ends at {_text(until)}")


def _log_missing(base: Base, position: int) -> BackupDamaged:
    key = f"log/{base.generation:06d}/{segment_name(base.timeline, position)}"
    return damaged(key, f"the log of base backup {base.id} is missing from there on")


async def restore(
    archive: Archive, folder: Path, *, to: datetime | None, postgres_bin: str | None = None
) -> Restored:
    """Restore into the new folder `folder`, from the newest base backup that is not damaged.

    Then stop the server there. A failed restore removes the folder. Raises: RestoreFolderExists,
    OutsideArchive, NoSpace, ArchiveMissing, BackupDamaged, StartFailed.
    """
    plan = await plan_restore(archive, to)
    while True:
        try:
            return await restore_plan(archive, plan, folder, to=to, postgres_bin=postgres_bin)
        except BackupDamaged as error:
            if not error.base_id:
                raise
            unused = {**plan.unused, error.base_id: error.text}
        plan = await plan_restore(archive, to, unused=unused)


async def restore_plan(
    archive: Archive,
    plan: Plan,
    folder: Path,
    *,
    to: datetime | None,
    postgres_bin: str | None = None,
) -> Restored:
    """Restore from the base backup of `plan` and no other. Raises: as `restore`."""
    async with new_folder(folder) as path:
        _require_space(path, plan)
        await fetch_base(archive, plan.base, path)
        spool = path / "postgres" / SPOOL
        spool.mkdir(mode=0o700)
        log_bytes = await fetch_log(archive, plan, spool, to=to)
        crash_point("restore_recovery")
        replayed, committed_at = await _recover(path, to, postgres_bin)
        if to is None and replayed + SEGMENT_BYTES < plan.end:
            raise BackupDamaged(
                f"PostgreSQL replayed the log up to {format_lsn(replayed)}, and the archive ends at"
                f" {format_lsn(plan.end)}: restore to a time before the damage with --to"
            )
        shutil.rmtree(spool)
        (path / RECOVERING_FILE).replace(path / RECOVERED_FILE)
    base = plan.base
    return Restored(str(path), base.id, base.generation, committed_at, log_bytes, plan.unused)


@asynccontextmanager
async def new_folder(folder: Path, *, repeats: bool = False) -> AsyncIterator[Path]:
    """Create a data folder with the marker of recovery, and hold its lock.

    With `repeats`, one whose recovery did not begin is used again. If the block fails, what it
    created is removed. Raises: RestoreFolderExists, FolderUnusable, FolderInUse.
    """
    was_there = _require_new(folder, repeats=repeats)
    path = usable_folder(folder)
    lock = FolderLock(path)
    lock.acquire()
    try:
        if (path / "postgres").exists():
            await asyncio.to_thread(shutil.rmtree, path / "postgres")
        for name in KEY_FILES:
            (path / name).unlink(missing_ok=True)
        lay_out(path)
        (path / RECOVERING_FILE).touch()
        yield path
    except BaseException:
        await asyncio.to_thread(_remove_contents, path)
        if not was_there:
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        lock.release()


def _require_new(folder: Path, *, repeats: bool) -> bool:
    """Require a folder that may be used; return whether it exists. Raises: RestoreFolderExists."""
    if not folder.exists():
        return False
    if repeats and (folder / RECOVERING_FILE).exists():
        return True
    if (folder / RECOVERING_FILE).exists():
        raise RestoreFolderExists(
            f"{folder} has a restore whose process was ended: delete the folder and run the same"
            " command again, or choose a new folder with --data"
        )
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - _OF_ROLES:
        raise RestoreFolderExists(f"{folder} exists: choose a new folder with --data")
    return True


def _remove_contents(folder: Path) -> None:
    """Remove what `new_folder` and its block created, the marker last."""
    for path in [one for one in folder.iterdir() if one.name not in {RECOVERING_FILE, *_OF_ROLES}]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    (folder / RECOVERING_FILE).unlink(missing_ok=True)


async def extend_segment(
    archive: Archive, generation: int, name: str, data: bytearray
) -> datetime | None:
    """Append archived bytes of a segment to `data`.

    Return until when `data` has every commit; None if nothing was added. Raises: BackupDamaged.
    """
    read_at = None
    for one in _needed(await archive.parts(generation, name), len(data)):
        offset = part_offset(one)
        try:
            key, stored = await archive.get_part(generation, name, one)
            part = await asyncio.to_thread(decode_part, key, stored)
        except BackupDamaged as error:
            # The archiver deletes a part after it has written a longer one with its bytes.
            if FULL in await archive.parts(generation, name) and one != FULL:
                return await extend_segment(archive, generation, name, data)
            if offset < len(data):
                continue
            error.known_until = read_at
            raise
        if offset > len(data):
            gap = damaged(key, f"the log between offset {len(data)} and {offset} is missing")
            gap.known_until = read_at
            raise gap
        if offset + len(part.data) > len(data):
            data[offset:] = part.data
            read_at = part.head.read_at
    return read_at


def _needed(parts: list[str], size_bytes: int) -> list[str]:
    """The parts that may extend the first `size_bytes` of a segment, in order."""
    if FULL in parts:
        return [FULL]
    index = sum(part_offset(one) < size_bytes for one in parts)
    has_gap = index < len(parts) and part_offset(parts[index]) > size_bytes
    # An earlier part was written again, longer, if the next one does not continue here.
    return parts[index - 1 if has_gap and index else index :]


def write_segment(spool: Path, name: str, data: bytearray) -> None:
    """Write a segment for PostgreSQL, which needs its full size."""
    draft = spool / f".{name}"
    with draft.open("wb") as file:
        file.write(data)
        file.truncate(SEGMENT_BYTES)
    # PostgreSQL may run as another user, and the data folder is private.
    draft.chmod(0o644)
    draft.replace(spool / name)


async def fetch_log(archive: Archive, plan: Plan, spool: Path, *, to: datetime | None) -> int:
    """Fetch the log of `plan` up to the commits of `to`; return its bytes.

    Damage after them does not matter. Raises: BackupDamaged.
    """
    size_bytes, until = 0, None
    for name in plan.segments:
        data = bytearray()
        try:
            read_at = await extend_segment(archive, plan.base.generation, name, data)
        except BackupDamaged as error:
            until = error.known_until or until
            if until is None or until < plan.base.ended_at:
                raise
            if to is None or to > until:
                raise _with_time(error, until) from error
            await asyncio.to_thread(write_segment, spool, name, data)
            return size_bytes + len(data)
        until = read_at or until
        await asyncio.to_thread(write_segment, spool, name, data)
        size_bytes += len(data)
        is_needed = name <= segment_name(plan.base.timeline, plan.base.end)
        if to is not None and read_at and read_at > to + _AFTER_TIME and not is_needed:
            break
    return size_bytes


def recovery_settings(command: str, **others: str) -> dict[str, str]:
    """Settings of a server that replays the spooled log; `command` is cp or mv."""
    restore_command = f"test -f {SPOOL}/%f && {command} {SPOOL}/%f %p"
    return {"restore_command": restore_command, **others}


async def _recover(
    folder: Path, to: datetime | None, postgres_bin: str | None
) -> tuple[int, datetime | None]:
    """Replay the spooled log; return the reached position and the last commit's time."""
    (folder / "postgres" / "recovery.signal").touch()
    # The server then accepts connections only after the end of recovery.
    settings = recovery_settings("cp", hot_standby="off")
    target = {}
    if to is not None:
        # The server reads this setting before the names of time zones, such as Z.
        time = to.astimezone(UTC).isoformat(sep=" ", timespec="microseconds")
        target = {"recovery_target_time": time, "recovery_target_action": "promote"}
    try:
        return await _replay(folder, settings | target, postgres_bin)
    except StartFailed as error:
        if _NOT_REACHED not in error.text:
            raise
    # No commit is after the time, so all log belongs to the restored state.
    return await _replay(folder, settings, postgres_bin)


async def _replay(
    folder: Path, settings: dict[str, str], postgres_bin: str | None
) -> tuple[int, datetime | None]:
    server = PostgresServer(
        folder, read_machine(), durable=True, extra=settings, bin_setting=postgres_bin
    )
    try:
        await server.start(ready_s=RECOVERY_S)
        postgres = Postgres(endpoints_of(folder).postgres_url, PostgresConfig())
        try:
            state: Any = await postgres.one(SQL.standby_state)
        finally:
            await postgres.close()
        return state["replayed"], state["committed_at"]
    finally:
        await server.stop(asyncio.Event())


def _require_space(folder: Path, plan: Plan) -> None:
    needed_bytes = plan.base.size_bytes + len(plan.segments) * 2 * SEGMENT_BYTES + _MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise NoSpace(
            f"{folder}: {free_bytes // 2**20:,} MiB are free on its disk, the restore needs"
            f" {needed_bytes // 2**20:,} MiB: choose another disk with --data"
        )


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
