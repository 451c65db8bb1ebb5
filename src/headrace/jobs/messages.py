"""Messages between agent and slot, and their framing: a 4-byte length, then one msgpack array.

The agent never decodes a payload and the slot has no database connection, so PostgreSQL
connections grow with hosts and not with slots. In `headrace work` the same values pass by plain
calls.

The socket is a stream and not SOCK_SEQPACKET, because a batch of payloads can exceed the buffer
that a packet must fit in. Payloads pass as the driver returned them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from headrace.kernel.metrics import Delta


class Work(msgspec.Struct, frozen=True, array_like=True, tag="work", kw_only=True):
    """The jobs of one lease to run, as columns."""

    queue: str
    lease_id: int
    ids: Sequence[int]
    payloads: Sequence[bytes]
    attempts: Sequence[int]
    """Failed runs so far."""
    losses: Sequence[int]
    lanes: Sequence[str | None]
    traceparents: Sequence[str | None]
    versions: Sequence[int]
    retries: int
    """Of the queue, as its task declares or as an operator set it."""
    start_before_s: float | None = None
    """CLOCK_MONOTONIC: jobs of a lane that have not started by then return unstarted."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Finish running calls within `grace_s`, return the other jobs, send `Left` and exit."""

    grace_s: float


class SpendAnswer(msgspec.Struct, frozen=True, array_like=True, tag="spent"):
    """The answer to `Spend`: seconds to wait before starting; None: refused, nothing was taken."""

    call: int
    wait_s: float | None
    sent_s: float | None = None
    """CLOCK_MONOTONIC when the statement was sent; the wait and the slack count from it."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The start hooks have run; the slot accepts work."""

    pid: int


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack", kw_only=True):
    """Outcomes of jobs of a lease, as columns. `ids` None: every job of the lease is done."""

    lease_id: int
    ids: Sequence[int] | None = None
    kinds: Sequence[str] = ()
    """See `Outcome.kind`."""
    delays_s: Sequence[float | None] = ()
    errors: Sequence[str] = ()
    tracebacks: Sequence[str] = ()
    results: Sequence[bytes | None] = ()
    """JSON, of tasks that keep results; may be omitted."""
    queues: Sequence[str | None] = ()
    """Target queues of `moved` jobs; may be omitted."""
    calls: int = 0
    """Handler calls that ended since the last ack."""
    run_s: float = 0.0
    """Total run time of these calls."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """A job's progress, 0 to 1."""

    job_id: int
    ratio: float
    text: str


class Spend(msgspec.Struct, frozen=True, array_like=True, tag="spend"):
    """Take `starts` tokens out of a lane; `SpendAnswer` with the same `call` answers it."""

    call: int
    queue: str
    lane: str
    starts: int
    wait_max_s: float


class Measured(msgspec.Struct, frozen=True, array_like=True, tag="measured"):
    """The growth of the slot's counters since the last report: see `kernel.metrics.Delta`."""

    grown: Sequence[Delta]


class Recycle(msgspec.Struct, frozen=True, array_like=True, tag="recycle"):
    """Request to be replaced after the running work: over the memory limit, or for `why`."""

    private_bytes: int
    why: str = ""


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """No job is left and the stop hooks have run; the process exits now."""


class Declared(msgspec.Struct, frozen=True, array_like=True, tag="declared"):
    """The queues are stored: their ids by name."""

    queues: dict[str, int]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", kw_only=True):
    """The queues could not be stored."""

    code: str
    text: str
    exit_code: int
    retryable: bool


DECLARING: Final = -1
"""The slot number of the process that declares the code's queues and exits; it runs no jobs."""
ToSlot = Work | Stop | SpendAnswer
FromSlot = Ready | Ack | Progress | Spend | Measured | Recycle | Left
LENGTH_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 256 * 1024 * 1024
_encoder: Final = msgspec.msgpack.Encoder()
decode_to_slot: Final[Callable[[Any], ToSlot]] = msgspec.msgpack.Decoder(ToSlot).decode
"""Decode a message to a slot. Raises: msgspec.DecodeError."""
decode_from_slot: Final[Callable[[Any], FromSlot]] = msgspec.msgpack.Decoder(FromSlot).decode
"""Decode a message of a slot. Raises: msgspec.DecodeError."""


def encode_frame(message: msgspec.Struct) -> bytearray:
    """One message, preceded by its length."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return frame


class FrameSplitter:
    """Splits a stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes, in order. Raises: ValueError if a frame is too long."""
        if self._rest:
            self._rest += data
            data = bytes(self._rest)
        found, start, end = [], 0, len(data)
        while end - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            length = int.from_bytes(data[start:body], "little")
            if length > MESSAGE_BYTES_MAX:
                raise ValueError(
                    f"frame of {length} bytes exceeds {MESSAGE_BYTES_MAX}: not this protocol"
                )
            if end - body < length:
                break
            found.append(data[body : body + length])
            start = body + length
        self._rest = bytearray(data[start:])
        return found


class FramedConnection(asyncio.Protocol):
    """One end of the socket between agent and slot. Messages sent before it connects are kept."""

    def __init__(
        self,
        decode: Callable[[Any], Any],
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._decode = decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameSplitter()
        self._transport: Any = None
        self._early: list[msgspec.Struct] = []
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
        """See `asyncio.Protocol`."""
        for body in self._frames.feed(data):
            self._on_message(self._decode(body))

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

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; drop it if the other side has closed its end."""
        if self._transport is None:
            self._early.append(message)
        elif not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def flush(self) -> None:
        """Wait until every message has left this process."""
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits(0)
            await self._is_drained.wait()

    def close(self) -> None:
        """Close the socket at once."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()
