"""Processes started here: their output in files, their CPU with that of all they started, and their
end by pid.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kit.processes import descendants

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.005


class BenchFault(Exception):
    """A cell did not come to its end, or its answers do not add up; its figure is not measured."""


class Child:
    """One process in a group of its own, with what it prints in `folder`."""

    def __init__(
        self, command: Sequence[str], *, folder: Path, env: Mapping[str, str], name: str
    ) -> None:
        self.name = name
        number = len(list(folder.glob(f"{name}-*.out")))
        self._out = folder / f"{name}-{number}.out"
        self._err = folder / f"{name}-{number}.err"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "BENCH_"))}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                list(command),
                cwd=folder,
                env={**kept, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process itself."""
        return self._process.pid

    @property
    def out(self) -> str:
        """What it printed so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it logged so far."""
        return self._err.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """CPU seconds of it and everything below it so far."""
        return cpu_of(self.pid)

    async def finish(self, deadline_s: float) -> str:
        """Wait until it ends well; returns what it printed. Raises: BenchFault."""
        await wait_for(lambda: not self.is_running, f"{self.name} to end", deadline_s, None)
        if self._process.returncode != 0:
            raise BenchFault(
                f"{self.name} ended with {self._process.returncode}: {self.err[-1500:]}"
            )
        return self.out

    async def end(self, grace_s: float = 12.0) -> None:
        """Stop it and all it started: SIGTERM to it, SIGKILL to those that remain."""
        family = [self.pid, *descendants(self.pid)]
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            with suppress(BenchFault):
                await wait_for(lambda: not self.is_running, "its end", grace_s, None)
        for pid in family:
            if pid == self.pid and not self.is_running:
                continue
            _kill(pid, self.pid)
        self._process.wait(10)


def _kill(pid: int, group: int) -> None:
    """SIGKILL `pid` if it still is of the group that was started here (pids are used again)."""
    with suppress(ProcessLookupError):
        if os.getsid(pid) == group:
            send_signal(pid)


def send_signal(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process of a running child; nothing happens if it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def family_of(pid: int, *, without: Sequence[int] = ()) -> list[int]:
    """`pid` and everything below it, except the families `without`."""
    left_out = {each for other in without for each in (other, *descendants(other))}
    return [each for each in (pid, *descendants(pid)) if each not in left_out]


def cpu_of(pid: int, *, without: Sequence[int] = ()) -> float:
    """CPU seconds of the family of `pid`, and of what it waited for."""
    return sum(map(_cpu, family_of(pid, without=without)))


def memory_of(pid: int) -> int:
    """Memory of `pid` and of everything below it; shared pages count by their share."""
    return sum(_shared_kib(each) for each in family_of(pid)) * 1024


def _shared_kib(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss: +(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_S


async def wait_for(
    check: Callable[[], Any], what: str, deadline_s: float, child: Child | None
) -> Any:
    """Ask until the answer is true. Raises: BenchFault at the deadline, or when `child` ends."""
    ends_s = time.monotonic() + deadline_s
    while not (answer := check()):
        if child is not None and not child.is_running:
            raise BenchFault(f"{child.name} ended while waiting for {what}: {child.err[-1500:]}")
        if time.monotonic() > ends_s:
            errors = child.err[-600:] if child is not None else ""
            raise BenchFault(f"{what}: not within {deadline_s:.0f} s {errors}")
        await asyncio.sleep(POLL_S)
    return answer
