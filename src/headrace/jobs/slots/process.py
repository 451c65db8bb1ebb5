"""A slot's process, from fork to exit: runs the work that its agent sends over one socket.

Its event loop is created after the fork. The process exits on the message `Stop`, on SIGTERM, and
when the agent's end of the socket closes: then no process receives its outcomes, and the host's
next agent waits for its exit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import uvloop
from setproctitle import setproctitle

from headrace.engines.children import adopt_orphans, end_children
from headrace.jobs.messages import (
    Ack,
    Broken,
    Declared,
    FromSlot,
    Left,
    Measured,
    Recycle,
    Stop,
    ToSlot,
    Work,
    decode_to_slot,
)
from headrace.jobs.service import Jobs
from headrace.jobs.slots.isolation import hide_from_children
from headrace.jobs.slots.runner import SlotRunner
from headrace.jobs.slots.status_board import StatusCell
from headrace.kernel import spans
from headrace.kernel.ipc import MessageConnection
from headrace.kernel.logs import logger
from headrace.kernel.metrics import take_deltas

ORPHANED_GRACE_S: Final = 0.5
TERMINATED_GRACE_S: Final = 1.0
CLOSE_S: Final = 2.0
LEFT_PROCESSES_S: Final = 1.0
MEASURE_EVERY_S: Final = 5.0
IDLE_AFTER_S: Final = 1.0
_log: Final = logger(__name__)


class Application(Protocol):
    """The parts of an app that a slot and its zygote need."""

    @property
    def jobs(self) -> Jobs: ...

    @property
    def settings(self) -> dict[str, str]:
        """`section.name` to the written value, of settings that are not the default."""

    async def declare(self) -> dict[str, int]:
        """Store the queues that the code declares. Return their ids by name."""

    async def close(self) -> None:
        """Close all connections."""


def run_slot(
    application: Application,
    number: int,
    link: socket.socket,
    *,
    cell: StatusCell | None,
    inherited: Sequence[int],
) -> int:
    """Run as slot `number` until it leaves. Return the exit code. Call in a fresh fork.

    `inherited` are descriptors that processes of its handlers must not hold.
    """
    setproctitle(f"headrace slot {number}: starting" if cell else "headrace slot: declaring queues")
    hide_from_children(link, inherited)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if cell is None:
            return runner.run(_declare(application, link))
        runner.run(_Slot(application, number, cell).run(link))
        # The end of asyncio.Runner would wait for tasks and threads that handlers left running.
        os._exit(0)


class _Slot:
    def __init__(self, application: Application, number: int, cell: StatusCell) -> None:
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
        self._private_bytes_max = application.jobs.config.slot_private_max_bytes
        self._is_measure_planned = False
        self._runner = SlotRunner(
            application.jobs.registry,
            send=self._send,
            config=application.jobs.config,
            status=cell,
        )
        self._link = MessageConnection(decode_to_slot, self._receive, self._orphaned)

    async def run(self, link: socket.socket) -> None:
        """Run until the slot has left."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self._stop(TERMINATED_GRACE_S))
        await self._link.connect(link)
        self._application.jobs.use_agent(self._runner.agent)
        await self._runner.start()
        self._title("idle")
        await self._has_left.wait()
        await self._link.flush()
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self._application.close()
        spans.flush()
        if self._is_orphan:
            # The zygote may have died too, or may become their parent only after this exit.
            adopt_orphans()
            end_children(LEFT_PROCESSES_S)
        if self._is_orphan and os.getppid() != self._zygote_pid:
            # Members of the group whose own parents had died before.
            os.killpg(0, signal.SIGKILL)

    def _orphaned(self) -> None:
        self._is_orphan = not self._has_left.is_set()
        self._runner.agent.close()
        self._stop(ORPHANED_GRACE_S)

    def _receive(self, message: ToSlot) -> None:
        match message:
            case Work():
                if message.queue != self._queue:
                    self._queue = message.queue
                    self._title(message.queue)
                self._worked_s = time.monotonic()
            case Stop():
                self._stop(message.grace_s)
        self._runner.receive(message)

    def _send(self, message: FromSlot) -> None:
        if isinstance(message, Left):
            self._link.send(Measured(take_deltas()))
            self._has_left.set()
        elif not self._is_measure_planned:
            self._is_measure_planned = True
            asyncio.get_running_loop().call_later(MEASURE_EVERY_S, self._measure)
        self._link.send(message)
        if isinstance(message, Ack):
            if any(outcome.traceback for outcome in (message.outcomes or {}).values()):
                self._require_descriptors()
            self._plan_idle()

    def _stop(self, grace_s: float) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._runner.stop(grace_s))

    def _measure(self) -> None:
        """Send the counters, and request a replacement if this process holds too much memory."""
        self._is_measure_planned = False
        self._link.send(Measured(take_deltas()))
        try:
            private = private_bytes()
        except OSError as error:
            self._give_up(error)
            return
        if private > self._private_bytes_max:
            self._link.send(Recycle(private))

    def _require_descriptors(self) -> None:
        """After an error, check that files can be opened: else every further job would fail."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Start no more jobs, let running calls end, and request a replacement."""
        if self._is_unfit:
            return
        self._is_unfit = True
        _log.error("slot_unfit", slot=self._number, error=str(error))
        self._link.send(Recycle(0, str(error)))
        tasks = self._application.jobs.registry
        self._stop(max((task.timeout_s for task in tasks), default=TERMINATED_GRACE_S))

    def _plan_idle(self) -> None:
        if not self._is_idle_planned:
            self._is_idle_planned = True
            asyncio.get_running_loop().call_later(IDLE_AFTER_S, self._note_idle)

    def _note_idle(self) -> None:
        """Show `idle` in the process list if no job runs; checked about once a second."""
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
    end = MessageConnection(decode_to_slot, lambda _: None, lambda: os._exit(0))
    await end.connect(link)
    try:
        end.send(Declared(await application.declare()))
    except Exception as error:  # noqa: BLE001 - sent to the agent, which exits with it
        end.send(Broken.of(error))
    await end.flush()
    await application.close()
    return 0


def private_bytes() -> int:
    """Memory that this process does not share, because it wrote to it. Slow: 2 ms per 100 MB."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    return 0
