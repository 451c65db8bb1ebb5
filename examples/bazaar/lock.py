"""One demo per folder; it waits until the processes of the last one have exited.

The lock is handed down to the programs that the demo starts, so it stays while any of them lives:
after `kill -9` of the demo they need some seconds to end in order, and the next demo waits for
that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FOLDER: Final = Path("demo-data")
"""Where all of the demo lives, unless another folder is chosen."""
LEFTOVERS_END_S: Final = 45.0


class DemoError(Exception):
    """A requirement of the demo is missing; the text names it and where to look."""


class StoppedError(DemoError):
    """The demo was stopped while it started."""


def option(name: str, value: str) -> str:
    """An option as it is written on the command line that started this demo, make's or its own."""
    if os.environ.get("DEMO_OPTIONS") == "make":
        return f"`make demo {name.upper()}={value}`"
    return f"--{name} {value}"


@contextlib.contextmanager
def folder_of_one(folder: Path) -> Iterator[int]:
    """Hold `folder` for this demo; gives the lock's file descriptor, to be handed to its programs.

    Raises: DemoError, when another one runs there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "demo.lock").open("a+") as lock:
        deadline = time.monotonic() + LEFTOVERS_END_S
        while not _try_lock(lock.fileno()):
            lock.seek(0)
            owner = lock.read().strip()
            if time.monotonic() > deadline or _is_other(owner):
                raise DemoError(
                    f"a demo (pid {owner}) runs in {folder}: end it, or choose another folder with"
                    f" {option('folder', 'other-data')}"
                )
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock.fileno()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_other(owner: str) -> bool:
    return owner not in ("", str(os.getpid())) and Path(f"/proc/{owner}").exists()
