"""Messages between processes of this product: a 4-byte length, then the body, one msgpack value.

They pass over stream sockets, because a body can exceed the buffer that a packet must fit in. Each
side decodes bodies with a typed decoder of its own (`message_decoder`). `MessageConnection` serves
one end of a socket pair in an event loop, and closes it at the first malformed message.
`read_message` is for stream readers, `receive_message` for code that blocks.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.kernel.logs import logger

log = logger(__name__)
LENGTH_BYTES: Final = 4
BODY_BYTES_MAX: Final = 256 * 1024 * 1024


def _plain(value: Any) -> Any:
    """The value of a subclass of a plain type, such as a job's id. Raises: TypeError."""
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, datetime):
        return datetime.combine(value, value.timetz())
    raise TypeError(f"a message cannot hold a {type(value).__name__}")


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode_message(message: Any) -> bytearray:
    """The bytes of a message: its length and its body."""
    data = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, data, LENGTH_BYTES)
    data[:LENGTH_BYTES] = (len(data) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return data


def message_decoder(kind: Any) -> Callable[[bytes], Any]:
    """A typed decoder of bodies. It raises ValueError for any other body."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_body(body: bytes) -> Any:
        try:
            return decode(body)
        except RecursionError:
            raise ValueError("the message is nested too deeply") from None

    return decode_body


async def read_message(reader: asyncio.StreamReader, *, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The body of the next message. Raises: EOFError, OSError, ValueError if it is too long."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    if length > bytes_max:
        raise _too_long(length, bytes_max)
    return await reader.readexactly(length)


def receive_message(link: socket.socket) -> bytes:
    """The body of the next message of a blocking socket.

    Raises: EOFError, OSError, ValueError if it is too long.
    """
    length = int.from_bytes(_receive_exactly(link, LENGTH_BYTES), "little")
    if length > BODY_BYTES_MAX:
        raise _too_long(length, BODY_BYTES_MAX)
    return _receive_exactly(link, length)


def _receive_exactly(link: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        block = link.recv(length - len(data))
        if not block:
            raise EOFError(f"the other side closed the socket after {len(data)} of {length} bytes")
        data += block
    return data


def _too_long(length: int, bytes_max: int) -> ValueError:
    return ValueError(
        f"message of {length} bytes exceeds {bytes_max}: the other side uses another protocol"
    )


class MessageSplitter:
    """Splits a stream into the bodies of its messages."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """Of an incomplete message; joined once it is complete, as it may arrive in many parts."""
        self._missing = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes, in order. Raises: ValueError if one is too long."""
        if self._parts:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = b"".join(self._parts)
        found, start, end = [], 0, len(data)
        while end - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            length = int.from_bytes(data[start:body], "little")
            if length > BODY_BYTES_MAX:
                raise _too_long(length, BODY_BYTES_MAX)
            if end - body < length:
                self._missing = body + length - end
                break
            found.append(data[body : body + length])
            start = body + length
        else:
            self._missing = start + LENGTH_BYTES - end
        self._parts = [data[start:]] if start < end else []
        return found


class MessageConnection(asyncio.Protocol):
    """One end of a socket between two processes. Messages sent before it connects are kept."""

    def __init__(
        self,
        decode: Callable[[bytes], Any],
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._decode = decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._messages = MessageSplitter()
        self._transport: Any = None
        self._early: list[Any] = []
        self._is_closed = False
        self._is_drained = asyncio.Event()
        self._is_drained.set()

    async def connect(self, link: socket.socket) -> None:
        """Use `link`, one end of a socket pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=link)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        early, self._early = self._early, []
        for message in early:
            self.send(message)
        if self._is_closed:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. A malformed message closes the connection."""
        try:
            bodies = self._messages.feed(data)
        except ValueError as error:
            self._refuse(error)
            return
        for body in bodies:
            try:
                message = self._decode(body)
            except ValueError as error:
                self._refuse(error)
                return
            self._on_message(message)

    def connection_lost(self, _error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._is_drained.set()
        self._on_lost()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._is_drained.clear()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._is_drained.set()

    def send(self, message: Any) -> None:
        """Send a message; drop it if the other side has closed its end."""
        if self._transport is None:
            self._early.append(message)
        elif not self._transport.is_closing():
            self._transport.write(encode_message(message))

    async def flush(self) -> None:
        """Wait until every message has left this process, or the connection is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.set_write_buffer_limits(0)
            await self._is_drained.wait()

    def _refuse(self, error: ValueError) -> None:
        log.warning("message_invalid", error=str(error))
        self.close()

    def close(self) -> None:
        """Close the socket at once."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()
