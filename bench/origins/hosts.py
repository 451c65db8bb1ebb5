"""`python -m bench.origins.hosts PLAN FOLDER`: every simulated host on one port of loopback,
selected by the Host header, and a name server that leads all their names there.

It prints its two ports as JSON. Requests go to FOLDER/access.log, one line each, with the moment at
which the whole head was there (CLOCK_MONOTONIC). While FOLDER/held names a host, its answers wait.
Names below `silent.test` are never answered. Nothing here imports the product.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import uvloop

from bench.origins.photos import jpeg
from bench.origins.plan import REDIRECTED, RESET, SILENT, HostPlan, from_document

SILENT_NAMES = ".silent.test"
HELD_FILE, LOG_FILE = "held", "access.log"
LOOK_S = 0.03
A = 1
HEAD_END = b"\r\n\r\n"


class Hosts:
    """What all connections share."""

    def __init__(self, plan: Path, folder: Path) -> None:
        document = json.loads(plan.read_text())
        self.plans = from_document(document)
        self.body_bytes: int = document["body_bytes"]
        self.attempts: Counter[str] = Counter()
        self.held: frozenset[str] = frozenset()
        self.waiting: list[Connection] = []
        self._held_file = folder / HELD_FILE
        self.log: TextIO = (folder / LOG_FILE).open("a", buffering=1 << 16)

    def look(self) -> None:
        """See who is held now, let the others' answers go, and flush the log."""
        text = self._held_file.read_text() if self._held_file.exists() else ""
        self.held = frozenset(text.split())
        waiting, self.waiting = self.waiting, []
        for connection in waiting:
            connection.answer()
        self.log.flush()


class Connection(asyncio.Protocol):
    """One client: a request, its answer after a while, the next request."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._text = b""
        self._timer: asyncio.TimerHandle | None = None
        self._request: tuple[int, str, str] | None = None
        self._status = 0

    def connection_made(self, transport: Any) -> None:
        """A client came."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take a request in once its head is whole."""
        self._text += data
        if self._request is None and HEAD_END in self._text:
            head, _, self._text = self._text.partition(HEAD_END)
            self._begin(head.decode("latin-1"), time.monotonic_ns())

    def connection_lost(self, error: Exception | None) -> None:
        """Note a request that its client left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None:
            self._note(0)

    def _begin(self, head: str, arrived_ns: int) -> None:
        first, *lines = head.split("\r\n")
        path = first.split(" ")[1]
        named = next((x[6:] for x in lines if x[:6].lower() == "host: "), "")
        host = named.rpartition(":")[0] or named
        key = f"{host}{path}"
        plan = self._hosts.plans.get(host) or HostPlan()
        self._status, wait_s = plan.answer(host, path, self._hosts.attempts[key])
        self._hosts.attempts[key] += 1
        self._request = (arrived_ns, host, path)
        if self._status == SILENT:
            return
        if wait_s:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.answer)
        else:
            self.answer()

    def answer(self) -> None:
        """Send what was decided, unless the host is held."""
        if self._request is None:
            return
        _, host, path = self._request
        if host in self._hosts.held:
            self._hosts.waiting.append(self)
            return
        if self._status == RESET:
            self._note(RESET)
            self._transport.abort()
            return
        body, more = b"nothing here", ""
        if self._status == 200:
            body = jpeg(f"{host}{path}", len(path), self._hosts.body_bytes)
            more = "Content-Type: image/jpeg\r\n"
        elif self._status == 302:
            more = f"Location: {REDIRECTED}{path}\r\n"
        head = f"HTTP/1.1 {self._status} Answer\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        self._note(self._status)
        self._transport.write(head.encode() + body)
        if HEAD_END in self._text:
            self.data_received(b"")

    def _note(self, status: int) -> None:
        assert self._request is not None
        arrived_ns, host, path = self._request
        self._request = None
        held_us = (time.monotonic_ns() - arrived_ns) // 1_000
        self._hosts.log.write(f"{arrived_ns} {host} {path} {status} {held_us}\n")


class NameServer(asyncio.DatagramProtocol):
    """Every name is 127.0.0.1, but those that are never answered."""

    def connection_made(self, transport: Any) -> None:
        """Ready."""
        self._transport = transport

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        """Answer one question."""
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
            at += 1 + data[at]
        if ("." + ".".join(labels).lower()).endswith(SILENT_NAMES):
            return
        (kind,) = struct.unpack_from(">H", data, at + 1)
        answer = b""
        if kind == A:
            answer = b"\xc0\x0c" + struct.pack(">HHIH", A, 1, 60, 4) + bytes((127, 0, 0, 1))
        head = data[:2] + struct.pack(">HHHHH", 0x8180, 1, bool(answer), 0, 0)
        self._transport.sendto(head + data[12 : at + 5] + answer, peer)


async def serve(plan: Path, folder: Path) -> None:
    """Until SIGTERM."""
    hosts = Hosts(plan, folder)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(hosts), "127.0.0.1", 0, backlog=4096)
    names, _ = await loop.create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0), family=socket.AF_INET
    )
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    ports = {
        "http": server.sockets[0].getsockname()[1],
        "names": names.get_extra_info("sockname")[1],
    }
    print(json.dumps(ports), flush=True)
    while not stop.is_set():
        hosts.look()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    server.close()
    hosts.log.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
