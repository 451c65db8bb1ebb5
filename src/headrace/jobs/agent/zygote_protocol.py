"""Messages between agent and zygote: one msgpack array per packet, with descriptors.

SOCK_SEQPACKET keeps the packets separate and passes descriptors. Every message is small; the
traceback of a failed import is cut to what fits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from headrace.jobs.agent.queue_state import TaskFacts
from headrace.jobs.messages import Broken

PACKET_BYTES_MAX: Final = 512 * 1024
_DESCRIPTORS_MAX: Final = 4


class Fork(msgspec.Struct, frozen=True, array_like=True, tag="fork"):
    """Fork slot `slot`; the packet carries its socket end."""

    slot: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded", kw_only=True):
    """The application is imported and its heap is frozen: slots can be forked."""

    pid: int
    tasks: Sequence[TaskFacts]
    settings: dict[str, str]
    """The application's settings: `section.name` to the written value."""
    threads: Sequence[str]
    """Names of threads that its imports started; slots do not have them."""
    sockets: Sequence[str]
    """Sockets that its imports opened; all slots would share them."""
    import_s: float


class Forked(msgspec.Struct, frozen=True, array_like=True, tag="forked"):
    """Slot `slot` runs as `pid`; the packet carries its pidfd, because pids are reused."""

    slot: int
    pid: int


class Exited(msgspec.Struct, frozen=True, array_like=True, tag="exited"):
    """A slot has exited: its exit code, or the negative signal number."""

    slot: int
    pid: int
    status: int


FromZygote = Loaded | Broken | Forked | Exited
_encoder: Final = msgspec.msgpack.Encoder()
_decode_fork: Final = msgspec.msgpack.Decoder(Fork).decode
_decode_from_zygote: Final = msgspec.msgpack.Decoder(FromZygote).decode


def make_pair() -> tuple[socket.socket, socket.socket]:
    """A socket pair: the agent's end and the zygote's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        # A full traceback and the facts of many queues must fit into one packet.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES_MAX)
    return ours, theirs


def send(link: socket.socket, message: Fork | FromZygote, descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises: OSError if the other side has closed."""
    socket.send_fds(link, [_encoder.encode(message)], list(descriptors))


def receive_fork(link: socket.socket) -> tuple[Fork, socket.socket] | None:
    """The agent's next request with the slot's socket end; None: the agent has closed."""
    packet, descriptors = _receive(link)
    if not packet:
        return None
    return _decode_fork(packet), socket.socket(fileno=descriptors[0])


def receive_from_zygote(link: socket.socket) -> tuple[FromZygote, list[int]] | None:
    """The zygote's next message; None: it has closed. Raises: BlockingIOError."""
    packet, descriptors = _receive(link)
    return (_decode_from_zygote(packet), descriptors) if packet else None


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    with suppress(ConnectionError):
        packet, descriptors, _, _ = socket.recv_fds(link, PACKET_BYTES_MAX, _DESCRIPTORS_MAX)
        for descriptor in descriptors:
            # Received descriptors are inheritable: a program started by a handler would hold them.
            os.set_inheritable(descriptor, False)
        return packet, descriptors
    return b"", []
