"""What workers and filler say to each other on the node's unix socket: a 4-byte length, then one msgpack array.

A message costs 33 us (prototypes of 2026-11-21), so only misses and shapes go this way; a hit needs nobody. Every question may be
asked again after the other side died: none changes anything but what is cached, or says who asks (commands).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

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
