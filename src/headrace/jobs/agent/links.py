"""The agent's end of a slot's socket: work goes down, outcomes come up, nothing is decoded that need not be."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from headrace.jobs.slots.messages import FromSlot, SpendAnswer, Stop, ToSlot, Work
from headrace.jobs.slots.wire import FrameSplitter, decode_from_slot, encode_frame


class SlotLink(asyncio.Protocol):
    """A place at the other end of a socket; implements `Place`."""

    def __init__(self, on_message: Callable[[FromSlot], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameSplitter()
        self._transport: Any = None
        self._early: list[ToSlot] = []
        self._is_closed = False

    async def connect(self, ours: socket.socket) -> None:
        """Speak over our end of a socket pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        early, self._early = self._early, []
        for message in early:
            self._send(message)
        if self._is_closed:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for body in self._frames.feed(data):
            self._on_message(decode_from_slot(body))

    def connection_lost(self, _error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._on_lost()

    def give(self, work: Work) -> None:
        """Let it run."""
        self._send(work)

    def answer(self, answer: SpendAnswer) -> None:
        """Pass on what was spent."""
        self._send(answer)

    def stop(self, grace_s: float) -> None:
        """Ask it to finish and leave."""
        self._send(Stop(grace_s))

    def close(self) -> None:
        """The slot is gone."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def _send(self, message: ToSlot) -> None:
        if self._transport is None:
            self._early.append(message)
        # What a slot that has just died does not read is settled at its exit.
        elif not self._transport.is_closing():
            self._transport.write(encode_frame(message))
