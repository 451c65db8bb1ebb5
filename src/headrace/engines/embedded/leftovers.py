"""What an earlier run left behind: processes that are still ending, and files that name dead ones.

A process belongs to a data folder if its working directory lies in it and its executable is one of the
engines'; both are read from /proc, and the signal goes through a pidfd opened before the reading, so a pid
taken over by a stranger is never hit. PostgreSQL itself would only ask whether any process has the pid in
its lock file, and then refuse to start whenever a stranger has it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Final

from headrace.engines.embedded.errors import LeftoverAlive

ENGINE_PROGRAMS: Final = frozenset({"postgres", "initdb", "valkey-server"})
ENDING_S: Final = 10.0
"""An orphaned PostgreSQL kills its own children after 5 s, an orphaned Valkey writes its log and ends."""
KILLED_S: Final = 10.0
_POLL_S: Final = 0.02


def processes_in(folder: Path) -> list[int]:
    """Pids of live engine processes that work in `folder`."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _works_in(pid, folder)]


def _works_in(pid: int, folder: Path) -> bool:
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
        works_in = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return False  # gone, a zombie, or another user's
    # A wheel that was upgraded meanwhile shows as `postgres (deleted)`.
    return works_in.is_relative_to(folder) and program.name.split(" ")[0] in ENGINE_PROGRAMS


async def end_leftovers(folder: Path, *, patience_s: float = ENDING_S) -> None:
    """Wait for engine processes of an earlier run, then kill those that stay. Raises: LeftoverAlive."""
    if await _wait_none(folder, patience_s):
        return
    for pid in processes_in(folder):
        kill_engine(pid, folder)
    if not await _wait_none(folder, KILLED_S):
        raise LeftoverAlive(
            f"data folder {folder}: processes {processes_in(folder)} of an earlier run do not end even"
            " when killed, which points to a disk that hangs: mend it, or restart the machine"
        )


def kill_engine(pid: int, folder: Path) -> None:
    """SIGKILL `pid` if it is an engine process that works in `folder`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _works_in(pid, folder):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself
    finally:
        os.close(pidfd)


async def _wait_none(folder: Path, patience_s: float) -> bool:
    deadline_s = time.monotonic() + patience_s
    while processes_in(folder):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True
