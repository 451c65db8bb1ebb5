"""One forked slot as its agent sees it: its process, from fork to exit, and its socket."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from headrace.engines.children import end_group
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.slots.status_board import SlotStatus
from headrace.kernel.ipc import MessageConnection

OVERTIME_GRACE_S: Final = 2.0
"""Extra time for a slot to end a call over its timeout by itself."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A slot's process, its connection, and the slot as the dispatcher sees it."""

    number: int
    connection: MessageConnection
    """The agent's end of its socket. Work that a slot does not read is settled at its exit."""
    worker: WorkerProxy
    pid: int = 0
    pidfd: int = -1
    is_ready: bool = False
    is_leaving: bool = False
    """It received a stop request, or will once it has no leases."""
    was_stopped: bool = False
    """It received a stop request."""
    has_left: bool = False
    has_exited: bool = False
    exit_status: int | None = None
    """Its exit code, or the negative signal number; None until it is known."""
    connection_lost: bool = False
    """Its socket was read to the end: no more messages follow."""
    why_killed: str = ""
    is_overtime: bool = False
    """It was killed for a call over its timeout."""
    is_blameless: bool = False
    """It was killed for a reason that is not its jobs' fault."""
    warned_s: float = 0.0

    def kill(self, why: str, *, is_overtime: bool = False, is_blameless: bool = False) -> None:
        """Send SIGKILL; its exit is reported later."""
        if self.why_killed or self.pidfd < 0:
            return
        self.why_killed = why
        self.is_overtime = is_overtime
        self.is_blameless = is_blameless
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """Reap it if a dead zygote left it to this process. Return its exit status, else None."""
        try:
            if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            end_group(self.pid)
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None
        if ended is None:
            return None
        is_exit = ended.si_code == os.CLD_EXITED
        return ended.si_status if is_exit else -ended.si_status

    def overtime_s(self, status: SlotStatus, now_s: float) -> float:
        """Seconds that its call runs over its timeout and grace; 0 or less if it does not."""
        if not status.jobs:
            return 0.0
        return now_s - status.started_s - status.timeout_s - OVERTIME_GRACE_S

    def silent_s(self, status: SlotStatus, now_s: float) -> float:
        """Seconds since its event loop last ran while a call is running."""
        return now_s - max(status.beat_s, status.started_s) if status.jobs else 0.0
