"""Messages between workers and filler, the manifest of the disks, and the client of the filler.

On the node's unix socket messages pass as in `kernel.ipc`. Only misses and shapes use it; a
hit needs no message. Every request may be repeated after the other side died: except for
commands, requests only change what is cached.

The manifest is a small file in the run folder in which the filler publishes its disks. Its revision
is also in shared memory, where each worker checks it at the start of an epoch. Device and inode
identify the files, so no process opens a file other than the filler's.

`FillerClient` repeats pending requests when the filler is restarted. It tries to connect every
RETRY_S. A caller that waits beyond the time limit gets FillerAway, a StoreUnavailable.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.kernel.errors import HeadraceError
from headrace.kernel.ipc import encode_message, message_decoder, read_message
from headrace.kernel.logs import logger
from headrace.media.cache.layout import slot_owners
from headrace.media.errors import (
    CommandUnknown,
    DiskRefused,
    DiskUnknown,
    FillerAway,
    InvalidDiskSize,
    ObjectUnknown,
    SourceCut,
    StoreUnavailable,
)
from headrace.media.model import Shape

log = logger(__name__)

SOCKET_NAME: Final = "filler.sock"
STREAM_BYTES: Final = 1024 * 1024
"""Bytes a reader buffers before it stops the sender."""
_MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
_ADDRESS_BYTES_MAX: Final = 100
_NAME: Final = "manifest.json"
NO_DISK: Final = 255
"""In a map of slots: no disk."""
RETRY_S: Final = 0.1
UNSENT_MAX: Final = 100
_CONNECT_S: Final = 2.0
_KINDS: Final[dict[str, type[HeadraceError]]] = {
    kind.code: kind
    for kind in (
        ObjectUnknown,
        SourceCut,
        StoreUnavailable,
        DiskRefused,
        InvalidDiskSize,
        DiskUnknown,
        CommandUnknown,
    )
}


class GetBlock(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Request a block: store it, or return its bytes."""

    call: int
    object: str
    version: str
    number: int
    wants_bytes: bool
    onward: tuple[tuple[str, str], ...] = ()
    """Trace fields that the origin receives (`kernel.trace`)."""


