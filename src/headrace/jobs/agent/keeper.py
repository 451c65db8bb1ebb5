"""The agent's hold on its zygote: starts it, hears it, and starts another when it dies.

It is started by exec, not forked from the agent: so the first and every later one begin alike, and nothing of the
agent (its event loop, its connections) is in the slots. Slots outlive their zygote: they become the agent's own
children (PR_SET_CHILD_SUBREAPER), which then reaps them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

from headrace.jobs.agent import control
from headrace.jobs.agent.board import Board
from headrace.jobs.agent.remains import adopt_orphans
from headrace.jobs.errors import ApplicationBroken
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

RESTARTS: Final = Backoff(0.05, 10.0)
HEALTHY_S: Final = 60.0
ENDS_S: Final = 3.0
_log: Final = logger(__name__)


class ZygoteKeeper:
    """One zygote at a time; `command` makes its command line of options that name its descriptors."""

    def __init__(
        self, command: Callable[[Sequence[str]], Sequence[str]], board: Board, lock: int
    ) -> None:
        self._command = command
        self._board = board
        self._lock = lock
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_loaded = asyncio.Event()
        self._ended = asyncio.Event()
        self._broken: control.Broken | None = None
        self.loaded: control.Loaded | None = None
        """What the application is, once it was imported."""
        self.on_forked: Callable[[control.Forked, int], None] = lambda _told, pidfd: os.close(pidfd)
        self.on_exited: Callable[[control.Exited], None] = lambda _told: None

    @property
    def pid(self) -> int | None:
        """The zygote's pid, while there is one."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Keep a zygote until cancelled. Raises: ApplicationBroken, where the first one cannot import."""
        adopt_orphans()
        deaths = 0
        try:
            while True:
                began_s = time.monotonic()
                self._start()
                await self._ended.wait()
                status = self._stop()
                if self._broken is not None and self.loaded is None:
                    raise ApplicationBroken(self._broken.text, self._broken.exit_code)
                deaths = 1 if time.monotonic() - began_s > HEALTHY_S else deaths + 1
                told = self._broken.text if self._broken is not None else ""
                _log.error("zygote_died", status=status, deaths=deaths, error=told)
                await asyncio.sleep(RESTARTS.delay_s(deaths))
        finally:
            self._stop()

    async def wait_loaded(self) -> control.Loaded:
        """Wait until slots can be forked."""
        await self._is_loaded.wait()
        assert self.loaded is not None, "set before the event"
        return self.loaded

    def fork(self, slot: int, link: socket.socket) -> bool:
        """Order a slot with its socket end; False while there is no zygote."""
        if self._link is None or not self._is_loaded.is_set():
            return False
        try:
            control.send(self._link, control.Fork(slot), [link.fileno()])
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._is_loaded.clear()
        self._ended.clear()
        self._broken = None
        ours, theirs = control.make_pair()
        ours.setblocking(False)
        inherited = (theirs.fileno(), self._board.descriptor, self._lock)
        names = ("control", "board", "lock")
        options = [f"--{name}={number}" for name, number in zip(names, inherited, strict=True)]
        kept = {k: v for k, v in os.environ.items() if k not in _OWN_VARIABLES}
        with theirs:
            self._process = subprocess.Popen(
                self._command(options), pass_fds=inherited, env=kept, stdin=subprocess.DEVNULL
            )
        self._link = ours
        asyncio.get_running_loop().add_reader(ours, self._hear, ours)

    def _stop(self) -> int | None:
        """Close the control socket, which ends a living zygote and its slots; its exit status."""
        self._is_loaded.clear()
        if self._link is not None:
            # Before the close: else the loop keeps the descriptor and the zygote never sees the end.
            asyncio.get_running_loop().remove_reader(self._link)
            self._link.close()
            self._link = None
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            # It has no slots any more where this is an orderly end; else it ends them first.
            return process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            return None

    def _hear(self, link: socket.socket) -> None:
        while True:
            try:
                heard = control.receive_from_zygote(link)
            except BlockingIOError:
                return
            if heard is None:
                asyncio.get_running_loop().remove_reader(link)
                self._ended.set()
                return
            message, descriptors = heard
            match message:
                case control.Loaded():
                    self._note_loaded(message)
                case control.Broken():
                    self._broken = message
                case control.Forked():
                    self.on_forked(message, descriptors[0])
                case control.Exited():
                    self.on_exited(message)

    def _note_loaded(self, loaded: control.Loaded) -> None:
        self.loaded = loaded
        self._is_loaded.set()
        _log.info("application_imported", pid=loaded.pid, seconds=round(loaded.import_s, 3))
        if loaded.threads or loaded.sockets:
            _log.warning(
                "imports_left_things_open",
                threads=loaded.threads,
                sockets=loaded.sockets,
                advice="slots have none of these threads and share these sockets: open them in"
                " @app.on_slot_start",
            )


_OWN_VARIABLES: Final = frozenset({"HEADRACE_READY_FD", "HEADRACE_PARENT_PID"})
