"""Restore of the newest state, or of a point in time, into a new data folder.

The newest base backup before the time is unpacked and compared with the server's manifest, then
PostgreSQL replays the archived log up to the time. Without log of a commit after the time, it
replays all. The folder has a marker until the end, so that an interrupted restore is never started
as a site.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import tarfile
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec

from headrace.engines.backup.archive import KEY_FILES, Archive, ArchiveMissing, Base
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


@dataclass(frozen=True, slots=True)
class Restored:
    """A finished restore."""

    folder: str
    base: str
    generation: int
    committed_at: datetime | None
    """The time of the last restored commit; None if the log after the base has none."""
    log_bytes: int


async def plan_restore(archive: Archive, to: datetime | None) -> Plan:
    """The backup and log for a restore to `to`, None for the newest state.

    Raises: ArchiveMissing, OutsideArchive, BackupDamaged.
    """
    bases = await archive.bases()
    if not bases:
        raise ArchiveMissing(
            f"{archive.name} has no complete base backup: `headrace up` takes the first one within"
            " minutes of its start, `headrace backup` takes one now"
        )
    base = bases[-1]
    if to is not None:
        older = [one for one in bases if one.ended_at <= to]
        if not older:
            raise OutsideArchive(
                f"{_text(to)} is before the oldest base backup: choose a time from"
                f" {_text(bases[0].ended_at)} on"
            )
        base = older[-1]
    plan, has_gap = await plan_of(archive, base, await archive.segments(base.generation))
    if to is not None and to > plan.until:
        later = [one for one in bases if one.ended_at > to]
        rest = f", or from {_text(later[0].ended_at)} on" if later else ""
        raise OutsideArchive(
            f"{_text(to)} is after the archived log: choose a time up to {_text(plan.until)}{rest},"
            " or leave out --to for the newest state"
        )
    if to is None and has_gap:
        raise OutsideArchive(
            f"the archived log has a gap after {_text(plan.until)}, and no base backup is newer:"
            f" restore with --to {_text(plan.until)}"
        )
    return plan


async def plan_of(
    archive: Archive, base: Base, stored: Mapping[str, Sequence[str]]
) -> tuple[Plan, bool]:
    """A restore of all log after `base`, and whether it ends at a gap. Raises: BackupDamaged."""
    names, has_gap = unbroken(stored, base.start)
    if not names:
        raise damaged(f"base/{base.id}", f"its log from {format_lsn(base.start)} on is missing")
    data = bytearray()
    until = await extend_segment(archive, base.generation, names[-1], data)
    end = segment_start(names[-1]) + len(data)
    if until is None or end < base.end:
        raise damaged(f"base/{base.id}", f"its log after {format_lsn(end)} is missing")
    return Plan(base, names, until, end), has_gap


async def restore(
    archive: Archive, folder: Path, *, to: datetime | None, postgres_bin: str | None = None
) -> Restored:
    """Restore into the new folder `folder`, then stop the server there.

    Raises: RestoreFolderExists, OutsideArchive, NoSpace, ArchiveMissing, BackupDamaged,
    StartFailed.
    """
    plan = await plan_restore(archive, to)
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
        (path / RECOVERING_FILE).unlink()
    return Restored(str(path), plan.base.id, plan.base.generation, committed_at, log_bytes)


@asynccontextmanager
async def new_folder(folder: Path, *, repeats: bool = False) -> AsyncIterator[Path]:
    """Create a data folder with the marker of recovery, and hold its lock.

    With `repeats`, one whose recovery did not begin is used again.

    Raises: RestoreFolderExists, FolderUnusable, FolderInUse.
    """
    if not (repeats and (folder / RECOVERING_FILE).exists()):
        _require_new(folder)
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
    finally:
        lock.release()


def _require_new(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - _OF_ROLES:
        raise RestoreFolderExists(f"{folder} exists: choose a new folder with --data")


async def fetch_base(archive: Archive, base: Base, folder: Path) -> None:
    """Unpack `base` into `folder`, verified, with its keys. Raises: BackupDamaged, Unavailable."""
    target = folder / "postgres"
    target.mkdir(mode=0o700)
    pieces = _Pieces(archive, base, asyncio.get_running_loop())
    try:
        await asyncio.to_thread(_unpack, pieces, target)
    finally:
        pieces.is_cancelled = True
    await verify_base(folder)
    for name in base.keys:
        with _private(folder / name) as file:
            file.write(await archive.get(f"base/{base.id}/{name}"))


@dataclass
class _Pieces:
    """The pieces of a base backup as one file, for a thread beside the loop."""

    archive: Archive
    base: Base
    loop: asyncio.AbstractEventLoop
    is_cancelled: bool = False
    _next: int = 0
    _rest: memoryview = field(default_factory=lambda: memoryview(b""))

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`."""
        if not self._rest and self._next < len(self.base.pieces):
            self._rest = memoryview(self._fetch(self._next))
            self._next += 1
        data, self._rest = self._rest[:size], self._rest[size:]
        return bytes(data)

    def _fetch(self, index: int) -> bytes:
        if self.is_cancelled:
            raise OSError("the restore was cancelled")
        key = self.base.piece(index)
        stored = asyncio.run_coroutine_threadsafe(self.archive.get(key), self.loop).result()
        if hashlib.sha256(stored).hexdigest() != self.base.pieces[index]:
            raise damaged(key, f"it has {len(stored)} bytes, and its checksum differs")
        return zlib.decompress(stored)


