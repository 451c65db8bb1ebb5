"""One child through the launcher: its own session, its end bound to ours, its log in a file.

The parent-death signal is bound to the *thread* that forks, so children are spawned from the main thread,
which ends last. Their own session keeps a terminal's Ctrl-C from them: the one parent stops them in order.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from headrace.engines.embedded import launch
from headrace.engines.embedded.errors import EngineMissing, StartFailed
from headrace.kernel.errors import installing

LOG_LINES_SHOWN: Final = 12
_LOG_TAIL_BYTES: Final = 4096
ENGINE_ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
"""All that engines see: PGDATA, PGPORT and the like of a user's shell would change their minds."""


def launcher_command(death_signal: signal.Signals, identity: str = "same") -> list[str]:
    """The launcher's part of a command line; `--` and the program follow it.

    `death_signal` is what the program gets when the main thread of this process ends.
    """
    assert threading.current_thread() is threading.main_thread(), "spawn from the main thread"
    program = str(Path(launch.__file__))
    return [sys.executable, "-I", "-S", program, str(os.getpid()), str(int(death_signal)), identity]


def packaged_file(package: str, *parts: str) -> Path:
    """A file inside an installed wheel, found without importing it. Raises: EngineMissing."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place).joinpath(*parts)
        if path.is_file():
            return path
    raise EngineMissing(
        f"{'/'.join((package, *parts))} is not installed, so no embedded engine can be started: run"
        f" {installing('embedded')}; or set HEADRACE_POSTGRES_URL and HEADRACE_VALKEY_URL"
    )


class EngineProcess:
    """A running engine. Made by `start`; `stop` ends it within the sum of its steps' times."""

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._log = log
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        log: Path,
        environment: Mapping[str, str] = ENGINE_ENVIRONMENT,
    ) -> EngineProcess:
        """Start `command` with `folder` as its working directory, its output appended to `log`."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(name, log, process)

    @property
    def pid(self) -> int:
        """The engine's own pid: the launcher became the engine."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        return await self._process.wait()

    async def stop(
        self, steps: Sequence[tuple[signal.Signals, float]], hurry: asyncio.Event
    ) -> None:
        """Send each signal in turn and wait its seconds; `hurry` cuts the waits short."""
        for number, patience_s in steps:
            if not self.is_alive:
                return
            self._process.send_signal(number)
            await self._wait_end(patience_s, hurry)

    async def _wait_end(self, patience_s: float, hurry: asyncio.Event) -> None:
        ended = asyncio.ensure_future(self.wait())
        hurried = asyncio.ensure_future(hurry.wait())
        waits = {ended} if hurry.is_set() else {ended, hurried}
        try:
            await asyncio.wait(
                waits,
                timeout=min(patience_s, 2.0) if hurry.is_set() else patience_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            ended.cancel()
            hurried.cancel()

    def failure(self, what: str) -> StartFailed:
        """An error that says `what` of this engine, with the end of its log."""
        return start_failure(self.name, what, self._log)


def start_failure(name: str, what: str, log: Path) -> StartFailed:
    """An error that says `what` of engine `name`, with the last lines of its log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return StartFailed(
        f"{name} {what}; the end of its log, {log}:\n  " + "\n  ".join(lines or ["(nothing)"]),
        retry_after_s=5,
    )
