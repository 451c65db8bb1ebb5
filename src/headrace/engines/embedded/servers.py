"""Start and stop of the embedded PostgreSQL and Valkey."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.engines.children import ChildProcess
from headrace.engines.embedded.data_folder import WrongVersion, require_space, rotate_log
from headrace.engines.embedded.identity import (
    Identity,
    choose_identity,
    give_folder,
    take_folder_back,
)
from headrace.engines.embedded.process import (
    end_orphans,
    start_engine,
    start_failure,
    wait_engine_ready,
)
from headrace.engines.embedded.programs import Program, postgres_program, valkey_program
from headrace.engines.embedded.settings import (
    POSTGRES_PORT,
    VALKEY_SOCKET,
    Machine,
    endpoints_of,
    postgres_settings,
    reachable_folder,
    valkey_settings,
)

INITDB_S: Final = 120.0
POSTGRES_READY_S: Final = 300.0
"""Crash recovery replays up to max_wal_size, which can take tens of seconds."""
_BUILTIN_LOCALE_SINCE: Final = 17
_STATUS_LINE: Final = 7  # of postmaster.pid, where pg_ctl reads `ready` as well
_ACCESS: Final = """# Any user with access to ../run may connect; nothing listens elsewhere.
local all all trust
local replication all trust
"""
# An orphan shuts down immediately: a hanging client could block a fast shutdown forever, and
# recovery at the next start loses no commit.
_ORPHANED: Final = signal.SIGQUIT
_POSTGRES_STOP: Final = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 7.0))


class PostgresServer:
    """The PostgreSQL of one data folder, whose lock the caller holds.

    The database is created in `postgres.new` and renamed, so an interrupted initdb leaves nothing
    that looks like a database. `postgresql.conf` is rewritten at each start; ALTER SYSTEM settings
    take precedence. Address and socket are on the command line, which nothing overrides.
    """

    name = "postgres"

    def __init__(
        self,
        folder: Path,
        machine: Machine,
        *,
        durable: bool,
        extra: Mapping[str, str],
        bin_setting: str | None = None,
    ) -> None:
        self._folder = folder
        self._bin_setting = bin_setting
        self._data = folder / "postgres"
        self._log = folder / "logs" / "postgres.log"
        self._settings = {**postgres_settings(machine, durable=durable), **extra}
        self._durable = durable
        self.process: ChildProcess | None = None

    async def start(self, *, ready_s: float = POSTGRES_READY_S) -> None:
        """Create the database if missing, start the server and wait until it responds.

        A server that recovers responds once it can be read: with `hot_standby` when its data is
        consistent, else when recovery has ended.

        Raises: EngineMissing, EngineTooOld, RootRefused, StartFailed, WrongVersion, OrphanAlive.
        """
        program = await postgres_program(self._bin_setting)
        identity = await choose_identity(self._folder, program.path)
        await end_orphans(self._data)
        rotate_log(self._log)
        if not self._data.exists():
            await self._make_cluster(program, identity)
        self._require_version(program)
        self._write_settings()
        self._remove_stale_files()
        self._set_owner(identity, self._data)
        process = await start_engine(
            [str(program.path), *self._arguments()],
            log=self._log,
            folder=self._data,
            death_signal=_ORPHANED,
            identity=identity.launch,
        )
        self.process = process

        async def is_ready() -> bool:
            return self._is_ready(process.pid) and await self._responds()

        await wait_engine_ready(process, is_ready, name=self.name, log=self._log, timeout_s=ready_s)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop the server within 27 s: fast, then immediate, then by SIGKILL."""
        process, self.process = self.process, None
        if process is not None:
            await process.stop(_POSTGRES_STOP, hurry)
            await end_orphans(self._data)

    def _arguments(self) -> list[str]:
        fixed = {
            "listen_addresses": "",
            "port": str(POSTGRES_PORT),
            "unix_socket_directories": "../run",
            "unix_socket_permissions": "0700",
        }
        return ["-D", str(self._data), *(f"--{name}={value}" for name, value in fixed.items())]

    async def _make_cluster(self, program: Program, identity: Identity) -> None:
        require_space(self._folder)
        draft = self._folder / "postgres.new"
        await end_orphans(draft)
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(mode=0o700)
        self._set_owner(identity, draft)
        initdb = [str(program.path.with_name("initdb")), "-D", str(draft), "-U", "headrace"]
        initdb += ["-A", "trust", "--encoding=UTF8", "--no-instructions"]
        if program.major >= _BUILTIN_LOCALE_SINCE:
            initdb += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        else:
            # The same order of code points, from the C library.
            initdb += ["--locale=C.UTF-8"]
        await self._run([*initdb, *([] if self._durable else ["--no-sync"])], identity)
        single = [str(program.path), "--single", "-D", str(draft), "-c", "exit_on_error=on"]
        fsync = "on" if self._durable else "off"
        single += ["-c", f"fsync={fsync}", "-c", "dynamic_shared_memory_type=mmap", "postgres"]
        await self._run(single, identity, b"CREATE DATABASE headrace\n")
        draft.rename(self._data)
        _sync_folder(self._folder)

    async def _run(self, command: list[str], identity: Identity, text: bytes = b"") -> None:
        reading, writing = os.pipe()
        os.write(writing, text)
        os.close(writing)
        try:
            process = await start_engine(
                command,
                log=self._log,
                folder=self._folder,
                source=reading,
                death_signal=signal.SIGKILL,
                identity=identity.launch,
            )
        finally:
            os.close(reading)
        try:
            async with asyncio.timeout(INITDB_S):
                exit_code = await process.wait()
        finally:
            await process.stop(())
        if exit_code != 0:
            raise start_failure(self.name, "could not create its database", self._log)

    def _require_version(self, program: Program) -> None:
        path = self._data / "PG_VERSION"
        found = path.read_text().strip() if path.exists() else "none"
        if found != str(program.major):
            raise WrongVersion(
                f"{self._data} has data of PostgreSQL version {found}, {program.path} is version"
                f" {program.major}: migrate it with pg_upgrade or pg_dump, choose another folder,"
                " or name the programs of its version with HEADRACE_POSTGRES_BIN"
            )

    def _write_settings(self) -> None:
        lines = ["# Rewritten at each start; for your own settings use ALTER SYSTEM."]
        for name, value in sorted(self._settings.items()):
            quoted = value.replace("\\", "\\\\").replace("'", "''")
            lines.append(f"{name} = '{quoted}'")
        (self._data / "postgresql.conf").write_text("\n".join(lines) + "\n")
        (self._data / "pg_hba.conf").write_text(_ACCESS)

    def _remove_stale_files(self) -> None:
        # This process holds the lock and no engine of the folder runs, so the pid in the file
        # belongs to another program. PostgreSQL would refuse to start because of it.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        for path in (self._folder / "run").glob(".s.PGSQL.*"):
            path.unlink()

    def _set_owner(self, identity: Identity, data: Path) -> None:
        if identity.owner is not None:
            give_folder(self._folder, data, identity.owner)
        else:
            take_folder_back(self._folder, data)

    def _is_ready(self, pid: int) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > _STATUS_LINE and lines[_STATUS_LINE].strip() == "ready" and pid > 0

    async def _responds(self) -> bool:
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


