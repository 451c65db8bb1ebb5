"""The agent's side of its zygote: starts it, sends fork requests, restarts it when it dies.

The zygote is started by exec, not forked from the agent: the first and every later one start
alike, and slots inherit nothing of the agent (its event loop, its connections). Slots outlive
their zygote: they become children of the agent (PR_SET_CHILD_SUBREAPER), which reaps them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from headrace.engines.children import RestartDelay, adopt_orphans
from headrace.jobs.agent import zygote_protocol
from headrace.jobs.errors import ApplicationBroken, NotDeclared
from headrace.jobs.messages import DECLARING, Broken, Declared
from headrace.jobs.slots.status_board import StatusBoard
from headrace.kernel.ipc import read_message
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

RESTARTS: Final = Backoff(0.05, 10.0)
ENDS_S: Final = 3.0
DECLARE_S_MAX: Final = 60.0
_OWN_VARIABLES: Final = frozenset({"HEADRACE_READY_FD", "HEADRACE_PARENT_PID"})
_log: Final = logger(__name__)
_decode_answer: Final = msgspec.msgpack.Decoder(Declared | Broken).decode


class ZygoteClient:
    """One zygote at a time. `command` returns its command line for options with its descriptors."""

    def __init__(
        self, command: Callable[[Sequence[str]], Sequence[str]], board: StatusBoard, lock: int
    ) -> None:
        self._command = command
        self._board = board
        self._lock = lock
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_loaded = asyncio.Event()
        self._ended = asyncio.Event()
        self._broken: Broken | None = None
        self.loaded: zygote_protocol.Loaded | None = None
        """The application's facts, once it was imported."""
        self.on_forked: Callable[[zygote_protocol.Forked, int], None] = _close_pidfd
        self.on_exited: Callable[[zygote_protocol.Exited], None] = lambda _message: None

    @property
    def pid(self) -> int | None:
        """The zygote's pid, while it runs."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Keep a zygote running until cancelled.

        Raises: ApplicationBroken if the first one cannot import the application.
        """
        adopt_orphans()
        delay = RestartDelay(RESTARTS)
        try:
            while True:
                delay.note_start()
                self._start()
                await self._ended.wait()
                status = self._stop()
                if self._broken is not None and self.loaded is None:
                    raise ApplicationBroken(self._broken.text, self._broken.exit_code)
                delay_s = delay.next_s()
                error = self._broken.text if self._broken is not None else ""
                _log.error("zygote_died", status=status, deaths=delay.deaths, error=error)
                await asyncio.sleep(delay_s)
        finally:
            self._stop()

    async def wait_loaded(self) -> zygote_protocol.Loaded:
        """Wait until slots can be forked."""
        await self._is_loaded.wait()
        assert self.loaded is not None, "set before the event"
        return self.loaded

    def fork(self, slot: int, link: socket.socket) -> bool:
        """Request a slot with its socket end. Return False while there is no zygote."""
        if self._link is None or not self._is_loaded.is_set():
            return False
        try:
            zygote_protocol.send(self._link, zygote_protocol.Fork(slot), [link.fileno()])
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._is_loaded.clear()
        self._ended.clear()
        self._broken = None
        ours, theirs = zygote_protocol.make_pair()
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
        asyncio.get_running_loop().add_reader(ours, self._receive, ours)

    def _stop(self) -> int | None:
        """Close the control socket, which ends the zygote and its slots. Return its exit status."""
        self._is_loaded.clear()
        if self._link is not None:
            # Before the close: else the loop keeps the descriptor and the zygote sees no end.
            asyncio.get_running_loop().remove_reader(self._link)
            self._link.close()
            self._link = None
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            # After an orderly stop it has no slots left; otherwise it ends them first.
            return process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            return None

    def _receive(self, link: socket.socket) -> None:
        while True:
            try:
                received = zygote_protocol.receive_from_zygote(link)
            except BlockingIOError:
                return
            if received is None:
                asyncio.get_running_loop().remove_reader(link)
                self._ended.set()
                return
            message, descriptors = received
            match message:
                case zygote_protocol.Loaded():
                    self._note_loaded(message)
                case Broken():
                    self._broken = message
                case zygote_protocol.Forked():
                    self.on_forked(message, descriptors[0])
                case zygote_protocol.Exited():
                    self.on_exited(message)

    def _note_loaded(self, loaded: zygote_protocol.Loaded) -> None:
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


def _close_pidfd(_message: zygote_protocol.Forked, pidfd: int) -> None:
    os.close(pidfd)


async def declared_ids(zygote: ZygoteClient) -> dict[str, int]:
    """Store the queues that the code declares. Return their ids by name.

    A fork of the zygote does it: it has the code, and may run an event loop.
    Raises: NotDeclared, which is retryable; ApplicationBroken if the declarations cannot be stored.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        is_requested = zygote.fork(DECLARING, theirs)
    if not is_requested:
        ours.close()
        raise NotDeclared("the zygote is not running: retry when it has restarted")
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=2**22)
    try:
        async with asyncio.timeout(DECLARE_S_MAX):
            answer = _decode_answer(await read_message(reader))
    except (TimeoutError, EOFError, ConnectionError) as error:
        raise NotDeclared(f"the declaring process did not answer: {error!r}") from error
    finally:
        writer.close()
    if isinstance(answer, Declared):
        return answer.queues
    if answer.retryable:
        raise NotDeclared(answer.text)
    raise ApplicationBroken(answer.text, answer.exit_code)
