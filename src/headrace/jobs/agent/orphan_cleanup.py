"""Kills the processes that handlers forked or spawned, once their slot has ended.

Each slot leads a process group, which is killed before the dead slot is reaped: until then no
other process can get its pid, which names the group. A process that made its own session keeps
running. The agent adopts it (PR_SET_CHILD_SUBREAPER) and kills it at its own end.
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
POLL_EVERY_S: Final = 0.005


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def lead_group(pid: int = 0) -> None:
    """Make a process (0: this one) the leader of its own process group."""
    # It may have exited, or the other side of its fork was faster.
    with suppress(OSError):
        os.setpgid(pid, pid)


def end_group(leader: int) -> None:
    """Kill the rest of a leader's group. The leader must not have been reaped yet."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_children(wait_max_s: float) -> list[int]:
    """Kill and reap every child of this process, also inherited ones. Return those left."""
    ends_s = time.monotonic() + wait_max_s
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > ends_s:
            return children
        time.sleep(POLL_EVERY_S)
    return []


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
