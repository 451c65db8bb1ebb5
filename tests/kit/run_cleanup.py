"""End every process and remove every folder of a test run, however the run ends.

The controller of a run starts `main` in a separate process (`start`). All that the run starts
inherits RUN_VARIABLE and works below the run's folders, so its processes are found in /proc by
environment or working directory, also after they were reparented or renamed. The cleanup begins
when the controller ends, or ENDING_S after it was interrupted.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.processes import ROOT, wait_until

from headrace.media.cache.linux import memory_folders

RUN_VARIABLE = "TEST_RUN"
MEMORY_VARIABLE = "TEST_RUN_MEMORY"
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30
"""Free memory below which the engines' folders stay on the disk."""
ENDING_S = 4.0
"""Time for the processes of an interrupted run to end by themselves."""
CONTROLLER_S = 2.0
"""Time for its controller to end after them."""
POLL_S = 0.1
MAPPED_WITHIN_S = 1.0


@dataclass(frozen=True)
class RunCleanup:
    """The cleanup process, as a plugin of the controller."""

    process: subprocess.Popen[bytes]

    def pytest_keyboard_interrupt(self) -> None:
        """Bound the rest of the run."""
        self.process.send_signal(signal.SIGUSR1)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Clean up now, and wait until that is done."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def start() -> RunCleanup:
    """Give this run its folders and start its cleanup process."""
    plenty = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES
    folder = tempfile.mkdtemp(prefix="hr-")
    memory = tempfile.mkdtemp(prefix="hr-", dir=MEMORY) if plenty else folder
    Path(folder).chmod(0o711)  # tests as other users pass through it
    run = Path(folder).name
    # Programs that tests start import this package, too.
    paths = [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]
    os.environ |= {
        "TMPDIR": folder,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        RUN_VARIABLE: run,
        MEMORY_VARIABLE: memory,
    }
    tempfile.tempdir = None
    start = (
        "import sys; sys.path.insert(0, sys.argv.pop(1));"
        " from tests.kit.run_cleanup import main; main(sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-I",
        "-c",
        start,
        str(ROOT),
        str(os.getpid()),
        run,
        *{folder, memory},
    ]
    return RunCleanup(
        subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd="/", start_new_session=True)
    )


def clean(run: str, folders: list[Path], memory: set[Path]) -> None:
    """Kill the run's processes and remove its folders and shared memory until none is left."""

    def is_clean() -> bool:
        pids = kill_processes(run, folders, memory)
        if pids:
            return False
        for path in memory:
            path.unlink(missing_ok=True)
        remove_networks(run)
        for node_memory, node in memory_folders().items():
            if any(node.is_relative_to(folder) for folder in folders):
                shutil.rmtree(node_memory, ignore_errors=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return not any(folder.exists() for folder in folders)

    wait_until(is_clean, what="no process and no folder of the run")


def remove_networks(run: str) -> None:
    """Remove the hosts and bridges of `tests/kit/hosts.py` that the run left."""
    for alias in Path("/sys/class/net").glob("hrt*/ifalias"):
        if alias.read_text().strip() == run:
            bridge = alias.parent.name
            for space in Path("/run/netns").glob(f"{bridge}-*"):
                subprocess.run(["ip", "netns", "del", space.name], check=False)
            subprocess.run(["ip", "link", "del", bridge], check=False)


def kill_processes(run: str, folders: list[Path], memory: set[Path]) -> int:
    """Kill the processes of the run except its controller; return their number.

    The shared memory of a stock PostgreSQL, which only the server itself removes, is added to
    `memory`.
    """
    pids = _processes(run, folders)
    for pid in pids:
        memory.update(postgres_memory(pid))
    for pid in pids:
        _kill(pid)
    return len(pids)


def postgres_memory(pid: int) -> set[Path]:
    """The shared memory of a stock PostgreSQL that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(map(Path, re.findall(r"/dev/shm/PostgreSQL\.\d+", maps)))


def remove_abandoned_memory(since_s: float) -> None:
    """Remove shared memory of servers of this user that were killed since then.

    A running server maps its own, so what no process maps belongs to none. A server that starts
    maps it a moment after it made it, so a second look decides.
    """
    abandoned = _unmapped_memory(since_s)
    with contextlib.suppress(AssertionError):
        wait_until(
            lambda: not abandoned & _unmapped_memory(since_s),
            what="servers that start mapped their memory",
            deadline_s=MAPPED_WITHIN_S,
        )
    for path in abandoned & _unmapped_memory(since_s):
        path.unlink(missing_ok=True)


def _unmapped_memory(since_s: float) -> set[Path]:
    """Shared memory of this user's servers that no process maps."""
    mapped: set[Path] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        mapped |= postgres_memory(int(entry.name))
    found = set()
    for path in MEMORY.glob("PostgreSQL.*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            if facts.st_uid == os.getuid() and facts.st_mtime >= since_s and path not in mapped:
                found.add(path)
    return found


def _processes(run: str, folders: list[Path]) -> list[int]:
    """Live processes of the run: by environment, or by working directory."""
    marked = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):
            works_in = (entry / "cwd").readlink()
            is_inside = any(works_in.is_relative_to(folder) for folder in folders)
            if is_inside or marked in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Wait for the end of the controller, then clean up."""
    controller, run, *names = arguments
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folders = [Path(name) for name in names]
    memory: set[Path] = set()
    began_s, late_s = time.time(), math.inf
    while os.getppid() == int(controller):
        received = signal.sigtimedwait(signals, POLL_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            break
        if received is not None:
            late_s = min(late_s, time.monotonic() + ENDING_S)
        if time.monotonic() > late_s:
            kill_processes(run, folders, memory)
        if time.monotonic() > late_s + CONTROLLER_S:
            _kill(int(controller))
    clean(run, folders, memory)
    remove_abandoned_memory(began_s)
