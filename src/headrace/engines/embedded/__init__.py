"""PostgreSQL and Valkey as children of one process, in one data folder.

Promises: one starter per folder. Unix sockets inside the folder and no TCP. The engines end with
their starter, however it ends. After `kill -9` of everything the next start recovers by itself. No
file, user, permission or shared memory outside the folder is touched. This needs no monitor
process: it uses the kernel's parent-death signal, one record lock, and checks of /proc by
executable and working directory before any process is killed.

    <folder>/layout            marks the folder as ours, with the version of this layout
    <folder>/lock              held for the starter's life, with its pid
    <folder>/postgres, valkey  the engines' data        <folder>/blobs   objects
    <folder>/run               the two sockets, 0700    <folder>/logs    one log per engine
    <folder>/object-store      the expected object store (`engines.mount_guard`)

data_folder  the folder, its lock and the errors    servers   start and stop of each engine
process      engine processes and orphans           identity  the user of PostgreSQL
settings     settings for the machine, sockets      programs  of the wheels, or of the distribution
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.engines.embedded.data_folder import (
    EngineMissing,
    EngineTooOld,
    FolderInUse,
    FolderLock,
    FolderUnusable,
    NotRunning,
    OrphanAlive,
    RootRefused,
    StartFailed,
    WrongVersion,
    holder_pid,
    is_locked,
    lay_out,
    not_readable,
    require_recovered,
    usable_folder,
)
from headrace.engines.embedded.process import end_orphans
from headrace.engines.embedded.servers import PostgresServer, ValkeyServer
from headrace.engines.embedded.settings import (
    POSTGRES_SOCKET,
    VALKEY_SOCKET,
    endpoints_of,
    read_machine,
)
from headrace.engines.endpoints import Endpoints, masked_url

__all__ = [
    "EmbeddedEngines",
    "EngineMissing",
    "EngineTooOld",
    "FolderInUse",
    "FolderUnusable",
    "NotRunning",
    "OrphanAlive",
    "RootRefused",
    "StartFailed",
    "WrongVersion",
    "running_endpoints",
]
NO_ENDPOINTS: Final = Endpoints(postgres_url="", valkey_url="", blobs_url="")


class EmbeddedEngines:
    """PostgreSQL and Valkey as child processes, in the data folder `folder`.

    `durable=False` turns fsync off, for tests that do not test durability. `extra` has further
    settings of PostgreSQL, `valkey_extra` of Valkey. `postgres_bin` and `valkey_bin` name programs
    to use instead of those of the wheels. Start it in the main thread: the engines end with the
    thread that started them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        extra: Mapping[str, str] | None = None,
        valkey_extra: Mapping[str, str] | None = None,
        postgres_bin: str | None = None,
        valkey_bin: str | None = None,
    ) -> None:
        self._given = folder
        self._durable = durable
        self._extra = dict(extra or {})
        self._valkey_extra = dict(valkey_extra or {})
        self._postgres_bin, self._valkey_bin = postgres_bin, valkey_bin
        self._lock: FolderLock | None = None
        self._endpoints: Endpoints | None = None
        self._servers: dict[str, PostgresServer | ValkeyServer] = {}

    @property
    def postgres_pid(self) -> int | None:
        """The pid of PostgreSQL, or None while it does not run."""
        return self._pid("postgres")

    @property
    def valkey_pid(self) -> int | None:
        """The pid of Valkey, or None while it does not run."""
        return self._pid("valkey")

    async def start(self) -> Endpoints:
        """Lock the folder, start both engines and wait until both respond.

        Recovers after any kill. If the engines run already, only returns their endpoints. A failure
        or cancellation leaves no process and no lock. Raises: FolderUnusable, FolderInUse,
        EngineMissing, EngineTooOld, RootRefused, WrongVersion, OrphanAlive, MainThreadRequired,
        StartFailed.
        """
        if self._endpoints is not None:
            return self._endpoints
        folder = usable_folder(self._given)
        lock = FolderLock(folder)
        lock.acquire()
        self._lock = lock
        try:
            require_recovered(folder)
            lay_out(folder)
            await end_orphans(folder)
            machine = read_machine()
            postgres = PostgresServer(
                folder,
                machine,
                durable=self._durable,
                extra=self._extra,
                bin_setting=self._postgres_bin,
            )
            valkey = ValkeyServer(
                folder,
                machine,
                durable=self._durable,
                extra=self._valkey_extra,
                bin_setting=self._valkey_bin,
            )
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
        """Stop both engines within 30 s, by force if necessary, and unlock the folder.

        Set `hurry` to shorten the timeouts.
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
        """Wait until an engine ends unexpectedly; return its name. Raises: NotRunning."""
        waits = {
            asyncio.ensure_future(server.process.wait()): name
            for name, server in self._servers.items()
            if server.process is not None
        }
        if not waits:
            raise NotRunning("the engines are not running: call start() before wait_exit()")
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[next(iter(done))]

    async def restart(self, name: str) -> None:
        """Restart the engine `name`. Raises: as `start`."""
        server = self._servers[name]
        await server.stop(asyncio.Event())
        await server.start()

    def _pid(self, name: str) -> int | None:
        process = self._servers[name].process if name in self._servers else None
        return process.pid if process is not None and process.is_alive else None


def running_endpoints(folder: Path, configured: Endpoints = NO_ENDPOINTS) -> Endpoints:
    """The `configured` URLs; for missing ones those of engines that another process runs.

    They are for this process. Raises: NotRunning, FolderUnusable.
    """
    path = folder.expanduser().resolve()
    try:
        running = _running_endpoints(path, configured)
    except PermissionError as error:
        raise not_readable(path, error) from error
    return Endpoints(
        postgres_url=configured.postgres_url or running.postgres_url,
        valkey_url=configured.valkey_url or running.valkey_url,
        blobs_url=configured.blobs_url or running.blobs_url,
    )


def _running_endpoints(path: Path, configured: Endpoints) -> Endpoints:
    if not is_locked(path):
        raise NotRunning(_not_running(path, configured), retry_after_s=5)
    run = path / "run"
    if not ((run / POSTGRES_SOCKET).exists() and (run / VALKEY_SOCKET).exists()):
        raise NotRunning(
            f"the engines of data folder {path} are being started by process {holder_pid(path)}:"
            " try again in a few seconds",
            retry_after_s=1,
        )
    return endpoints_of(path)


def _not_running(path: Path, configured: Endpoints) -> str:
    """Why no engine runs. Who set one URL alone may expect that it is enough."""
    names = {
        "PostgreSQL": ("postgres.url (HEADRACE_POSTGRES_URL)", configured.postgres_url),
        "Valkey": ("valkey.url (HEADRACE_VALKEY_URL)", configured.valkey_url),
    }
    given = [f"{setting} is {masked_url(url)}" for setting, url in names.values() if url]
    missing = [(engine, setting) for engine, (setting, url) in names.items() if not url]
    if not given:
        return (
            f"no engines run in data folder {path}: start them with `headrace up`, or name the"
            " folder in which they run by `--data FOLDER` or `--config FILE`"
        )
    [(engine, setting)] = missing
    return (
        f"{given[0]}, {setting} is not set, and no {engine} runs in data folder {path}: set"
        f" {setting} too, or start the embedded {engine} with `headrace up`"
    )
