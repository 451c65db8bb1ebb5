"""Hosts of the engines beside PostgreSQL: Valkey, and an S3 server, which is moto."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
from tests.kit.hosts import Host
from tests.kit.processes import wait_until
from tests.kit.stock_valkey import program_of

from headrace.engines import launcher

VALKEY_SETTINGS: Final = {
    "appendonly": "yes",
    "save": "",
    "maxmemory-policy": "noeviction",
    "set-max-intset-entries": "131072",
    "zset-max-listpack-entries": "2048",
    "protected-mode": "no",
}
"""As in docs/several-hosts.md."""
STORE_PORT: Final = 9000


class _EngineHost:
    """A host with one program, bound to the end of this process."""

    def __init__(self, host: Host, folder: Path, *command: str) -> None:
        self.host, self._folder, self._command = host, folder, command
        self._process: subprocess.Popen | None = None
        folder.mkdir(parents=True)

    def start(self) -> None:
        """Start its program."""
        bound = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
        bound += [str(int(signal.SIGKILL)), "same", "--"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self.host.inside, *bound, *self._command],
                cwd=self._folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill(self) -> None:
        """Kill its program, as a power cut does."""
        self.host.kill()
        if self._process is not None:
            self._process.wait(10)


class ValkeyHost(_EngineHost):
    """A host with Valkey, whose append-only file survives a kill."""

    def __init__(self, host: Host, folder: Path) -> None:
        words = [word for pair in VALKEY_SETTINGS.items() for word in (f"--{pair[0]}", pair[1])]
        program = str(program_of("valkey9"))
        super().__init__(host, folder, program, "--bind", host.address, *words)
        self.settings = {"HEADRACE_VALKEY_URL": f"valkey://{host.address}:6379"}


class StoreHost(_EngineHost):
    """A host with moto, which keeps objects in memory: it can be cut off, but not killed."""

    def __init__(self, host: Host, folder: Path) -> None:
        program = str(Path(sys.executable).with_name("moto_server"))
        super().__init__(
            host, folder, sys.executable, program, "-H", host.address, "-p", str(STORE_PORT)
        )
        self._url = f"http://{host.address}:{STORE_PORT}"
        self.settings = {
            "HEADRACE_BLOBS_URL": "s3://site/headrace",
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def start(self) -> None:
        """Start it with its bucket."""
        super().start()
        wait_until(self._has_bucket, what="the S3 server answers")

    def _has_bucket(self) -> bool:
        try:
            return httpx.put(f"{self._url}/site", timeout=5, trust_env=False).is_success
        except httpx.TransportError:
            return False
