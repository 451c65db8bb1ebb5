"""Child processes: start, stop, restart delays, and orphans.

The launcher ties a child's life to this process (`engines.launcher`). A child leads its own session
or process group. So Ctrl-C in a terminal reaches only this process, which stops its children in
order, and a child that must be killed is killed together with its own children.

If a child dies, its children become orphans. The first process of a container may not reap them, so
they would stay as zombies. A process that calls `adopt_orphans` becomes their parent and must reap
them.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from headrace.kernel.errors import Conflict
from headrace.kernel.resilience import Backoff

HEALTHY_S: Final = 60.0
"""After this uptime, a death resets the backoff."""
HURRIED_S: Final = 1.0
"""Longest wait after each signal when the stop is hurried."""
KILLED_S: Final = 10.0
"""Longest wait after SIGKILL; only a hanging disk delays the end for so long."""
PR_SET_CHILD_SUBREAPER: Final = 36
POLL_EVERY_S: Final = 0.005
StopSteps = Sequence[tuple[signal.Signals, float]]
"""Signals, each with the seconds to wait for the end."""


class MainThreadRequired(Conflict):
    """A child process was started outside the main thread."""

    code = "engines.main_thread_required"


def launcher_command(death_signal: signal.Signals, identity: str) -> list[str]:
    """The launcher's part of a command line, to be followed by `--` and the program.

    The program receives `death_signal` when the main thread of this process ends. The parent-death
    signal belongs to the thread that forks, and the main thread ends last. Raises:
    MainThreadRequired.
    """
    if threading.current_thread() is not threading.main_thread():
        raise MainThreadRequired(
            f"thread {threading.current_thread().name!r} cannot start engines or workers, which end"
            " with their thread: start them in the main thread"
        )
    program = str(Path(__file__).with_name("launcher.py"))
    return [sys.executable, "-I", "-S", program, str(os.getpid()), str(int(death_signal)), identity]


class RestartDelay:
    """The delays between restarts of one process. A healthy time resets the backoff."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._started_s = math.inf
        self.deaths = 0
        """Deaths and failed starts since it was healthy."""

    def note_start(self) -> None:
        """Record that the process runs now."""
        self._started_s = time.monotonic()

    def next_s(self) -> float:
        """Count a death or a failed start. Return the seconds to wait before the next start."""
        was_healthy = time.monotonic() - self._started_s > HEALTHY_S
        self._started_s = math.inf
        self.deaths = 1 if was_healthy else self.deaths + 1
        return round(self._backoff.delay_s(self.deaths), 2)


class ChildProcess:
    """A running child process that leads its own session or process group."""

    _own: ClassVar[set[int]] = set()
    """Running children; `reap_orphans` must not take their exit status."""
    _starts: ClassVar[int] = 0
    """Children being started, whose pids are not known yet."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._end = asyncio.ensure_future(process.wait())
        self._own.add(process.pid)
        self._end.add_done_callback(lambda _: self._own.discard(process.pid))

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        death_signal: signal.Signals = signal.SIGTERM,
        identity: str = "same",
        leads_session: bool = True,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
        source: int = asyncio.subprocess.DEVNULL,
        output: IO[bytes] | None = None,
    ) -> ChildProcess:
        """Start `command` in `folder`; it inherits the descriptors `files` and reads `source`.

        With `leads_session=False` it leads only a process group, and is killed with the session of
        this process. None for `environment` and `output`: those of this process. For `death_signal`
        and `identity` see `launcher_command`. Raises: MainThreadRequired.
        """
        group: dict[str, Any] = (
            {"start_new_session": True} if leads_session else {"process_group": 0}
        )
        ChildProcess._starts += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher_command(death_signal, identity),
                "--",
                *command,
                cwd=folder,
                env=None if environment is None else dict(environment),
                stdin=source,
                stdout=output,
                stderr=output,
                pass_fds=files,
                **group,
            )
            return cls(process)
        finally:
            ChildProcess._starts -= 1

    @property
    def pid(self) -> int:
        """Its pid; the launcher replaces itself by the program."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        return await asyncio.shield(self._end)

    async def stop(self, steps: StopSteps, hurry: asyncio.Event | None = None) -> bool:
        """Send each signal and wait its seconds for the end, then kill its session or group.

        After `hurry` is set, the waits are short. Return whether it ended before the kill.
        """
        try:
            for number, timeout_s in steps:
                if self.is_alive:
                    self._process.send_signal(number)
                    await self._wait_end(timeout_s, hurry or asyncio.Event())
            return not self.is_alive
        finally:
            # Also if this wait is cancelled: a child must not outlive its parent.
            if self.is_alive:
                kill_session(self.pid)
                await asyncio.wait({self._end}, timeout=KILLED_S)

    async def _wait_end(self, timeout_s: float, hurry: asyncio.Event) -> None:
        hurried = asyncio.ensure_future(hurry.wait())
        try:
            await asyncio.wait(
                {self._end, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hurried.cancel()
        if hurry.is_set():
            await asyncio.wait({self._end}, timeout=min(timeout_s, HURRIED_S))

    @classmethod
    def reap_orphans(cls) -> None:
        """Reap orphans that this process adopted and that have ended.

        The exit status of a child that this process started is left to its waiter. Such a child
        stays in the session of this process, or it was started by `start`.
        """
        if cls._starts:
            return
        session = os.getsid(0)
        for pid in child_pids():
            # It may be reaped by its waiter meanwhile.
            with suppress(ProcessLookupError, ChildProcessError):
                if pid not in cls._own and os.getsid(pid) != session:
                    os.waitpid(pid, os.WNOHANG)


def kill_session(leader: int) -> None:
    """Kill a process group, and every process of the session if `leader` leads one."""
    end_group(leader)
    killed: set[int] = set()
    # Members may fork until they receive the signal.
    while members := _session_members(leader) - killed:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= members


def _session_members(leader: int) -> set[int]:
    members = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    members.add(int(entry.name))
    return members


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
    while children := child_pids():
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > ends_s:
            return children
        time.sleep(POLL_EVERY_S)
    return []


def child_pids() -> list[int]:
    """The children of this process, started or inherited, also ended ones."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