def _unpack(pieces: _Pieces, target: Path) -> None:
    """Unpack plain files and folders; anything else is refused. Raises: BackupDamaged."""
    name = f"base/{pieces.base.id}"
    try:
        with tarfile.open(fileobj=cast(IO[bytes], pieces), mode="r|") as tar:
            for member in tar:
                path = target / member.name
                if not path.resolve().is_relative_to(target.resolve()):
                    raise damaged(name, f"its tar has the path {member.name!r}")
                if member.isdir():
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
                elif member.isreg():
                    source = tar.extractfile(member) or io.BytesIO()
                    with _private(path) as file:
                        shutil.copyfileobj(source, file, 2**20)
                else:
                    raise damaged(name, f"its tar has {member.name!r}, which is no plain file")
    except (tarfile.TarError, zlib.error) as error:
        raise damaged(name, str(error)) from error


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


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
        except BackupDamaged:
            # The archiver deletes a part after it has written a longer one with its bytes.
            if FULL in await archive.parts(generation, name) and one != FULL:
                return await extend_segment(archive, generation, name, data)
            if offset < len(data):
                continue
            raise
        part = await asyncio.to_thread(decode_part, key, stored)
        if offset > len(data):
            raise damaged(key, f"the log between offset {len(data)} and {offset} is missing")
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
    """Fetch the log of `plan` up to the commits of `to`; return its bytes."""
    size_bytes = 0
    for name in plan.segments:
        data = bytearray()
        read_at = await extend_segment(archive, plan.base.generation, name, data)
        await asyncio.to_thread(write_segment, spool, name, data)
        size_bytes += len(data)
        is_needed = name <= segment_name(plan.base.timeline, plan.base.end)
        if to is not None and read_at and read_at > to + _AFTER_TIME and not is_needed:
            break
    return size_bytes


async def verify_base(folder: Path) -> None:
    """Compare the unpacked files with the server's manifest. Raises: BackupDamaged.

    As pg_verifybackup does, whose program in the wheel ends with a segmentation fault. Whether the
    log reaches the end of the backup is checked by the server itself.
    """
    fault = await asyncio.to_thread(_manifest_fault, folder / "postgres")
    if fault:
        raise BackupDamaged(f"the base backup differs from its manifest: {fault}")


class _ManifestFile(msgspec.Struct, rename="pascal"):
    path: str
    size: int
    checksum: str


class _Manifest(msgspec.Struct, rename={"files": "Files", "checksum": "Manifest-Checksum"}):
    files: list[_ManifestFile]
    checksum: str


def _manifest_fault(data: Path) -> str:
    """The first difference between the files in `data` and their manifest."""
    text = (data / "backup_manifest").read_bytes()
    manifest = msgspec.json.decode(text, type=_Manifest)
    # The checksum is of everything before its own line.
    if hashlib.sha256(text[: text.rindex(b'"Manifest-Checksum"')]).hexdigest() != manifest.checksum:
        return "its own checksum differs"
    found = {str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()}
    listed = {file.path for file in manifest.files} | {"backup_manifest"}
    if found != listed:
        return f"files are missing or additional: {sorted(found ^ listed)[:5]}"
    for file in manifest.files:
        with (data / file.path).open("rb") as opened:
            checksum = hashlib.file_digest(opened, "sha256").hexdigest()
        if checksum != file.checksum:
            return f"{file.path} has another checksum"
    return ""


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
