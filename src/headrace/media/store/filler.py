"""The one process of a node that writes: it takes the workers' questions off a unix socket and fills frames.

Started and stopped by the node's parent, which starts it again when it dies: workers then ask anew, what they had is served
meanwhile, and what was proved stays proved, since the tables are in memory that outlives it.

The socket is for this user alone (0600), as is the manifest. One filler a node: it holds a lock in the run folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.engines.blobs import Blobs
from headrace.kernel import logs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.media.model import DiskConfig
from headrace.media.store.commands import Commands
from headrace.media.store.disk import Disk, DiskState
from headrace.media.store.disks import Disks
from headrace.media.store.errors import (
    DiskUnknown,
    FillerAway,
    FillerRunning,
    SharedMemoryLost,
)
from headrace.media.store.filling import Fills
from headrace.media.store.layout import Digests
from headrace.media.store.manifest import read_manifest, remove_manifest
from headrace.media.store.origin import Origin
from headrace.media.store.scrub import scrub
from headrace.media.store.shared import has_shared, remove_abandoned, remove_shared
from headrace.media.store.turns import BOARD_BYTES, FillerTurns
from headrace.media.store.wire import (
    SOCKET_NAME,
    Answered,
    Ask,
    Command,
    Doubt,
    Failed,
    Fault,
    Look,
    Passed,
    Reply,
    Shaped,
    Stored,
    ToFiller,
    encode,
    read_to_filler,
    socket_address,
)

log = logger(__name__)
KEEP_UP_S: Final = 0.1
"""How often changed sets go to the indexes; the newest of these are missing after a crash, which costs misses."""

SCRUB_AFTER_S: Final = 10.0
"""The disks of a node that starts have clients to serve first."""


class Filler:
    """The writer of one node's store."""

    def __init__(
        self,
        blobs: Blobs,
        disks: Sequence[DiskConfig],
        *,
        run: Path,
        boot: str,
        hash_key: bytes,
        timeout_s: float = 10.0,
    ) -> None:
        """`boot` names this start of the node: the same one again means that workers went on meanwhile."""
        self._configs = disks
        self._run = run
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _take_lock(run)
        remove_abandoned()
        try:
            _require_board(run, boot)
            self._turns = FillerTurns(run)
        except BaseException:
            os.close(self._lock)
            raise
        self._digests = Digests(hash_key)
        self._origin = Origin(blobs, timeout_s=timeout_s)
        self._disks = Disks(run, self._turns, boot=boot, hash_key=hash_key)
        self._fills = Fills(self._origin, self._disks, self._turns)
        self._commands = Commands(self._disks, self._fills, self._turns, self._start_scrub)
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: dict[asyncio.StreamWriter, asyncio.Lock] = {}

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Fill until `stop`, then leave every disk clean. Raises: OSError where the run folder is no use."""
        server: asyncio.Server | None = None
        try:
            await self._disks.open(self._configs)
            server = await self._listen()
            self._start(self._keep_up())
            for disk in self._disks.in_service():
                self._start_scrub(disk)
            on_ready()
            await stop.wait()
        finally:
            await self._close(server)

    async def _close(self, server: asyncio.Server | None) -> None:
        if server is not None:
            server.close()
            (self._run / SOCKET_NAME).unlink(missing_ok=True)
        for writer in list(self._replies):
            writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fills.close()
        await self._disks.close()
        if not self._turns.workers():
            remove_manifest(self._run)
            remove_shared(self._run)
        self._turns.close()
        os.close(self._lock)

    async def _listen(self) -> asyncio.Server:
        path = self._run / SOCKET_NAME
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(draft) as address:
            listener.bind(address)
        # Ours alone before anybody can know its name.
        draft.chmod(0o600)
        draft.replace(path)
        return await asyncio.start_unix_server(self._serve, sock=listener, backlog=256)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._replies[writer] = asyncio.Lock()
        try:
            while True:
                self._take(await read_to_filler(reader), writer)
        except (EOFError, OSError):
            pass
        except ValueError as error:
            log.warning("worker_not_understood", error=str(error))
        finally:
            del self._replies[writer]
            writer.close()

    def _take(self, message: ToFiller, writer: asyncio.StreamWriter) -> None:
        match message:
            case Doubt(disk=disk, frame=frame, generation=generation):
                if (known := self._known(disk)) is not None:
                    self._fills.hide_doubted(known, frame, generation)
            case Fault(disk=disk, errno=number):
                if (known := self._known(disk)) is not None:
                    self._disks.fail(known, OSError(number, os.strerror(number)))
            case _:
                self._start(self._reply(message, writer))

    def _known(self, disk_id: str) -> Disk | None:
        try:
            return self._disks.by_id(disk_id)
        except DiskUnknown:
            return None

    async def _reply(self, message: Ask | Look | Command, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self._answer(message)
        except HeadraceError as error:
            reply = Failed(message.call, error.code, error.text, error.retry_after_s)
        except Exception:
            # A fault of ours is told, or the client would wait out its time.
            log.exception("answer_failed")
            reply = Failed(message.call, FillerAway.code, "the filler failed: see its log", 1)
        lock = self._replies.get(writer)
        if lock is None:
            return
        async with lock:
            writer.write(encode(reply))
            try:
                await writer.drain()
            except OSError:
                writer.close()

    async def _answer(self, message: Ask | Look | Command) -> Reply:
        match message:
            case Ask():
                # Each answer is a task, so this is of this one read alone.
                logs.onward.set(message.onward)
                key = self._digests.key(message.object, message.version, message.number)
                data = await self._fills.ask(key, wants_bytes=message.wants_bytes)
                return Stored(message.call) if data is None else Passed(message.call, data)
            case Look():
                known = await self._origin.shape(
                    message.object, message.generation, is_fresh=message.is_fresh
                )
                shape, age_s = known.shape, known.age_s
                return Shaped(
                    message.call,
                    shape.size_bytes,
                    shape.etag,
                    shape.modified_s,
                    shape.is_immutable,
                    age_s,
                )
            case Command():
                value = await self._commands.run(message.name, message.arguments)
                return Answered(message.call, value)

    async def _keep_up(self) -> None:
        while True:
            self._disks.keep_up()
            await asyncio.sleep(KEEP_UP_S)

    def _start_scrub(self, disk: Disk) -> None:
        self._start(self._scrub(disk))

    async def _scrub(self, disk: Disk) -> None:
        await asyncio.sleep(SCRUB_AFTER_S)
        while disk.state is not DiskState.OUT:
            try:
                await scrub(disk)
            except OSError as error:
                self._disks.fail(disk, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _take_lock(run: Path) -> int:
    descriptor = os.open(run / "filler.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise FillerRunning(
            f"another filler keeps the store of {run}: stop it, or use another data folder"
        ) from error
    return descriptor


def _require_board(run: Path, boot: str) -> None:
    """Workers of this boot hold a board that can be found, or none was there yet."""
    before = read_manifest(run)
    if before is not None and before.boot == boot and not has_shared(run, "board", BOARD_BYTES):
        # Without it nobody could be waited for: what workers still send would be written over.
        raise SharedMemoryLost(
            f"the shared memory of the node in {run} was removed while it runs: restart the whole node"
        )
