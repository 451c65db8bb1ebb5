"""Base backups: `pg_basebackup` of the running server, in pieces straight into the archive; back.

The tar goes through memory, so a backup needs no space on the disk of the server. A backup counts
once the archive has the log up to its end. pg_basebackup verifies the checksums of all pages; each
piece has a checksum of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import secrets
import shutil
import signal
import tarfile
import time
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec

from headrace.engines.backup.archive import KEY_FILES, Archive, Base, Holder, base_id_at
from headrace.engines.backup.wal import damaged, segment_floor
from headrace.engines.children import launcher_command
from headrace.engines.embedded.process import ENGINE_ENVIRONMENT
from headrace.engines.embedded.programs import postgres_program
from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.errors import Unavailable
from headrace.kernel.resilience import crash_point

PIECE_BYTES: Final = 16 * 2**20
LOG_WAIT_S: Final = 120.0
"""Longest wait until the archive has the log of the backup."""
_COMPRESSION_LEVEL: Final = 1
_POLL_S: Final = 0.2
_ERROR_BYTES_MAX: Final = 2000
SQL: Final = load_queries("headrace.engines")


class BackupFailed(Unavailable):
    """A base backup could not be taken."""

    code = "backup.failed"


async def program_beside(postgres_bin: str | None, name: str) -> str:
    """A program of the server's package. Raises: EngineMissing, EngineTooOld."""
    return str((await postgres_program(postgres_bin)).path.with_name(name))


async def take_base(
    archive: Archive,
    postgres: Postgres,
    folder: Path,
    *,
    holder: Holder,
    version: str,
    postgres_bin: str | None = None,
) -> Base:
    """Take a base backup of the server in `folder`; wait until it can be restored.

    The archiver of `headrace up` must run. Raises: BackupFailed, Fenced, Unavailable.
    """
    began_at = datetime.now(UTC)
    base_id = f"{base_id_at(began_at)}-{secrets.token_hex(2)}"
    async with archive.new_base(base_id):
        before: Any = await postgres.one(SQL.log_state)
        if before["wal_status"] is None:
            raise BackupFailed("nothing archives the log: run `headrace up` with backup.url set")
        program = await program_beside(postgres_bin, "pg_basebackup")
        pieces, size_bytes, stored_bytes = await _store_tar(archive, base_id, folder, program)
        keys = []
        for name in KEY_FILES:
            if (folder / name).exists():
                await archive.put_key(base_id, name, (folder / name).read_bytes())
                keys.append(name)
        migrations = await count_migrations(postgres)
        after: Any = await postgres.one(SQL.log_state)
        await _wait_archived(postgres, after["flushed"])
        await archive.require_session(holder.session)
        base = Base(
            id=base_id,
            generation=holder.generation,
            timeline=after["timeline"],
            system=after["system"],
            # The checkpoint of the backup is later than this position.
            start=segment_floor(before["flushed"]),
            end=after["flushed"],
            began_at=began_at,
            ended_at=after["read_at"],
            version=version,
            migrations=migrations,
            size_bytes=size_bytes,
            stored_bytes=stored_bytes,
            pieces=tuple(pieces),
            keys=tuple(keys),
        )
        await archive.complete(base)
    return base


async def count_migrations(postgres: Postgres) -> int:
    """The number of applied migrations; 0 for a database without the schema."""
    if not await postgres.value(SQL.has_migrations):
        return 0
    return int(await postgres.value(SQL.migration_count))


async def _store_tar(
    archive: Archive, base_id: str, folder: Path, program: str
) -> tuple[list[str], int, int]:
    """Store the output of pg_basebackup; return checksums, bytes and stored bytes."""
    # A path of a socket has at most 107 bytes: the working folder of the program is short.
    command = [
        program,
        "-h",
        "/proc/self/cwd",
        "-U",
        "headrace",
        "-D",
        "-",
        "-F",
        "tar",
        "-X",
        "none",
        "-c",
        "fast",
        "--no-password",
    ]
    command += ["--manifest-checksums", "SHA256"]
    process = await asyncio.create_subprocess_exec(
        *launcher_command(signal.SIGTERM, "same"),
        "--",
        *command,
        cwd=folder / "run",
        env=ENGINE_ENVIRONMENT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    checksums: list[str] = []
    size_bytes = stored_bytes = 0
    try:
        while data := await _read_piece(process.stdout):
            piece = await asyncio.to_thread(zlib.compress, data, _COMPRESSION_LEVEL)
            await archive.put_piece(base_id, len(checksums), piece)
            checksums.append(hashlib.sha256(piece).hexdigest())
            size_bytes += len(data)
            stored_bytes += len(piece)
            crash_point("backup_piece")
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        text = (await errors).decode(errors="replace")[-_ERROR_BYTES_MAX:].strip()
    if code != 0:
        raise BackupFailed(f"pg_basebackup failed with exit code {code}: {text}", retry_after_s=60)
    return checksums, size_bytes, stored_bytes


async def _read_piece(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readexactly(PIECE_BYTES)
    except asyncio.IncompleteReadError as error:
        return error.partial


async def _wait_archived(postgres: Postgres, position: int) -> None:
    """Wait until the archiver has released the log before `position`. Raises: BackupFailed."""
    ends_s = time.monotonic() + LOG_WAIT_S
    while True:
        state: Any = await postgres.one(SQL.log_state)
        if state["kept_from"] is not None and state["kept_from"] >= position:
            return
        if time.monotonic() > ends_s:
            raise BackupFailed(
                f"the log of this backup was not archived within {LOG_WAIT_S:.0f} s: run `headrace"
                " up`, whose log lines `log_not_archived` give the reason",
                retry_after_s=60,
            )
        await asyncio.sleep(_POLL_S)


async def fetch_base(archive: Archive, base: Base, folder: Path) -> None:
    """Unpack `base` into `folder`, verified, with its keys. Raises: BackupDamaged, Unavailable."""
    target = folder / "postgres"
    target.mkdir(mode=0o700)
    pieces = _Pieces(archive, base, asyncio.get_running_loop())
    try:
        await asyncio.to_thread(_unpack, pieces, target)
    finally:
        pieces.is_cancelled = True
    await verify_base(folder, base.id)
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


async def verify_base(folder: Path, base_id: str) -> None:
    """Compare the unpacked files with the server's manifest. Raises: BackupDamaged.

    As pg_verifybackup does, whose program in the wheel ends with a segmentation fault. Whether the
    log reaches the end of the backup is checked by the server itself.
    """
    fault = await asyncio.to_thread(_manifest_fault, folder / "postgres")
    if fault:
        raise damaged(f"base/{base_id}", f"it differs from its manifest: {fault}")


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