VALKEY_READY_S: Final = 300.0
"""Loading an append-only file of 10 GB takes about two minutes."""
_ANSWER_S: Final = 5.0
_VALKEY_STOP: Final = ((signal.SIGTERM, 10.0),)


class ValkeyServer:
    """The Valkey of one data folder, whose lock the caller holds.

    All settings are on the command line, so each start uses this release's. A truncated end of the
    append-only file, as `kill -9` leaves it, is dropped.
    """

    name = "valkey"

    def __init__(
        self,
        folder: Path,
        machine: Machine,
        *,
        durable: bool,
        extra: Mapping[str, str],
        bin_setting: str | None = None,
    ) -> None:
        self._folder = folder
        self._bin_setting = bin_setting
        self._data = folder / "valkey"
        self._log = folder / "logs" / "valkey.log"
        self._settings = {**valkey_settings(machine, durable=durable), **extra}
        self.process: ChildProcess | None = None

    async def start(self) -> None:
        """Start the server and wait until it has loaded its data and responds.

        Raises: EngineMissing, EngineTooOld, StartFailed, OrphanAlive.
        """
        program = await valkey_program(self._bin_setting)
        await end_orphans(self._data)
        rotate_log(self._log)
        (self._folder / "run" / VALKEY_SOCKET).unlink(missing_ok=True)
        command = [str(program.path), *self._arguments()]
        self.process = await start_engine(command, log=self._log, folder=self._data)
        await wait_engine_ready(
            self.process,
            self._responds,
            name=self.name,
            log=self._log,
            timeout_s=VALKEY_READY_S,
        )

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop the server within 20 s, by SIGKILL if necessary."""
        process, self.process = self.process, None
        if process is not None:
            await process.stop(_VALKEY_STOP, hurry)

    def _arguments(self) -> list[str]:
        fixed = {
            "port": "0",
            "unixsocket": f"../run/{VALKEY_SOCKET}",
            "unixsocketperm": "700",
            "dir": ".",
            "daemonize": "no",
        }
        settings = {**self._settings, **fixed}
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    async def _responds(self) -> bool:
        path = f"{reachable_folder(self._folder / 'run')}/{VALKEY_SOCKET}"
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
