"""The zygote: imports the application once, forks and reaps slots, ends them if the agent dies.

It has one thread and no event loop, because a fork copies only the calling thread: a lock that
another thread holds at that moment is never freed in the child. It runs no user code after the
import. It ignores SIGTERM and SIGINT and exits when the agent's end of the control socket closes.
Before, it stops every slot, waits END_S, then kills and reaps the rest.

The standard library's forkserver is not used because it hides the errors of an import.
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
from pathlib import Path
from typing import Final

from setproctitle import setproctitle

from headrace.engines.children import adopt_orphans, end_children, end_group, lead_group
from headrace.jobs.agent import zygote_protocol
from headrace.jobs.agent.queue_state import TaskFacts
from headrace.jobs.messages import DECLARING, Broken
from headrace.jobs.slots.process import Application, run_slot
from headrace.jobs.slots.status_board import StatusBoard
from headrace.kernel.metrics import discard_deltas

END_S: Final = 2.0
EXIT_BROKEN: Final = 70
PR_SET_PDEATHSIG: Final = 1


def serve(
    name: str, load: Callable[[], Application], *, control: int, board: int, lock: int
) -> int:
    """Import by `load`, then fork slots until the agent exits. Return the exit code.

    It does not return in a forked slot. The numbers are descriptors inherited from the agent: the
    control socket, the status board, and the host lock, for whose last holder the next agent waits.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (control, board, lock):
        os.set_inheritable(descriptor, False)
    # It must outlive a kill of the agent's process group, to end the slots, which have their own.
    lead_group()
    link = socket.socket(fileno=control)
    setproctitle(f"headrace zygote: {name}")
    _detach_input()
    # An import that hangs would not notice that the agent exits.
    _bind_to_parent(signal.SIGKILL)
    began_s = time.monotonic()
    try:
        application = load()
        tasks = [TaskFacts.of(task) for task in application.jobs.registry]
    except BaseException as error:  # noqa: BLE001 - sent to the agent, which exits with it
        with suppress(OSError):
            zygote_protocol.send(link, Broken.of(error))
        return EXIT_BROKEN
    # Here and not in each slot, which would copy every page that the collector touches.
    discard_deltas()
    gc.collect()
    gc.freeze()
    loaded = zygote_protocol.Loaded(
        pid=os.getpid(),
        tasks=tasks,
        settings=application.settings,
        threads=_threads(),
        sockets=_sockets(control),
        import_s=time.monotonic() - began_s,
    )
    _bind_to_parent(0)
    with suppress(OSError):
        zygote_protocol.send(link, loaded)
    _Zygote(link, StatusBoard(board), application, lock=lock).run()
    return 0


class _Zygote:
    def __init__(
        self, link: socket.socket, board: StatusBoard, application: Application, *, lock: int
    ) -> None:
        self._link = link
        self._board = board
        self._lock = lock
        self._application = application
        self._children: dict[int, zygote_protocol.Forked] = {}
        """By pidfd."""
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)

    def run(self) -> None:
        """Fork and reap until the agent exits."""
        while self._step(None):
            pass
        self._end_all()

    def _step(self, wait_s: float | None) -> bool:
        """Wait for one event and handle it. Return whether the agent still runs."""
        is_alive = True
        for descriptor, _ in self._poll.poll(None if wait_s is None else wait_s * 1000):
            if descriptor in self._children:
                self._reap(descriptor)
                continue
            order = zygote_protocol.receive_fork(self._link)
            if order is None:
                is_alive = False
            else:
                self._fork(order[0].slot, order[1])
        return is_alive

    def _fork(self, slot: int, link: socket.socket) -> None:
        with link:
            pid = os.fork()
            if pid == 0:
                self._become_slot(slot, link)
            lead_group(pid)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = child = zygote_protocol.Forked(slot, pid)
        self._poll.register(pidfd, select.POLLIN)
        self._send(child, [pidfd])

    def _become_slot(self, slot: int, link: socket.socket) -> None:
        """Run the slot and exit; never returns."""
        code = EXIT_BROKEN
        try:
            lead_group()
            self._link.close()
            for pidfd in self._children:
                os.close(pidfd)
            cell = None if slot == DECLARING else self._board.cell(slot)
            inherited = (self._lock, self._board.descriptor)
            code = run_slot(self._application, slot, link, cell=cell, inherited=inherited)
        except BaseException:  # noqa: BLE001 - printed, then this process exits
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            # Not sys.exit: it would wait for handler threads and run the zygote's exit functions.
            os._exit(code)

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        end_group(child.pid)
        _, status = os.waitpid(child.pid, 0)
        self._send(zygote_protocol.Exited(child.slot, child.pid, os.waitstatus_to_exitcode(status)))

    def _send(
        self, message: zygote_protocol.FromZygote, descriptors: list[int] | None = None
    ) -> None:
        # If the agent has exited, the next read of its socket finds out.
        with suppress(OSError):
            zygote_protocol.send(self._link, message, descriptors or ())

    def _end_all(self) -> None:
        """Stop all slots after the agent's exit, kill those that hang, leave no process behind."""
        self._poll.unregister(self._link)
        self._link.close()
        adopt_orphans()
        for number, grace_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, 10 * END_S)):
            for pidfd in self._children:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
            ends_s = time.monotonic() + grace_s
            while self._children and (left_s := ends_s - time.monotonic()) > 0:
                self._step(left_s)
        end_children(END_S)


def _detach_input() -> None:
    """Open descriptors 0 to 2, and detach 0 from a terminal, which slots cannot share."""
    null_device = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_device, 0)
    for descriptor in (1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(null_device, descriptor)
    if null_device > 2:
        os.close(null_device)


def _bind_to_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _threads() -> list[str]:
    """Other threads of this process, also those of native libraries such as numpy's BLAS."""
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    native = len(list(Path("/proc/self/task").iterdir())) - 1 - len(names)
    return [*names, f"{native} of native libraries"] if native > 0 else names


def _sockets(known: int) -> list[str]:
    """The addresses of this process's sockets, except `known`."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if entry.readlink().name.startswith("socket:") and int(entry.name) != known:
                with socket.socket(fileno=os.dup(int(entry.name))) as opened:
                    found.append(_socket_text(opened))
    return found


def _socket_text(opened: socket.socket) -> str:
    try:
        return f"{opened.family.name} to {opened.getpeername()}"
    except OSError:
        return f"{opened.family.name} at {opened.getsockname()}"
