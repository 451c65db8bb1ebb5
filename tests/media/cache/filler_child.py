"""Fillers as child processes of a test, over the folders of a `CacheNode`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from cache_lab import CacheNode

CRASH_POINTS = (
    "chosen",
    "hidden",
    "waited",
    "punched",
    "written",
    "fields_stored",
    "entry_summed",
    "verified",
    "shown",
)


class FillerChild:
    """One filler process, which is killed at the end if it still runs."""

    def __init__(self, node: CacheNode, *, bug: str = "", crash_at: str = "") -> None:
        settings = {
            "blobs": node.blobs.folder.as_uri(),
            "disks": [[str(disk.path), disk.size_bytes] for disk in node.disks],
            "run": str(node.run),
            "boot": node.boot,
            "bug": bug,
        }
        env = {**os.environ, **({"HEADRACE_CRASH_AT": crash_at} if crash_at else {})}
        node.run.mkdir(parents=True, exist_ok=True)
        self._dies = bool(crash_at)
        self._err = (node.folder / "filler.err").open("ab")
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("filler_process.py")),
                json.dumps(settings),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._err,
            env=env,
        )

    def __enter__(self) -> Self:
        line = self.process.stdout.readline()
        # The probe at the start passes some of the points, too.
        is_as_told = line == b"ready\n" or (self._dies and self.process.wait() == -signal.SIGKILL)
        assert is_as_told, f"the filler printed {line!r}: see filler.err"
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        self._err.close()

    def kill(self) -> None:
        """SIGKILL the filler and wait for its end."""
        self.process.kill()
        self.wait()

    def stop(self) -> int:
        """SIGTERM the filler and wait for its end."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        code = self.process.wait(timeout=90)
        self.process.stdout.close()
        self.process.stdin.close()
        return code
