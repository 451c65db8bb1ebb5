"""Messages as bytes on a stream socket: a 4-byte length, then one msgpack array.

A stream and not SOCK_SEQPACKET, since a batch of payloads can exceed the buffer that a packet must fit in. Payloads
pass as they came from the driver; PostgreSQL's own array bytes handed through were slower (102,000 jobs/s
instead of 120,000: the slot then splits them in Python).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from headrace.jobs.slots.messages import LENGTH_BYTES, MESSAGE_BYTES_MAX, FromSlot, ToSlot

_encoder: Final = msgspec.msgpack.Encoder()
decode_to_slot: Final[Callable[[Any], ToSlot]] = msgspec.msgpack.Decoder(ToSlot).decode
"""What a slot reads. Raises: msgspec.DecodeError."""
decode_from_slot: Final[Callable[[Any], FromSlot]] = msgspec.msgpack.Decoder(FromSlot).decode
"""What an agent reads of its slots. Raises: msgspec.DecodeError."""


def encode_frame(message: msgspec.Struct) -> bytearray:
    """One message with its length in front."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return frame


class FrameSplitter:
    """Cuts a stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes, in order. Raises: ValueError where it is no such stream."""
        if self._rest:
            self._rest += data
            data = bytes(self._rest)
        found, start, end = [], 0, len(data)
        while end - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            length = int.from_bytes(data[start:body], "little")
            if length > MESSAGE_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes: the other side speaks something else")
            if end - body < length:
                break
            found.append(data[body : body + length])
            start = body + length
        self._rest = bytearray(data[start:])
        return found
