"""`--reload`: in development, run a role as a child and start it anew when the code changes.

Modification times are compared every half second under the folder that the command was started in: a
dependency for watching files would be for this alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

from headrace.kernel.logs import configure_logs, logger

LOOK_EVERY_S: Final = 0.5
FILES_MAX: Final = 20_000
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "headrace-data"})
log = logger(__name__)


def watch_code() -> int:
    """Run this command line without `--reload`, and again after each change; returns the exit code."""
    configure_logs("reload")
    command = [sys.executable, "-u", "-m", "headrace"]
    command += [word for word in sys.argv[1:] if word != "--reload"]
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    seen = stamps(Path.cwd())
    child = _start(command)
    while not stopping:
        time.sleep(LOOK_EVERY_S)
        now = stamps(Path.cwd())
        if now != seen:
            changed = {file for file, _ in set(now.items()) ^ set(seen.items())}
            log.info("code_changed", files=sorted(changed)[:5])
            _end(child)
            seen, child = now, _start(command)
    return _end(child)


def stamps(folder: Path) -> dict[str, int]:
    """When each Python file below `folder` was last written, in ns; hidden folders and SKIPPED aside."""
    found: dict[str, int] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in SKIPPED]
        for name in files:
            if name.endswith(".py") and len(found) < FILES_MAX:
                path = os.path.join(place, name)  # noqa: PTH118 - walked every half second
                try:
                    found[path] = os.stat(path).st_mtime_ns  # noqa: PTH116 - as above
                except FileNotFoundError:
                    continue
    return found


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # A group of its own: Ctrl-C reaches this process alone, which then ends the child in order.
    return subprocess.Popen(command, process_group=0)


def _end(child: subprocess.Popen[bytes]) -> int:
    child.terminate()
    return child.wait()
