"""The filler: the one process of a node that writes blocks. It serves the workers on a unix socket.

The node's supervisor starts it and restarts it when it dies. Workers then repeat their requests.
Stored blocks are served meanwhile, and verified marks stay, because the tables are in shared
memory.

The socket and the manifest are accessible to this user only (0600). A lock in the run folder
ensures one filler per node. Operators send commands over the same socket, with arguments and
replies as JSON values.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.kernel import logs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.ipc import encode_message
from headrace.kernel.logs import logger
from headrace.kernel.resilience import BackgroundTasks
from headrace.media.cache.disk import CheckCounts, Disk, check_frames, scrub
from headrace.media.cache.disks import RETIRED, Disks
from headrace.media.cache.epochs import BOARD_BYTES, FillerEpochs
from headrace.media.cache.filler_ipc import (
    SOCKET_NAME,
    BlockReply,
    Command,
    CommandReply,
    DiskFault,
    DiskState,
    ErrorReply,
    GetBlock,
    GetShape,
    Reply,
    ShapeReply,
    ToFiller,
    WrongBlock,
    read_manifest,
    read_to_filler,
    remove_manifest,
    socket_address,
)
from headrace.media.cache.fills import Fills
from headrace.media.cache.layout import Digests
from headrace.media.cache.linux import has_shared, remove_abandoned, remove_shared
from headrace.media.cache.origin import Origin
from headrace.media.errors import (
    CommandUnknown,
    DiskUnknown,
    FillerAway,
    FillerRunning,
    SharedMemoryLost,
)
from headrace.media.model import DiskConfig
from headrace.media.sources import ObjectReader

log = logger(__name__)
KEEP_UP_S: Final = 0.1
"""How often changed sets are written to the indexes. A crash loses the newest ones."""

SCRUB_AFTER_S: Final = 10.0
"""Delay of the first scrub, so that a starting node serves its clients first."""


class Filler:
    """The writer of one node's cache."""

    def __init__(
        self,
        blobs: ObjectReader,
        disks: Sequence[DiskConfig],
        *,
        run: Path,
        boot: str,
        hash_key: bytes,
        timeout_s: float = 10.0,
    ) -> None:
        """`boot` identifies this start of the node.

        With the same value workers kept running meanwhile.
        """
        self._configs = disks
        self._run = run
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _take_lock(run)
        remove_abandoned()
        try:
            _require_board(run, boot)
            self._epochs = FillerEpochs(run)
        except BaseException:
            os.close(self._lock)
            raise
        self._digests = Digests(hash_key)
        self._origin = Origin(blobs, timeout_s=timeout_s)
        self._disks = Disks(run, self._epochs, boot=boot, hash_key=hash_key)
        self._fills = Fills(self._origin, self._disks, self._epochs)
        self._commands = Commands(self._disks, self._start_scrub)
        self._tasks = BackgroundTasks()
        self._replies: dict[asyncio.StreamWriter, asyncio.Lock] = {}

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Fill until `stop`, then close every disk in order.

        Raises: OSError if the run folder is unusable.
        """
        server: asyncio.Server | None = None
        try:
            await self._disks.open(self._configs)
            server = await self._listen()
            self._tasks.start(self._keep_up())
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
        await self._tasks.cancel()
        await self._fills.close()
        await self._disks.close()
        if not self._epochs.workers():
            remove_manifest(self._run)
            remove_shared(self._run)
        self._epochs.close()
        os.close(self._lock)

    async def _listen(self) -> asyncio.Server:
        path = self._run / SOCKET_NAME
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(draft) as address:
            listener.bind(address)
        # Restrict access before other processes can find the name.
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
            log.warning("worker_message_invalid", error=str(error))
        finally:
            del self._replies[writer]
            writer.close()

    def _take(self, message: ToFiller, writer: asyncio.StreamWriter) -> None:
        match message:
            case WrongBlock(disk=disk, frame=frame, generation=generation):
                if (known := self._known(disk)) is not None:
                    self._fills.hide_wrong_block(known, frame, generation)
            case DiskFault(disk=disk, errno=number):
                if (known := self._known(disk)) is not None:
                    self._disks.fail(known, OSError(number, os.strerror(number)))
            case _:
                self._tasks.start(self._reply(message, writer))

    def _known(self, disk_id: str) -> Disk | None:
        try:
            return self._disks.by_id(disk_id)
        except DiskUnknown:
            return None

    async def _reply(
        self, message: GetBlock | GetShape | Command, writer: asyncio.StreamWriter
    ) -> None:
        try:
            reply = await self._answer(message)
        except HeadraceError as error:
            reply = ErrorReply(message.call, error.code, error.text, error.retry_after_s)
        except Exception:
            # Reply to unexpected errors too, or the client would wait for its timeout.
            log.exception("answer_failed")
            reply = ErrorReply(message.call, FillerAway.code, "the filler failed: see its log", 1)
        lock = self._replies.get(writer)
        if lock is None:
            return
        async with lock:
            writer.write(encode_message(reply))
            try:
                await writer.drain()
            except OSError:
                writer.close()

    async def _answer(self, message: GetBlock | GetShape | Command) -> Reply:
        match message:
            case GetBlock():
                # Each reply is a task, so this applies to this read only.
                logs.onward.set(message.onward)
                key = self._digests.key(message.object, message.version, message.number)
                data = await self._fills.block(key, wants_bytes=message.wants_bytes)
                return BlockReply(message.call, data)
            case GetShape():
                known = await self._origin.shape(
                    message.object, message.generation, is_fresh=message.is_fresh
                )
                return ShapeReply(message.call, known.shape, known.expires_s - time.monotonic())
            case Command():
                value = await self._commands.run(message.name, message.arguments)
                return CommandReply(message.call, value)

    async def _keep_up(self) -> None:
        while True:
            self._disks.keep_up()
            await asyncio.sleep(KEEP_UP_S)

    def _start_scrub(self, disk: Disk) -> None:
        self._tasks.start(self._scrub(disk))

    async def _scrub(self, disk: Disk) -> None:
        await asyncio.sleep(SCRUB_AFTER_S)
        while disk.state is not DiskState.OUT:
            try:
                await scrub(disk)
            except OSError as error:
                self._disks.fail(disk, error)


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
    """Check that the epoch board exists if workers use it. Raises: SharedMemoryLost."""
    before = read_manifest(run)
    if before is not None and before.boot == boot and not has_shared(run, "board", BOARD_BYTES):
        # Without it no worker could be waited for, and blocks being sent would be overwritten.
        raise SharedMemoryLost(
            f"the shared memory of the node in {run} was removed: restart the whole node"
        )


class Commands:
    """The commands of one filler."""

    def __init__(self, disks: Disks, on_added: Callable[[Disk], None]) -> None:
        self._disks = disks
        self._on_added = on_added
        self._known: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "disks": self.disks,
            "add": self.add,
            "drain": self.drain,
            "undrain": self.undrain,
            "retire": self.retire,
            "verify": self.verify,
        }

    async def run(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run the command. Raises: CommandUnknown, and the errors of the command."""
        command = self._known.get(name)
        if command is None:
            raise CommandUnknown(
                f"command {name!r} does not exist: use one of {', '.join(sorted(self._known))}"
            )
        try:
            work = command(**arguments)
        except TypeError as error:
            raise CommandUnknown(f"command {name}: {error}") from error
        return await work

    async def disks(self) -> list[dict[str, Any]]:
        """Every disk, including those that could not be opened."""
        rows = [await self._describe(disk) for disk in self._disks.listed()]
        return [*rows, *(_refused(path, why) for path, why in self._disks.refused.items())]

    async def add(self, path: str, size_bytes: int) -> dict[str, Any]:
        """Add a disk, now and for later starts."""
        disk = await self._disks.add(DiskConfig(Path(path), size_bytes))
        self._on_added(disk)
        return await self._describe(disk)

    async def drain(self, id: str) -> dict[str, Any]:  # noqa: A002 - the argument's name on the wire
        """Stop placing blocks on a disk; its blocks are still served."""
        return await self._describe(await self._disks.set_draining(id, is_draining=True))

    async def undrain(self, id: str) -> dict[str, Any]:  # noqa: A002
        """Resume placing blocks on a disk."""
        return await self._describe(await self._disks.set_draining(id, is_draining=False))

    async def retire(self, id: str) -> dict[str, Any]:  # noqa: A002
        """Retire a disk and close it, so that it can be removed; or forget a refused disk."""
        if self._disks.forget_refused(Path(id)):
            return _refused(Path(id), RETIRED)
        return await self._describe(await self._disks.retire(id))

    async def verify(self, share: float = 1.0) -> dict[str, Any]:
        """Verify this share of all frames at full speed."""
        counts = CheckCounts()
        await asyncio.gather(
            *(self._verify(disk, share, counts) for disk in self._disks.in_service())
        )
        return dataclasses.asdict(counts)

    async def _verify(self, disk: Disk, share: float, counts: CheckCounts) -> None:
        count = min(disk.frames, max(1, round(disk.frames * share)))
        frames = (
            range(disk.frames) if count == disk.frames else random.sample(range(disk.frames), count)
        )
        try:
            await check_frames(disk, frames, counts)
        except OSError as error:
            self._disks.fail(disk, error)

    async def _describe(self, disk: Disk) -> dict[str, Any]:
        is_out = disk.state is DiskState.OUT
        return {
            "id": disk.id,
            "path": str(disk.config.path),
            "size_bytes": disk.config.size_bytes,
            "frames": disk.frames,
            "used": 0 if is_out else disk.table.used(),
            "state": disk.state,
            "fault": disk.fault,
            "is_copied": disk.is_copied,
            "queue": disk.writes_waiting,
            "rotten": disk.rotten,
        }


def _refused(path: Path, why: str) -> dict[str, Any]:
    """The row of a disk that could not be opened."""
    return {
        "id": "",
        "path": str(path),
        "size_bytes": 0,
        "frames": 0,
        "used": 0,
        "state": DiskState.OUT,
        "fault": why,
    }
