"""Both engines of one data folder as one thing: started together, stopped together, watched together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from headrace.engines.embedded.errors import NotRunning
from headrace.engines.embedded.folder import lay_out, not_readable, usable_folder
from headrace.engines.embedded.leftovers import end_leftovers
from headrace.engines.embedded.lock import FolderLock, holder_pid, is_locked
from headrace.engines.embedded.machine import read_machine
from headrace.engines.embedded.postgres_server import PostgresServer
from headrace.engines.embedded.sockets import (
    POSTGRES_SOCKET,
    VALKEY_SOCKET,
    endpoints_of,
)
from headrace.engines.embedded.spawn import EngineProcess
from headrace.engines.embedded.valkey_server import ValkeyServer
from headrace.engines.endpoints import Endpoints


class EmbeddedEngines:
    """PostgreSQL and Valkey as children of this process, in `folder`.

    `durable=False` turns fsync off, for tests of anything but durability. `extra` holds further
    PostgreSQL settings, `valkey_extra` those of Valkey. Start it from the main thread: the engines end with the thread that started them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        extra: Mapping[str, str] | None = None,
        valkey_extra: Mapping[str, str] | None = None,
    ) -> None:
        self._given = folder
        self._durable = durable
        self._extra = dict(extra or {})
        self._valkey_extra = dict(valkey_extra or {})
        self._lock: FolderLock | None = None
        self._endpoints: Endpoints | None = None
        self._servers: dict[str, PostgresServer | ValkeyServer] = {}

    @property
    def postgres_pid(self) -> int | None:
        """The postmaster's pid, or None while it does not run."""
        return self._pid("postgres")

    @property
    def valkey_pid(self) -> int | None:
        """Valkey's pid, or None while it does not run."""
        return self._pid("valkey")

    async def start(self) -> Endpoints:
        """Lock the folder, start both engines and wait until both answer; recovers after any kill.

        Started already, it only says where. Whatever stops it half way, also cancellation, leaves no
        process and no lock. Raises: FolderUnusable, FolderInUse, EngineMissing, RootRefused,
        WrongVersion, LeftoverAlive, StartFailed.
        """
        if self._endpoints is not None:
            return self._endpoints
        folder = usable_folder(self._given)
        lock = FolderLock(folder)
        lock.acquire()
        self._lock = lock
        try:
            lay_out(folder)
            await end_leftovers(folder)
            machine = read_machine()
            postgres = PostgresServer(folder, machine, durable=self._durable, extra=self._extra)
            valkey = ValkeyServer(folder, machine, durable=self._durable, extra=self._valkey_extra)
            self._servers = {postgres.name: postgres, valkey.name: valkey}
            async with asyncio.TaskGroup() as group:
                group.create_task(postgres.start())
                group.create_task(valkey.start())
        except BaseExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.stop()
            raise
        self._endpoints = endpoints_of(folder)
        return self._endpoints

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Stop both engines cleanly, by force if they do not end, within 30 s; then free the folder.

        Set `hurry` to cut the patience short. Stopped already, it does nothing.
        """
        event = hurry or asyncio.Event()
        self._endpoints = None
        try:
            await asyncio.gather(*(server.stop(event) for server in self._servers.values()))
        finally:
            self._servers = {}
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    async def wait_exit(self) -> str:
        """Wait until an engine ends without having been asked to; return its name."""
        processes = [process for server in self._servers.values() if (process := server.process)]
        assert processes, "start the engines before waiting for their end"
        waits = {asyncio.ensure_future(process.wait()): process for process in processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[next(iter(done))].name

    async def restart(self, name: str) -> None:
        """Start engine `name` again, stopping it first if it runs. Raises: as `start`."""
        server = self._servers[name]
        await server.stop(asyncio.Event())
        await server.start()

    def _pid(self, name: str) -> int | None:
        server = self._servers.get(name)
        process: EngineProcess | None = server.process if server is not None else None
        return process.pid if process is not None and process.is_alive else None


def running_endpoints(folder: Path) -> Endpoints:
    """Where the engines that another process runs in `folder` answer, for this process.

    Raises: NotRunning, FolderUnusable.
    """
    path = folder.expanduser().resolve()
    try:
        return _running_endpoints(path)
    except PermissionError as error:
        raise not_readable(path, error) from error


def _running_endpoints(path: Path) -> Endpoints:
    if not is_locked(path):
        raise NotRunning(
            f"no engines run in data folder {path}: start them with `headrace up`", retry_after_s=5
        )
    run = path / "run"
    if not ((run / POSTGRES_SOCKET).exists() and (run / VALKEY_SOCKET).exists()):
        raise NotRunning(
            f"the engines of data folder {path} are still being started by process {holder_pid(path)}:"
            " try again in some seconds",
            retry_after_s=1,
        )
    return endpoints_of(path)
