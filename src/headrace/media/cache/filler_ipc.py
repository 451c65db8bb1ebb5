"""What workers and filler say to each other on the node's unix socket: a 4-byte length, then one msgpack array.

A message costs 33 us (prototypes of 2026-11-21), so only misses and shapes go this way; a hit needs nobody. Every question may be
asked again after the other side died: none changes anything but what is cached, or says who asks (commands).


[store/manifest.py] What the filler tells the workers of the disks: one small file in the run folder, replaced as a whole.

Its revision is also on the board, where each worker sees at the start of a turn that it is behind. Files are named with what
they are (device and inode), so that nobody opens, or keeps open, another file than the filler writes to.


[store/link.py] A worker's end of the filler's socket: questions that outlive a filler.

A filler that dies takes no question with it: all that wait are asked again when the next one listens, which is tried every
RETRY_S. Whoever waits longer than the time limit gets FillerAway, which is a StoreUnavailable.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.media.cache.layout import slot_owners
from headrace.media.errors import (
    CommandUnknown,
    DiskRefused,
    DiskTooSmall,
    DiskUnknown,
    FillerAway,
    ObjectUnknown,
    SourceCut,
    StoreUnavailable,
)

SOCKET_NAME: Final = "filler.sock"
STREAM_BYTES: Final = 1024 * 1024
"""What a reader holds before it stops the other side: some blocks."""
_LENGTH_BYTES: Final = 4
_MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
_ADDRESS_BYTES_MAX: Final = 100


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A block is wanted: stored, or its bytes."""

    call: int
    object: str
    version: str
    number: int
    wants_bytes: bool
    onward: tuple[tuple[str, str], ...] = ()
    """What the origin is told of whom the read is for (`kernel.trace`)."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """The shape of an object is wanted, as of that purge generation or later."""

    call: int
    object: str
    generation: int
    is_fresh: bool


class Command(msgspec.Struct, frozen=True, array_like=True, tag="command"):
    """A person's wish; see `commands`."""

    call: int
    name: str
    arguments: dict[str, Any]


class Doubt(msgspec.Struct, frozen=True, array_like=True, tag="doubt"):
    """A block's sum was wrong: the frame holds something else than that generation of it says."""

    disk: str
    frame: int
    generation: int


class Fault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """A disk failed while it was read."""

    disk: str
    errno: int


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """The block is in its frame."""

    call: int


class Passed(msgspec.Struct, frozen=True, array_like=True, tag="passed"):
    """The block's bytes; it may not be stored."""

    call: int
    data: bytes


class Shaped(msgspec.Struct, frozen=True, array_like=True, tag="shaped"):
    """An object's shape, and how old that is."""

    call: int
    size_bytes: int
    etag: str
    modified_s: int
    is_immutable: bool
    age_s: float


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """What came of a command."""

    call: int
    value: Any


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The call raised an error of that code."""

    call: int
    code: str
    text: str
    retry_after_s: float | None


ToFiller = Ask | Look | Command | Doubt | Fault
Reply = Stored | Passed | Shaped | Answered | Failed

_encoder: Final = msgspec.msgpack.Encoder()
_decode_to_filler: Final[Callable[[Any], ToFiller]] = msgspec.msgpack.Decoder(ToFiller).decode
_decode_reply: Final[Callable[[Any], Reply]] = msgspec.msgpack.Decoder(Reply).decode


def encode(message: ToFiller | Reply) -> bytearray:
    """A message as it goes over the socket."""
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    frame[:_LENGTH_BYTES] = (len(frame) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return frame


async def read_to_filler(reader: asyncio.StreamReader) -> ToFiller:
    """The next message of a worker. Raises: EOFError, OSError, ValueError (no such message)."""
    return _decode_to_filler(await _read(reader))


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The next message of the filler. Raises: EOFError, OSError, ValueError (no such message)."""
    return _decode_reply(await _read(reader))


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if length > _MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes: the other side speaks something else")
    return await reader.readexactly(length)


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A name for the socket `path` that fits into a socket's address, which ends after 107 bytes."""
    if len(bytes(path)) <= _ADDRESS_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


_NAME: Final = "manifest.json"
IN_USE: Final = "in use"
DRAINING: Final = "draining"
OUT: Final = "out"
NOBODY: Final = 255
"""In a map of slots: no disk has this one."""


class ManifestDisk(msgspec.Struct, frozen=True):
    """A disk as a worker needs to know it."""

    id: str
    frames: int
    state: str
    reader_path: str
    reader_identity: str
    data_at: int
    table_path: str
    table_identity: str
    is_copied: bool


