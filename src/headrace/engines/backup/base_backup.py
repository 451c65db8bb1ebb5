"""Base backups: `pg_basebackup` of the running server, in pieces straight into the archive.

The tar goes through memory, so a backup needs no space on the disk of the server. A backup counts
once the archive has the log up to its end. pg_basebackup verifies the checksums of all pages; each
piece has a checksum of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import signal
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from headrace.engines.backup.archive import KEY_FILES, Archive, Base, Holder, base_id_at
from headrace.engines.backup.wal import segment_floor
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
