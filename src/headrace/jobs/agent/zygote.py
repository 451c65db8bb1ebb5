"""The zygote: imports the application once, forks slots from it, reaps them, and ends them if the agent dies.

One thread and no event loop, since a fork copies the calling thread alone: a lock that another thread holds at that
moment is never freed in the child. It runs no code of the user after the import. It ignores SIGTERM and
SIGINT: it ends when the agent's end of the control socket closes, after every slot was told to stop, given
END_S, killed and reaped. Sync slots were gone 10 ms after their agent, slots in C code after 2.03 s.

The standard library's forkserver was not taken: it hides what an import raises.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from setproctitle import setproctitle

from headrace.jobs.agent import control
from headrace.jobs.agent.board import Board
from headrace.jobs.agent.lines import TaskFacts
from headrace.jobs.agent.remains import adopt_orphans, end_children, end_group, lead_group
from headrace.jobs.slots.process import DECLARING, Application, run_slot
from headrace.kernel.errors import HeadraceError, InvalidInput
from headrace.kernel.metrics import discard_deltas

END_S: Final = 2.0
EXIT_BROKEN: Final = 70
PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Inherited:
    """The descriptors that the agent gave its zygote."""

    control: int
    board: int
    lock: int
    """Held by whoever inherits it: the next agent of this host waits until nobody does."""


@dataclass(frozen=True, slots=True)
class _Child:
    slot: int
    pid: int


def serve(inherited: Inherited, name: str, load: Callable[[], Application]) -> int:
    """Import by `load`, then fork until the agent is gone; returns the exit code.

    In a forked slot it does not return.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (inherited.control, inherited.board, inherited.lock):
        os.set_inheritable(descriptor, False)
    # So that it outlives a kill of the agent's whole group, and ends the slots, which have their own.
    lead_group()
    link = socket.socket(fileno=inherited.control)
    setproctitle(f"headrace zygote: {name}")
    _detach_input()
    # An import that never ends would not notice the agent's end.
    _bind_to_parent(signal.SIGKILL)
    began_s = time.monotonic()
    try:
        application = load()
        tasks = [TaskFacts.of(task) for task in application.registry]
    except BaseException as error:  # noqa: BLE001 - told to the agent, which ends with it
        with suppress(OSError):
            control.send(link, _broken(error))
        return EXIT_BROKEN
    # Here and not in each slot, whose memory every object that it looks at is copied into: 0.9 MB a slot.
    discard_deltas()
    gc.collect()
    gc.freeze()
    loaded = control.Loaded(
        pid=os.getpid(),
        tasks=tasks,
        settings=application.settings,
        threads=_threads(),
        sockets=_sockets(inherited.control),
        import_s=time.monotonic() - began_s,
    )
    board = Board(inherited.board)
    _bind_to_parent(0)
    with suppress(OSError):
        control.send(link, loaded)
    _Zygote(link, board, application, lock=inherited.lock).run()
    return 0


class _Zygote:
    def __init__(
        self, link: socket.socket, board: Board, application: Application, *, lock: int
    ) -> None:
        self._link = link
        self._board = board
        self._lock = lock
        self._application = application
        self._children: dict[int, _Child] = {}
        """By pidfd."""
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)

    def run(self) -> None:
        """Fork and reap until the agent is gone."""
        while self._step(None):
            pass
        self._end_all()

    def _step(self, wait_s: float | None) -> bool:
        """Wait for one thing to happen and see to it; whether the agent still is there."""
        is_there = True
        for descriptor, _ in self._poll.poll(None if wait_s is None else wait_s * 1000):
            if descriptor in self._children:
                self._reap(descriptor)
                continue
            order = control.receive_fork(self._link)
            if order is None:
                is_there = False
            else:
                self._fork(order[0].slot, order[1])
        return is_there

    def _fork(self, slot: int, link: socket.socket) -> None:
        with link:
            pid = os.fork()
            if pid == 0:
                self._become_slot(slot, link)
            lead_group(pid)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = _Child(slot, pid)
        self._poll.register(pidfd, select.POLLIN)
        self._tell(control.Forked(slot, pid), [pidfd])

    def _become_slot(self, slot: int, link: socket.socket) -> None:
        """Run the slot and end; never returns."""
        code = EXIT_BROKEN
        try:
            lead_group()
            self._link.close()
            for pidfd in self._children:
                os.close(pidfd)
            cell = None if slot == DECLARING else self._board.cell(slot)
            inherited = (self._lock, self._board.descriptor)
            code = run_slot(self._application, slot, link, cell=cell, inherited=inherited)
        except BaseException:  # noqa: BLE001 - the last thing that this process says
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Not sys.exit: it would wait for a handler's threads and run what the zygote registered.
            os._exit(code)

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        end_group(child.pid)
        _, status = os.waitpid(child.pid, 0)
        self._tell(control.Exited(child.slot, child.pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, message: control.FromZygote, descriptors: list[int] | None = None) -> None:
        # The agent may be gone: the next look at its socket says so.
        with suppress(OSError):
            control.send(self._link, message, descriptors or ())

    def _end_all(self) -> None:
        """The agent is gone: ask all slots to stop, kill what does not, leave nothing behind."""
        self._poll.unregister(self._link)
        self._link.close()
        adopt_orphans()
        for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, 10 * END_S)):
            for pidfd in self._children:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
            ends_s = time.monotonic() + patience_s
            while self._children and (left_s := ends_s - time.monotonic()) > 0:
                self._step(left_s)
        end_children(END_S)


def _broken(error: BaseException) -> control.Broken:
    if isinstance(error, HeadraceError):
        return control.Broken(f"{error.text} [{error.code}]", error.exit_code)
    text = "".join(traceback.format_exception(error))
    return control.Broken(text[-control.TEXT_CHARACTERS_MAX :], InvalidInput.exit_code)


def _detach_input() -> None:
    """Descriptors 0 to 2 lead somewhere, and 0 to no terminal, which slots cannot share."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    for descriptor in (1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)


def _bind_to_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _threads() -> list[str]:
    """Threads beside this one, also those that Python does not know of, such as numpy's BLAS's."""
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    native = len(list(Path("/proc/self/task").iterdir())) - 1 - len(names)
    return [*names, f"{native} of native libraries"] if native > 0 else names


def _sockets(known: int) -> list[str]:
    """Where the sockets of this process lead, but `known`."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if entry.readlink().name.startswith("socket:") and int(entry.name) != known:
                with socket.socket(fileno=os.dup(int(entry.name))) as opened:
                    found.append(_told_socket(opened))
    return found


def _told_socket(opened: socket.socket) -> str:
    try:
        return f"{opened.family.name} to {opened.getpeername()}"
    except OSError:
        return f"{opened.family.name} at {opened.getsockname()}"
