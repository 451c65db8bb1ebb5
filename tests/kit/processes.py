"""Real processes under test: started as users start them, observed by their output, killed by pid.

Only descendants of a process that was started here receive signals.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

Answer = TypeVar("Answer")
ROOT: Final = Path(__file__).parents[2]
"""The repository, so that apps under test can import the kit."""


def wait_until(ask: Callable[[], Answer | None], *, what: str, deadline_s: float = 60) -> Answer:
    """Call `ask` until its result is true, and return the result.

    Raises: AssertionError naming `what` after the deadline.
    """
    began_s = time.monotonic()
    ends_s = began_s + deadline_s
    while True:
        answer = ask()
        if answer:
            return answer
        now_s = time.monotonic()
        assert now_s < ends_s, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(min(0.05, max(0.02, (now_s - began_s) / 20)))


def is_alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, nearest first."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue
        for task in tasks:
            try:
                children = [int(p) for p in (task / "children").read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += children
            waiting += children
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as probes:
        bound = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in bound]


NEVER_RETRIEVED: Final = "exception was never retrieved"
"""asyncio's log text for a task or future whose error was never read."""


class HeadraceProcess:
    """`headrace ARGUMENTS` as a child process, its output kept in files."""

    def __init__(
        self,
        arguments: list[str],
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("out-*.txt")))
        self.out_file = folder / f"out-{number}.txt"
        self.err_file = folder / f"err-{number}.txt"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        given = dict(env or {})
        # The source of this tree comes first, also if another tree is installed.
        path = os.pathsep.join([given.get("PYTHONPATH", str(folder)), str(ROOT / "src"), str(ROOT)])
        with self.out_file.open("wb") as out, self.err_file.open("wb") as err:
            self._process = subprocess.Popen(
                [str(python), "-m", "headrace", *arguments],
                cwd=folder,
                env={**kept, **given, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process started here."""
        return self._process.pid

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return self.out_file.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its log so far."""
        return self.err_file.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines so far whose event is `name`."""
        # The last line may be incomplete.
        whole = self.err.rpartition("\n")[0].splitlines()
        rows = [json.loads(line) for line in whole if line.startswith("{")]
        return [row for row in rows if row.get("event") == name]

    def wait_out(self, text: str, *, deadline_s: float = 60) -> str:
        """Wait until it has printed `text`; return its output."""

        def ask() -> str | None:
            if self._process.poll() is not None and text not in self.out:
                raise AssertionError(
                    f"headrace ended with {self._process.returncode}: {self.out}\n{self.err}"
                )
            return self.out if text in self.out else None

        return wait_until(ask, what=f"{text!r} printed", deadline_s=deadline_s)

    def wait_exit(self, *, deadline_s: float = 60) -> int:
        """Wait for its end; return the exit code."""
        return self._process.wait(deadline_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self._process.send_signal(number)

    def family(self) -> list[int]:
        """The pids of it and its descendants."""
        return [self.pid, *descendants(self.pid)]

    def kill_all(self) -> list[int]:
        """Kill it and its descendants, as a power cut does; return the pids."""
        pids = self.family()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(10)
        return pids

    def end(self) -> None:
        """Stop it at the end of a test. Raises: AssertionError for an unread task error."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill_all()
        forgotten = [line for line in self.err.splitlines() if NEVER_RETRIEVED in line]
        if forgotten:
            raise AssertionError(f"task errors were never read: {forgotten[0][:2000]}")
