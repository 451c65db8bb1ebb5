"""A slot's process, from its fork to its end: runs what its agent gives it, over one socket.

Its event loop is made here, after the fork. It ends when the agent says so, when it is told to by SIGTERM, and when
the agent's end of the socket closes: then nobody takes outcomes any more, and the next agent of this host waits
for it to be gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import uvloop
from setproctitle import setproctitle

from headrace.jobs.model import JobsConfig
from headrace.jobs.slots.cell import Cell
from headrace.jobs.slots.children import hide_from_children
from headrace.jobs.slots.messages import (
    FromSlot,
    Left,
    Measured,
    Recycle,
    Settled,
    SpendAnswer,
    Stop,
    ToSlot,
    Work,
)
from headrace.jobs.slots.runner import SlotRunner
from headrace.jobs.slots.wire import FrameSplitter, decode_to_slot, encode_frame
from headrace.jobs.tasks import Registry
from headrace.kernel.errors import HeadraceError, InvalidInput
from headrace.kernel.logs import logger
from headrace.kernel.metrics import take_deltas

DECLARING: Final = -1
"""The number of the process that takes no work: it declares the code's queues and leaves."""
ORPHANED_GRACE_S: Final = 0.5
TERMINATED_GRACE_S: Final = 1.0
CLOSE_S: Final = 2.0
MEASURE_EVERY_S: Final = 5.0
IDLE_AFTER_S: Final = 1.0
_log: Final = logger(__name__)


class Application(Protocol):
    """What a slot and its zygote need of an app."""

    @property
    def registry(self) -> Registry: ...

    @property
    def jobs_config(self) -> JobsConfig: ...

    @property
    def settings(self) -> dict[str, str]:
        """`section.name` to the written value, of what is not the default."""

    async def declare(self) -> dict[str, int]:
        """Store what the code says of its queues; their ids by name."""

    async def close(self) -> None:
        """Close what was opened."""


class Declared(msgspec.Struct, frozen=True, array_like=True, tag="declared"):
    """The queues are stored: their ids by name."""

    queues: dict[str, int]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", kw_only=True):
    """The queues could not be stored."""

    code: str
    text: str
    exit_code: int
    retryable: bool


def run_slot(
    application: Application,
    number: int,
    link: socket.socket,
    *,
    cell: Cell | None,
    inherited: Sequence[int],
) -> int:
    """Live as slot `number` until told to leave; returns the exit code. Call in a fresh fork.

    `inherited` are the descriptors that its handlers' own processes must not hold.
    """
    setproctitle(f"headrace slot {number}: starting" if cell else "headrace slot: declaring queues")
    hide_from_children(link, inherited)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if cell is None:
            return runner.run(_declare(application, link))
        runner.run(_Slot(application, number, cell).run(link))
        # The runner's end would wait for what handlers left running.
        os._exit(0)


