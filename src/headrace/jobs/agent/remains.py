"""What slots leave running: processes that their handlers forked or spawned, ended with their slot.

Each slot leads a process group, whose rest is killed before the dead slot is reaped: until then its pid, and so
the group's name, belongs to nobody else. A process that made its own session on purpose goes on and is adopted
by the agent (PR_SET_CHILD_SUBREAPER), which ends it at its own end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

PR_SET_CHILD_SUBREAPER: Final = 36
LOOK_EVERY_S: Final = 0.005


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def lead_group(pid: int = 0) -> None:
    """Make a process (0: this one) the leader of a group of its own."""
    # It may be gone, or have been made one already from the other side of its fork.
    with suppress(OSError):
        os.setpgid(pid, pid)


def end_group(leader: int) -> None:
    """Kill what is left of a leader's group. The leader must not have been reaped yet."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_children(wait_max_s: float) -> list[int]:
    """Kill and reap every child of this process, and the orphans that it inherits by it; who is left."""
    ends_s = time.monotonic() + wait_max_s
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > ends_s:
            return children
        time.sleep(LOOK_EVERY_S)
    return []


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