class GetShape(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Request the shape of an object at this purge generation or later."""

    call: int
    object: str
    generation: int
    is_fresh: bool


class Command(msgspec.Struct, frozen=True, array_like=True, tag="command"):
    """Request a command of an operator; see `filler.Commands`."""

    call: int
    name: str
    arguments: dict[str, Any]


class WrongBlock(msgspec.Struct, frozen=True, array_like=True, tag="doubt"):
    """Report that a block of this generation has a wrong checksum."""

    disk: str
    frame: int
    generation: int


class DiskFault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """Report that a disk failed while it was read."""

    disk: str
    errno: int


class BlockReply(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """The block's bytes, which may not be stored; None: it is stored in its frame."""

    call: int
    data: bytes | None


class ShapeReply(msgspec.Struct, frozen=True, array_like=True, tag="shaped"):
    """An object's shape, and for how long it is fresh."""

    call: int
    shape: Shape
    fresh_s: float


class CommandReply(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The result of a command."""

    call: int
    value: Any


class ErrorReply(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The error that the request raised."""

    call: int
    code: str
    text: str
    retry_after_s: float | None


ToFiller = GetBlock | GetShape | Command | WrongBlock | DiskFault
Reply = BlockReply | ShapeReply | CommandReply | ErrorReply

_decode_to_filler: Final[Callable[[bytes], ToFiller]] = message_decoder(ToFiller)
_decode_reply: Final[Callable[[bytes], Reply]] = message_decoder(Reply)


async def read_to_filler(reader: asyncio.StreamReader) -> ToFiller:
    """The next message of a worker. Raises: EOFError, OSError, ValueError (malformed)."""
    return _decode_to_filler(await read_message(reader, bytes_max=_MESSAGE_BYTES_MAX))


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The next message of the filler. Raises: EOFError, OSError, ValueError (malformed)."""
    return _decode_reply(await read_message(reader, bytes_max=_MESSAGE_BYTES_MAX))


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A name for the socket `path` that fits the limit of 107 bytes."""
    if len(bytes(path)) <= _ADDRESS_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class DiskState(enum.StrEnum):
    """What a disk is used for. The values are shown to users."""

    IN_USE = "in use"
    DRAINING = "draining"
    OUT = "out"


class ManifestDisk(msgspec.Struct, frozen=True):
    """The data of a disk that a worker needs."""

    id: str
    frames: int
    state: DiskState
    reader_path: str
    reader_identity: str
    data_at: int
    table_path: str
    table_identity: str
    is_copied: bool


class Manifest(msgspec.Struct, frozen=True):
    """All disks that this filler opened. Each keeps its position for as long as the filler runs."""

    boot: str
    revision: int
    hash_key: bytes
    disks: tuple[ManifestDisk, ...]
    owners: bytes
    """Slot -> position in `disks` of the disk that new blocks are placed on."""
    owners_before: bytes
    """The same map as if no disk were being drained; empty: none is."""


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Replace the manifest.

    It contains the hash key, so only this user can read it. Raises: OSError.
    """
    draft = run / f"{_NAME}.draft"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(manifest))
    draft.replace(run / _NAME)


def read_manifest(run: Path) -> Manifest | None:
    """The newest manifest; None: there is none, or it is damaged and the filler will rewrite it."""
    try:
        return msgspec.json.decode((run / _NAME).read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def remove_manifest(run: Path) -> None:
    """Remove the manifest, together with the shared memory it refers to."""
    (run / _NAME).unlink(missing_ok=True)


def slot_maps(disks: Sequence[ManifestDisk]) -> tuple[bytes, bytes]:
    """`owners` and `owners_before` of a manifest."""
    is_draining = any(disk.state is DiskState.DRAINING for disk in disks)
    owners = _owners(disks, DiskState.IN_USE)
    return owners, _owners(disks, DiskState.IN_USE, DiskState.DRAINING) if is_draining else b""


def _owners(disks: Sequence[ManifestDisk], *states: DiskState) -> bytes:
    taken = [position for position, disk in enumerate(disks) if disk.state in states]
    owners = slot_owners([(bytes.fromhex(disks[at].id), disks[at].frames) for at in taken])
    return bytes(taken[owner] if owner >= 0 else NO_DISK for owner in owners)


class FillerClient:
    """Pending requests to the filler. Connects when there are some."""

    def __init__(self, run: Path, *, timeout_s: float) -> None:
        self._path = run / SOCKET_NAME
        self._timeout_s = timeout_s
        self._calls = 0
        self._waiting: dict[int, tuple[ToFiller, asyncio.Future[Reply]]] = {}
        self._unsent: list[ToFiller] = []
        self._writer: asyncio.StreamWriter | None = None
        self._session: asyncio.Task[None] | None = None

    async def request(self, make: Callable[[int], ToFiller]) -> Reply:
        """Return the reply to `make(call)`.

        Raises: FillerAway, and the error that the filler raised.
        """
        self._calls += 1
        call = self._calls
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        message = make(call)
        self._waiting[call] = message, answer
        try:
            if self._writer is not None:
                self._writer.write(encode_message(message))
            else:
                self._begin()
            async with asyncio.timeout(self._timeout_s):
                reply = await answer
        except TimeoutError as error:
            raise FillerAway(
                f"the filler did not answer within {self._timeout_s:g} s: try again later",
                retry_after_s=1,
            ) from error
        finally:
            self._waiting.pop(call, None)
        if isinstance(reply, ErrorReply):
            raise _error_of(reply)
        return reply

    def notify(self, message: ToFiller) -> None:
        """Send a message that needs no reply, as soon as a filler listens."""
        if self._writer is not None:
            self._writer.write(encode_message(message))
        elif len(self._unsent) < UNSENT_MAX:
            self._unsent.append(message)
            self._begin()

    async def close(self) -> None:
        """Close the connection. Pending callers get FillerAway."""
        if self._session is not None:
            self._session.cancel()
            await asyncio.gather(self._session, return_exceptions=True)
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(FillerAway("this process is being stopped", retry_after_s=1))

    def _begin(self) -> None:
        if self._session is None:
            self._session = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Serve the connection as long as there are pending requests or the filler stays."""
        try:
            while self._waiting or self._unsent:
                try:
                    await self._run_session()
                except (EOFError, OSError, TimeoutError):
                    await asyncio.sleep(RETRY_S)
                except ValueError as error:
                    log.warning("filler_message_invalid", error=str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            self._session = None

    async def _run_session(self) -> None:
        with socket_address(self._path) as address:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(address, limit=STREAM_BYTES)
        self._writer = writer
        try:
            unsent, self._unsent = self._unsent, []
            for message in [*unsent, *(message for message, _ in self._waiting.values())]:
                writer.write(encode_message(message))
            while True:
                reply = await read_reply(reader)
                _, answer = self._waiting.get(reply.call, (None, None))
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        finally:
            self._writer = None
            writer.close()


async def control(path: Path, command: str, /, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
    """Run `command` in the filler that listens on `path` and return its JSON value.

    Raises: FillerAway, and the error that the command raised.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reply = await _request_once(path, Command(1, command, arguments))
    except (EOFError, OSError) as error:
        raise FillerAway(
            f"no filler answers on {path}: set media.disks and run `headrace media serve`"
        ) from error
    if isinstance(reply, ErrorReply):
        raise _error_of(reply)
    assert isinstance(reply, CommandReply), f"a command is answered, not {reply}"
    return reply.value


async def _request_once(path: Path, message: Command) -> Reply:
    with socket_address(path) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=STREAM_BYTES)
    try:
        writer.write(encode_message(message))
        return await read_reply(reader)
    finally:
        writer.close()


def _error_of(failed: ErrorReply) -> HeadraceError:
    kind = _KINDS.get(failed.code, FillerAway)
    return kind(failed.text, retry_after_s=failed.retry_after_s)