class _Link(asyncio.Protocol):
    """The slot's end of its socket."""

    def __init__(self, on_message: Callable[[ToSlot], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameSplitter()
        self._transport: Any = None
        self._is_drained = asyncio.Event()
        self._is_drained.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._on_message(decode_to_slot(body))

    def connection_lost(self, _error: Exception | None) -> None:
        self._is_drained.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self._is_drained.clear()

    def resume_writing(self) -> None:
        self._is_drained.set()

    def say(self, message: FromSlot | Declared | Refused) -> None:
        """Send; without an agent there is nobody to tell."""
        if not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def flush(self) -> None:
        """Wait until everything said has left this process."""
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits(0)
            await self._is_drained.wait()


class _Slot:
    def __init__(self, application: Application, number: int, cell: Cell) -> None:
        self._application = application
        self._number = number
        self._queue = ""
        self._worked_s = 0.0
        self._is_idle_planned = False
        self._is_orphan = False
        self._zygote_pid = os.getppid()
        self._is_unfit = False
        self._has_left = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._private_bytes_max = application.jobs_config.slot_private_max_bytes
        self._is_measure_planned = False
        self._runner = SlotRunner(
            application.registry, say=self._say, config=application.jobs_config, board=cell
        )
        self._link = _Link(self._heard, self._orphaned)

    async def run(self, link: socket.socket) -> None:
        """Until it has left."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self._stop(TERMINATED_GRACE_S))
        await loop.create_unix_connection(lambda: self._link, sock=link)
        await self._runner.start()
        self._title("idle")
        await self._has_left.wait()
        await self._link.flush()
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self._application.close()
        if self._is_orphan and os.getppid() != self._zygote_pid:
            # With agent and zygote gone, nobody else ends what handlers left.
            os.killpg(0, signal.SIGKILL)

    def _orphaned(self) -> None:
        self._is_orphan = not self._has_left.is_set()
        self._stop(ORPHANED_GRACE_S)

    def _heard(self, message: ToSlot) -> None:
        match message:
            case Work():
                if message.queue != self._queue:
                    self._queue = message.queue
                    self._title(message.queue)
                self._worked_s = time.monotonic()
                self._runner.give(message)
            case SpendAnswer():
                self._runner.answer(message)
            case Stop():
                self._stop(message.grace_s)

    def _say(self, message: FromSlot) -> None:
        if isinstance(message, Left):
            self._link.say(Measured(take_deltas()))
            self._has_left.set()
        elif not self._is_measure_planned:
            self._is_measure_planned = True
            asyncio.get_running_loop().call_later(MEASURE_EVERY_S, self._measure)
        self._link.say(message)
        if isinstance(message, Settled):
            if any(message.tracebacks):
                self._require_descriptors()
            self._plan_idle()

    def _stop(self, grace_s: float) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._runner.stop(grace_s))

    def _measure(self) -> None:
        """Tell what was counted, and ask to be replaced where this process alone holds too much memory."""
        self._is_measure_planned = False
        self._link.say(Measured(take_deltas()))
        try:
            private = private_bytes()
        except OSError as error:
            self._give_up(error)
            return
        if private > self._private_bytes_max:
            self._link.say(Recycle(private))

    def _require_descriptors(self) -> None:
        """After a fault: where no file can be opened any more, every further job would fail as well."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Start nothing more, let the calls in hand end, and be replaced."""
        if self._is_unfit:
            return
        self._is_unfit = True
        _log.error("slot_unfit", slot=self._number, error=str(error))
        self._link.say(Recycle(0, str(error)))
        tasks = self._application.registry
        self._stop(max((task.timeout_s for task in tasks), default=TERMINATED_GRACE_S))

    def _plan_idle(self) -> None:
        if not self._is_idle_planned:
            self._is_idle_planned = True
            asyncio.get_running_loop().call_later(IDLE_AFTER_S, self._note_idle)

    def _note_idle(self) -> None:
        """Say in the process list that nothing runs; looked at about once a second at most."""
        self._is_idle_planned = False
        if self._runner.jobs_open > 0:
            return
        if time.monotonic() - self._worked_s < IDLE_AFTER_S:
            self._plan_idle()
        elif self._queue:
            self._queue = ""
            self._title("idle")

    def _title(self, what: str) -> None:
        setproctitle(f"headrace slot {self._number}: {what}")


async def _declare(application: Application, link: socket.socket) -> int:
    end = _Link(lambda _: None, lambda: os._exit(0))
    await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=link)
    answer: Declared | Refused
    try:
        answer = Declared(await application.declare())
    except HeadraceError as error:
        answer = Refused(
            code=error.code,
            text=error.text,
            exit_code=error.exit_code,
            retryable=error.retryable,
        )
    except Exception:  # noqa: BLE001 - told to the agent, which ends with it
        answer = Refused(
            code="jobs.application_broken",
            text=traceback.format_exc(),
            exit_code=InvalidInput.exit_code,
            retryable=False,
        )
    end.say(answer)
    await end.flush()
    await application.close()
    return 0


def private_bytes() -> int:
    """Memory that this process alone holds, having written to it; 2 ms a 100 MB of heap."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    return 0
