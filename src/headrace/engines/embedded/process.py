"""Start and logs of engine processes, and those that an earlier run left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.engines.children import ChildProcess
from headrace.engines.embedded.data_folder import OrphanAlive, StartFailed

LOG_LINES_SHOWN: Final = 12
_LOG_TAIL_BYTES: Final = 4096
ENGINE_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
"""The complete environment of engines: PGDATA or PGPORT of a shell would change them."""


async def start_engine(command: Sequence[str], *, log: Path, **options: Any) -> ChildProcess:
    """Start `command` and append its output to `log`; `options` are those of `ChildProcess`."""
    with log.open("ab") as output:
        return await ChildProcess.start(
            command, environment=ENGINE_ENVIRONMENT, output=output, **options
        )


async def wait_engine_ready(
    process: ChildProcess,
    is_ready: Callable[[], Awaitable[bool]],
    *,
    name: str,
    log: Path,
    timeout_s: float,
) -> None:
    """Wait until the engine `name` responds. Raises: StartFailed."""
    ends_s = time.monotonic() + timeout_s
    while not await is_ready():
        if not process.is_alive:
            raise start_failure(name, "ended during its start", log)
        if time.monotonic() > ends_s:
            raise start_failure(name, f"did not respond within {timeout_s:.0f} s", log)
        await asyncio.sleep(_POLL_S)


def start_failure(name: str, what: str, log: Path) -> StartFailed:
    """A start error of the engine `name` with the last lines of its log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return StartFailed(
        f"{name} {what}; the end of its log, {log}:\n  " + "\n  ".join(lines or ["(nothing)"]),
        retry_after_s=5,
    )


ENGINE_PROGRAMS: Final = frozenset(
    {
        *("postgres", "initdb"),
        *("valkey-server", "redis-server"),
        # Debian's servers are links to these programs.
        *("valkey-check-rdb", "redis-check-rdb"),
    }
)
ENDING_S: Final = 10.0
"""An orphaned PostgreSQL kills its children after 5 s; an orphaned Valkey ends sooner."""
KILLED_S: Final = 10.0
_POLL_S: Final = 0.02


def processes_in(folder: Path) -> list[int]:
    """Pids of live engine processes with a working directory in `folder`.

    Executable and working directory are read from /proc. `kill_engine` opens a pidfd before it
    reads them, so it never hits another process that reuses the pid. PostgreSQL itself only checks
    whether any process has the pid of its lock file, and then refuses to start.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _is_engine_in(pid, folder)]


def _is_engine_in(pid: int, folder: Path) -> bool:
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
        folder_of_pid = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return False  # ended, a zombie, or of another user
    # After an upgrade of the wheel the name is `postgres (deleted)`.
    return folder_of_pid.is_relative_to(folder) and program.name.split(" ")[0] in ENGINE_PROGRAMS


async def end_orphans(folder: Path, *, timeout_s: float = ENDING_S) -> None:
    """Wait for engine processes of an earlier run, then kill the rest. Raises: OrphanAlive."""
    if await _wait_none(folder, timeout_s):
        return
    for pid in processes_in(folder):
        kill_engine(pid, folder)
    if not await _wait_none(folder, KILLED_S):
        raise OrphanAlive(
            f"data folder {folder}: processes {processes_in(folder)} of an earlier run survive"
            " SIGKILL, which points to a hanging disk: repair it, or restart the machine"
        )


def kill_engine(pid: int, folder: Path) -> None:
    """Kill `pid` if it is an engine process with a working directory in `folder`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _is_engine_in(pid, folder):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


async def _wait_none(folder: Path, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while processes_in(folder):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True
