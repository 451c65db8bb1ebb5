"""A media node as users run it, with its parent, filler and workers; and raw clients."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path

from tests.kit.processes import HeadraceProcess, descendants, free_ports, is_alive, wait_until

SECRET = "whole-nodes-" + "s" * 32
DEADLINE_S = 90.0
"""Seconds to start four processes on a busy machine."""


class WholeNode:
    """The running command; ended by `end`."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder, self.port = folder, free_port()
        self._settings = settings
        self.process = self.start()

    def start(self) -> HeadraceProcess:
        """Start the command and wait until it serves."""
        names = {f"HEADRACE_{name.upper()}": value for name, value in self._settings.items()}
        env = {
            "HEADRACE_SECRET": SECRET,
            "HEADRACE_DATA_FOLDER": str(self.folder / "data"),
            "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{self.port}",
            **names,
        }
        self.process = HeadraceProcess(["media", "serve"], folder=self.folder / "node", env=env)
        what = f"a node that serves ({self.process.err_file})"
        wait_until(self.serves, what=what, deadline_s=DEADLINE_S)
        return self.process

    def serves(self) -> bool:
        assert is_alive(self.process.pid), f"the node ended: {self.process.err}"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as probe:
                probe.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                return probe.recv(100).startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def pids(self, kind: str) -> list[int]:
        """Of its `worker` or `filler` processes that run now."""
        found = []
        for pid in descendants(self.process.pid):
            words = command_of(pid)
            if kind in words and is_alive(pid):
                found.append(pid)
        return sorted(found)

    def kill(self, kind: str, *, index: int = 0, by: int = signal.SIGKILL) -> int:
        """Kill one of its processes by a signal; its pid."""
        pids = wait_until(lambda: self.pids(kind), what=f"a {kind}", deadline_s=DEADLINE_S)
        pid = pids[index % len(pids)]
        os.kill(pid, by)
        return pid

    def series(self, name: str) -> float:
        """The sum of all samples of `name`, with or without labels, in the last snapshot."""
        found = 0.0
        for path in (self.folder / "data" / "run" / "metrics").glob("media-*.prom"):
            for line in path.read_text().splitlines():
                if line.startswith(name) and line[len(name)] in " {":
                    found += float(line.split()[-1])
        return found

    def end(self) -> None:
        self.process.end()


@asynccontextmanager
async def whole_node(folder: Path, **settings: str):
    """A running node; settings as `media_workers="2"`."""
    node = await asyncio.to_thread(WholeNode, folder, **settings)
    try:
        yield node
    finally:
        await asyncio.to_thread(node.end)


class Reader:
    """A raw client that returns status, ETag and bytes, or reports a closed connection."""

    def __init__(self, port: int, **options: int) -> None:
        self._port = port
        self._options = options
        self._streams = None

    async def ask(self, key: str, first: int, last: int, *, pause_s: float = 0.0):
        """Status, ETag and body of a range; None: the connection ended before the answer did."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(
                    "127.0.0.1", self._port, **self._options
                )
            return await self._ask(*self._streams, key, (first, last), pause_s)
        except (OSError, asyncio.IncompleteReadError):
            self.drop()
            return None

    async def _ask(self, reader, writer, key, span, pause_s):
        head = f"GET /m/{key} HTTP/1.1\r\nHost: a\r\nRange: bytes={span[0]}-{span[1]}\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(60):
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            if pause_s:
                await pause(pause_s)
            length = int(re.search(r"Content-Length: (\d+)", answer)[1])
            body = await reader.readexactly(length)
        etag = re.search(r'ETag: "([^"]*)"', answer)
        if "Connection: close" in answer:
            self.drop()
        return int(answer[9:12]), etag and etag[1], body

    def drop(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def flood(port: int, count: int, first: bytes, *, buffer_bytes: int = 8192) -> list[socket.socket]:
    """Clients that send `first` and then neither send nor read."""
    found = []
    for _ in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.connect(("127.0.0.1", port))
        client.sendall(first)
        found.append(client)
    return found


@lru_cache(maxsize=120)
def content(key: str, version: int, size_bytes: int) -> bytes:
    """Bytes that no other object, version or offset has."""
    return random.Random(f"{key}/{version}").randbytes(size_bytes)


async def pause(delay_s: float) -> None:
    """The pace of a client that is slow on purpose."""
    with suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await asyncio.Event().wait()


def command_of(pid: int) -> list[str]:
    """The words of a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def resident_kib(pid: int) -> int:
    """Memory of a process, as RSS."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1])


def free_port() -> int:
    """A port that nobody listens on."""
    return free_ports(1)[0]
