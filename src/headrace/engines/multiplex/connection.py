"""One pipelined connection to Valkey, and the errors that state whether a command was run."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from libvalkey import ProtocolError, Reader

from headrace.engines.valkey import ValkeyDown, moved_of, refused_password
from headrace.kernel import metrics

NOT_RUN: Final = frozenset(
    {
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOAUTH",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
    }
)
"""First words of error replies to commands that were not run."""


_REFUSED: Final = re.compile(r"NOAUTH|WRONGPASS|AUTH <password> called without any password")


class ValkeyBusy(ValkeyDown):
    """Too many callers wait for Valkey; the command was not sent."""

    code = "valkey.busy"
    public = "too many requests wait for Valkey: try again in a moment"


class ValkeyLost(ValkeyDown):
    """The command was sent and got no reply; it may have been run."""

    code = "valkey.reply_lost"
    public = (
        "Valkey did not respond in time, and the outcome is unknown: try again if running this"
        " twice is safe"
    )


class ValkeyRefused(ValkeyDown):
    """Valkey replied with an error; `reply` is its text, which `public_text` omits."""

    code = "valkey.refused"
    public = "Valkey refused the command: run `headrace doctor` on the server for the reason"

    def __init__(self, text: str, reply: str) -> None:
        super().__init__(text, retry_after_s=2)
        self.reply = reply


class ValkeyPartlyDown(ValkeyDown):
    """Some primaries do not respond; `found` is None at the indexes `lost`."""

    code = "valkey.partly_down"

    def __init__(self, found: list[Any], lost: set[int], text: str) -> None:
        super().__init__(text, retry_after_s=2)
        self.found, self.lost = found, lost


class ValkeyNotReady(ValkeyDown):
    """Valkey cannot run commands now, such as while LOADING; `word` is the reason."""

    code = "valkey.not_ready"

    def __init__(self, word: str) -> None:
        super().__init__(
            f"Valkey is not ready ({word}) and ran nothing: check it with `headrace doctor`, then"
            " try again",
            retry_after_s=2,
        )
        self.word = word


def error_of_reply(reply: str) -> ValkeyDown:
    """The error for an error reply."""
    word = reply.split(" ", 1)[0]
    if word in NOT_RUN:
        return moved_of(reply) or ValkeyNotReady(word)
    return ValkeyRefused(
        f"Valkey refused the command ({reply[:200]}): check it with `headrace doctor`", reply
    )


CHECKS: Final = 4
_NOTHING: Final = object()
_FAILURES: Final = metrics.counter(
    "valkey_multiplexed_failures_total",
    "Commands over the shared connection without a reply: not sent, refused as busy, or lost.",
    outcome=("down", "busy", "lost"),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one connection."""

    timeout_s: float = 2.0
    waiting_max: int = 4096
    """Most callers that wait for a reply."""
    unsent_bytes_max: int = 16 * 2**20
    """Most bytes of commands that wait for the server to read."""


class Connection(asyncio.Protocol):
    """One pipelined connection; calls `on_end` once at its end.

    Replies go to waiters in the order of their commands. A cancelled waiter stays in the queue and
    absorbs its reply. The watchdog runs four times per `timeout_s` and compares how many commands
    were sent and answered: a command older than that is overdue, and a server without any reply in
    that time is silent.
    """

    def __init__(self, server: str, bounds: Bounds, on_end: Callable[[], None]) -> None:
        self._server, self._bounds, self._on_end = server, bounds, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(replyError=error_of_reply, notEnoughData=_NOTHING)
        self._waiters: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._is_flush_due = self._is_paused = self._is_over = False
        self._sent = self._answered = 0
        self._checks: deque[tuple[int, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no caller waits for a reply."""
        return not self._waiters

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Queue a packed command; the future receives its reply. Raises: ValkeyDown, ValkeyBusy."""
        if self._is_over:
            raise down(self._server, "the connection just closed")
        if (
            len(self._waiters) >= self._bounds.waiting_max
            or self._unsent_bytes >= self._bounds.unsent_bytes_max
        ):
            count_failure("busy")
            raise ValkeyBusy(
                f"{len(self._waiters)} commands wait for Valkey at {self._server}: try again in a"
                " moment",
                retry_after_s=1,
            )
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._unsent.append(packed)
        self._unsent_bytes += len(packed)
        self._sent += 1
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)
        return waiter

    def end(self, reason: str) -> None:
        """Close it: sent commands raise `ValkeyLost`, unsent commands `ValkeyDown`."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        sent = len(self._waiters) - len(self._unsent)
        for index, waiter in enumerate(self._waiters):
            if not waiter.done():
                error = lost(self._server, reason) if index < sent else down(self._server, reason)
                waiter.set_exception(error)
        self._waiters.clear()
        self._unsent.clear()
        self._on_end()

    def connection_made(self, transport: Any) -> None:
        """Start the watchdog."""
        self._transport = transport
        if self._is_over:
            transport.abort()
        else:
            self._check()

    def data_received(self, data: bytes) -> None:
        """Deliver replies in the order of the commands."""
        if self._is_over:
            return
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                if not self._waiters:
                    self.end("a reply without a command arrived")
                    return
                if not self._deliver(reply):
                    return
        except ProtocolError as error:
            self.end(f"its bytes are not a reply: {error}")

    def _deliver(self, reply: Any) -> bool:
        """Deliver one reply; return whether the connection stays open."""
        waiter = self._waiters.popleft()
        self._answered += 1
        if isinstance(reply, ValkeyDown):
            if not waiter.done():
                waiter.set_exception(reply)
            if isinstance(reply, ValkeyNotReady) and reply.word == "READONLY":
                # The address leads to a replica now; a new connection reaches the new primary.
                self.end("it is a replica now")
                return False
        elif not waiter.done():
            waiter.set_result(reply)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection after the peer or the network closed it."""
        self.end("the connection closed" if exc is None else type(exc).__name__)

    def pause_writing(self) -> None:
        """Queue commands while the server does not read."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Send the queued commands."""
        self._is_paused = False
        self._flush()

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._unsent and not self._is_paused and not self._is_over:
            assert self._transport is not None
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()
            self._unsent_bytes = 0

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._bounds.timeout_s / CHECKS, self._check)
        self._checks.append((self._sent, self._answered))
        if len(self._checks) <= CHECKS:
            return
        sent, answered = self._checks.popleft()
        overdue = sent - self._answered
        if overdue <= 0:
            return
        reason = f"no reply in {self._bounds.timeout_s:g} s"
        if answered == self._answered:
            self.end(reason)
            return
        for waiter in islice(self._waiters, overdue):
            if not waiter.done():
                waiter.set_exception(lost(self._server, reason))


def down(server: str, reason: str) -> ValkeyDown:
    """The error for a command that was not sent."""
    count_failure("down")
    if refused := _REFUSED.search(reason):
        return refused_password(server, refused[0])
    return ValkeyDown(
        f"Valkey at {server} is down ({reason}), nothing was sent: check it with"
        " `headrace doctor`, then try again",
        retry_after_s=2,
    )


def lost(server: str, reason: str) -> ValkeyLost:
    """The error for a command that was sent and got no reply."""
    count_failure("lost")
    return ValkeyLost(
        f"Valkey at {server} did not respond ({reason}), and the outcome is unknown: try again if"
        " running the command twice is safe",
        retry_after_s=2,
    )


def count_failure(outcome: str) -> None:
    """Count one command without a reply."""
    metrics.bound(_FAILURES, "valkey_multiplexed_failures_total", outcome=outcome).inc()
