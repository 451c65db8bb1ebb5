"""One forked slot as its agent keeps it, from its fork to its exit."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from headrace.jobs.agent.board import Doing
from headrace.jobs.agent.links import SlotLink
from headrace.jobs.agent.remains import end_group
from headrace.jobs.agent.seats import Seat

OVERTIME_GRACE_S: Final = 2.0
"""What a slot gets beyond a call's timeout to end the call itself."""


@dataclass(slots=True, eq=False)
class ForkedSlot:
    """A slot's process and its seat."""

    number: int
    link: SlotLink
    seat: Seat
    pid: int = 0
    pidfd: int = -1
    is_ready: bool = False
    is_leaving: bool = False
    """It was asked to stop, or will be once its hands are empty."""
    was_asked: bool = False
    has_left: bool = False
    is_gone: bool = False
    """The process has ended."""
    status: int | None = None
    """Its exit code, or the signal's number below 0, once it is known."""
    link_lost: bool = False
    """Its socket's end was read: it says nothing more."""
    why_killed: str = ""
    is_overtime: bool = False
    is_blameless: bool = False
    """It was killed for no fault of its jobs."""
    warned_s: float = 0.0

    def kill(self, why: str, *, is_overtime: bool = False, is_blameless: bool = False) -> None:
        """End it at once; its exit follows."""
        if self.why_killed or self.pidfd < 0:
            return
        self.why_killed = why
        self.is_overtime = is_overtime
        self.is_blameless = is_blameless
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """Its exit status where it is our own child, orphaned by a dead zygote; None: not ours or not ended."""
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

    def overtime_s(self, doing: Doing, now_s: float) -> float:
        """How long it runs beyond its call's timeout; 0 or less: it does not."""
        return now_s - doing.started_s - doing.timeout_s - OVERTIME_GRACE_S if doing.jobs else 0.0

    def silent_s(self, doing: Doing, now_s: float) -> float:
        """How long its event loop has not turned while a call ran."""
        return now_s - max(doing.beat_s, doing.started_s) if doing.jobs else 0.0