class Manifest(msgspec.Struct, frozen=True):
    """All disks that this filler opened, each at its place for as long as it runs."""

    boot: str
    revision: int
    hash_key: bytes
    disks: tuple[ManifestDisk, ...]
    owners: bytes
    """Slot -> place in `disks` of the one that its blocks are put on."""
    owners_before: bytes
    """The same as if no disk were being drained; empty: none is."""


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Replace the manifest; readable for this user alone, since the key is in it. Raises: OSError."""
    draft = run / f"{_NAME}.draft"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(manifest))
    draft.replace(run / _NAME)


def read_manifest(run: Path) -> Manifest | None:
    """The newest manifest; None before the first, or if it is damaged: the filler writes it anew."""
    try:
        return msgspec.json.decode((run / _NAME).read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def remove_manifest(run: Path) -> None:
    """Take it away with the shared memory that it speaks of."""
    (run / _NAME).unlink(missing_ok=True)


def places_of(disks: Sequence[ManifestDisk]) -> tuple[bytes, bytes]:
    """`owners` and `owners_before` of a manifest; 5 ms a disk."""
    is_draining = any(disk.state == DRAINING for disk in disks)
    owners = _owners(disks, (IN_USE,))
    return owners, _owners(disks, (IN_USE, DRAINING)) if is_draining else b""


def _owners(disks: Sequence[ManifestDisk], states: tuple[str, ...]) -> bytes:
    taken = [place for place, disk in enumerate(disks) if disk.state in states]
    owners = slot_owners([(bytes.fromhex(disks[at].id), disks[at].frames) for at in taken])
    return bytes(taken[owner] if owner >= 0 else NOBODY for owner in owners)


log = logger(__name__)
RETRY_S: Final = 0.1
UNTOLD_MAX: Final = 100
_CONNECT_S: Final = 2.0
_KINDS: Final[dict[str, type[HeadraceError]]] = {
    kind.code: kind
    for kind in (
        ObjectUnknown,
        SourceCut,
        StoreUnavailable,
        DiskRefused,
        DiskTooSmall,
        DiskUnknown,
        CommandUnknown,
    )
}


class Link:
    """Questions under way; connects when there are some."""

    def __init__(self, run: Path, *, timeout_s: float) -> None:
        self._path = run / SOCKET_NAME
        self._timeout_s = timeout_s
        self._calls = 0
        self._waiting: dict[int, tuple[ToFiller, asyncio.Future[Reply]]] = {}
        self._untold: list[ToFiller] = []
        self._writer: asyncio.StreamWriter | None = None
        self._talk: asyncio.Task[None] | None = None

    async def ask(self, make: Callable[[int], ToFiller]) -> Reply:
        """The answer to `make(call)`. Raises: FillerAway, and the error that the filler met."""
        self._calls += 1
        call = self._calls
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        message = make(call)
        self._waiting[call] = message, answer
        try:
            if self._writer is not None:
                self._writer.write(encode(message))
            else:
                self._begin()
            async with asyncio.timeout(self._timeout_s):
                reply = await answer
        except TimeoutError as error:
            raise FillerAway(
                f"the filler of this node did not answer within {self._timeout_s:g} s: try again later",
                retry_after_s=1,
            ) from error
        finally:
            self._waiting.pop(call, None)
        if isinstance(reply, Failed):
            raise _error_of(reply)
        return reply

    def tell(self, message: ToFiller) -> None:
        """Say something that needs no answer, as soon as somebody listens."""
        if self._writer is not None:
            self._writer.write(encode(message))
        elif len(self._untold) < UNTOLD_MAX:
            self._untold.append(message)
            self._begin()

    async def close(self) -> None:
        """End; who waits gets FillerAway."""
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.gather(self._talk, return_exceptions=True)
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(FillerAway("this process is being stopped", retry_after_s=1))

    def _begin(self) -> None:
        if self._talk is None:
            self._talk = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Talk as long as somebody waits, or the filler stays."""
        try:
            while self._waiting or self._untold:
                try:
                    await self._talk_once()
                except (EOFError, OSError, TimeoutError):
                    await asyncio.sleep(RETRY_S)
                except ValueError as error:
                    log.warning("filler_not_understood", error=str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            self._talk = None

    async def _talk_once(self) -> None:
        with socket_address(self._path) as address:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(address, limit=STREAM_BYTES)
        self._writer = writer
        try:
            untold, self._untold = self._untold, []
            for message in [*untold, *(message for message, _ in self._waiting.values())]:
                writer.write(encode(message))
            while True:
                reply = await read_reply(reader)
                _, answer = self._waiting.get(reply.call, (None, None))
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        finally:
            self._writer = None
            writer.close()


async def control(path: Path, command: str, /, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
    """Have the filler that listens on `path` do `command`; see `commands`. Returns its JSON value.

    Raises: FillerAway, and whatever error the command met.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reply = await _ask_once(path, Command(1, command, arguments))
    except (EOFError, OSError) as error:
        raise FillerAway(
            f"no filler answers on {path}: start the node (`headrace media serve`, with media.disks set)"
        ) from error
    if isinstance(reply, Failed):
        raise _error_of(reply)
    assert isinstance(reply, Answered), f"a command is answered, not {reply}"
    return reply.value


async def _ask_once(path: Path, message: Command) -> Reply:
    with socket_address(path) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=STREAM_BYTES)
    try:
        writer.write(encode(message))
        return await read_reply(reader)
    finally:
        writer.close()


def _error_of(failed: Failed) -> HeadraceError:
    kind = _KINDS.get(failed.code, FillerAway)
    return kind(failed.text, retry_after_s=failed.retry_after_s)
