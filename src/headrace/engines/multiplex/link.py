"""One connection to Valkey: the places of those who wait, the parser, the watchdog. They end together.

Decisions need no clock but the watchdog's: it looks four times in `timeout_s`, and remembers how many were sent and
answered at each look. What was sent before the look of `timeout_s` ago and is not answered yet is overdue; if
nothing was answered since then, the server is silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from libvalkey import ProtocolError, Reader

from headrace.engines.multiplex.errors import (
    ValkeyBusy,
    ValkeyLost,
    ValkeyNotReady,
    refusal,
)
from headrace.engines.valkey import ValkeyDown
from headrace.kernel import metrics

LOOKS: Final = 4
_NOTHING: Final = object()
_FAILURES: Final = metrics.counter(
    "valkey_multiplexed_failures_total",
    "Commands over the shared connection that got no answer: never sent, refused as one too many, or lost.",
    outcome=("down", "busy", "lost"),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one connection may hold."""

    timeout_s: float = 2.0
    waiting_max: int = 4096
    """Callers at once: at 20,000 commands a second the wait of the last one is 0.2 s."""
    held_bytes_max: int = 16 * 2**20
    """Commands kept back while the server reads more slowly than we write."""


class Link(asyncio.Protocol):
    """One connection. `on_end` is called once, when it is of no more use."""

    def __init__(self, server: str, bounds: Bounds, on_end: Callable[[], None]) -> None:
        self._server, self._bounds, self._on_end = server, bounds, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(replyError=refusal, notEnoughData=_NOTHING)
        self._places: deque[asyncio.Future[Any]] = deque()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._is_flush_due = self._is_paused = self._is_over = False
        self._sent = self._answered = 0
        self._looks: deque[tuple[int, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for a reply."""
        return not self._places

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """The reply to come. Raises: ValkeyDown, ValkeyBusy."""
        if self._is_over:
            raise down(self._server, "the connection just ended")
        if (
            len(self._places) >= self._bounds.waiting_max
            or self._held_bytes >= self._bounds.held_bytes_max
        ):
            count_failure("busy")
            raise ValkeyBusy(
                f"{len(self._places)} commands wait for Valkey at {self._server}: try again in a moment",
                retry_after_s=1,
            )
        place = self._loop.create_future()
        self._places.append(place)
        self._held.append(packed)
        self._held_bytes += len(packed)
        self._sent += 1
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)
        return place

    def end(self, reason: str) -> None:
        """Cut it: who was sent gets `ValkeyLost`, who was held `ValkeyDown`."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        sent = len(self._places) - len(self._held)
        for index, place in enumerate(self._places):
            if not place.done():
                error = lost(self._server, reason) if index < sent else down(self._server, reason)
                place.set_exception(error)
        self._places.clear()
        self._held.clear()
        self._on_end()

    def connection_made(self, transport: Any) -> None:
        """Begin to watch."""
        self._transport = transport
        if self._is_over:
            transport.abort()
        else:
            self._look()

    def data_received(self, data: bytes) -> None:
        """Hand replies out in the order in which commands were sent."""
        if self._is_over:
            return
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                if not self._places:
                    self.end("a reply came that nobody had asked for")
                    return
                if not self._answer(reply):
                    return
        except ProtocolError as error:
            self.end(f"its bytes are no reply: {error}")

    def _answer(self, reply: Any) -> bool:
        """Hand one reply out; whether the connection goes on."""
        place = self._places.popleft()
        self._answered += 1
        if isinstance(reply, ValkeyDown):
            if not place.done():
                place.set_exception(reply)
            if isinstance(reply, ValkeyNotReady) and reply.word == "READONLY":
                # What the address means changed; only a new connection leads to the new primary.
                self.end("it is a replica now")
                return False
        elif not place.done():
            place.set_result(reply)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer closed it, or the network did."""
        self.end("the connection ended" if exc is None else type(exc).__name__)

    def pause_writing(self) -> None:
        """Keep commands back: the server does not read."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Go on."""
        self._is_paused = False
        self._flush()

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._held and not self._is_paused and not self._is_over:
            assert self._transport is not None
            self._transport.write(b"".join(self._held))
            self._held.clear()
            self._held_bytes = 0

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._bounds.timeout_s / LOOKS, self._look)
        self._looks.append((self._sent, self._answered))
        if len(self._looks) <= LOOKS:
            return
        sent, answered = self._looks.popleft()
        overdue = sent - self._answered
        if overdue <= 0:
            return
        reason = f"no reply in {self._bounds.timeout_s:g} s"
        if answered == self._answered:
            self.end(reason)
            return
        for place in islice(self._places, overdue):
            if not place.done():
                place.set_exception(lost(self._server, reason))


def down(server: str, reason: str) -> ValkeyDown:
    """The command was not sent."""
    count_failure("down")
    return ValkeyDown(
        f"Valkey at {server} is away ({reason}), nothing was sent: check that it runs with"
        " `headrace doctor`, then try again",
        retry_after_s=2,
    )


def lost(server: str, reason: str) -> ValkeyLost:
    """The command was sent."""
    count_failure("lost")
    return ValkeyLost(
        f"Valkey at {server} did not answer ({reason}), so it is not known whether the command was run: try"
        " again if running it twice does no harm",
        retry_after_s=2,
    )


def count_failure(outcome: str) -> None:
    """Count one command that got no answer."""
    metrics.bound(_FAILURES, "valkey_multiplexed_failures_total", outcome=outcome).inc()
