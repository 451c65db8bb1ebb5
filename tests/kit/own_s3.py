"""An S3 server, and a proxy that fails as stores and networks do.

    with own_s3(folder) as server:
        proxy = S3Proxy(server.port)
        await proxy.start()
        proxy.fail(error(503, "SlowDown"), times=2)            # the next two requests
        proxy.fail(truncated(1000), when=b"GET /bucket/a.bin") # every such request until `heal`

The proxy forwards one request per connection and runs in the test's loop. Headers that are signed
pass unchanged, so a server that verifies signatures accepts the requests.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from tests.kit.own_ceph import own_ceph
from tests.kit.processes import free_ports, wait_until

BUCKET: Final = "headrace-tests"
KEY, SECRET = "test", "test"
FOREVER: Final = 1_000_000
_RST: Final = struct.pack("ii", 1, 0)


SERVERS: Final = ("moto", "ceph")
"""moto of PyPI, and Ceph of the distribution."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server with an empty bucket; `process` is what answers requests."""

    process: subprocess.Popen
    port: int

    @property
    def url(self) -> str:
        """Of the bucket, with a prefix."""
        return f"s3://{BUCKET}/site"

    @property
    def env(self) -> dict[str, str]:
        """The environment of its clients."""
        return client_env(self.port)

    def client(self) -> Any:
        """A client of Amazon's own library."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def has_unfinished(self, key: str) -> bool:
        """Whether a multipart upload to `key` was neither completed nor aborted."""
        found = self.client().list_multipart_uploads(Bucket=BUCKET)
        return any(one["Key"].endswith(key) for one in found.get("Uploads", ()))


def client_env(port: int) -> dict[str, str]:
    """The environment of clients of a server or proxy."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def own_s3(folder: Path, kind: str = "moto") -> Iterator[S3Server]:
    """A server with an empty bucket."""
    if kind == "ceph":
        with own_ceph(folder, KEY, SECRET) as ceph:
            server = S3Server(ceph.processes["radosgw"], ceph.port)
            server.client().create_bucket(Bucket=BUCKET)
            yield server
        return
    [port] = free_ports(1)
    process = subprocess.Popen(
        [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        try:
            return httpx.put(f"http://127.0.0.1:{port}/{BUCKET}", timeout=1).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, what="the S3 server answers")
        yield S3Server(process, port)
    finally:
        process.terminate()
        process.wait(60)


@dataclass(slots=True)
class Exchange:
    """One request, and the connection that waits for its answer."""

    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    port: int

    async def forward(self) -> bytes:
        """The server's answer: head and body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", self.head)
        writer.write(lines[:-2] + b"Connection: close\r\n\r\n" + self.body)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            if self.head.startswith(b"HEAD") or head.split(b" ", 2)[1] in (b"204", b"304"):
                return head
            return head + await (reader.readexactly(int(length[1])) if length else reader.read())
        finally:
            writer.close()


Fault = Callable[[Exchange], Awaitable[None]]


async def passed(exchange: Exchange) -> None:
    """No fault."""
    exchange.writer.write(await exchange.forward())
    await exchange.writer.drain()


async def reset(exchange: Exchange) -> None:
    """Close the connection with RST, without an answer."""
    sock = exchange.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    exchange.writer.transport.abort()


async def stalled(_exchange: Exchange) -> None:
    """Never answer."""
    await asyncio.Event().wait()


def error(status: int, code: str, **fields: str) -> Fault:
    """Answer with an error of S3; the server does not receive the request."""
    body = f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"

    async def answer(exchange: Exchange) -> None:
        exchange.writer.write(head.encode() + body)
        await exchange.writer.drain()

    return answer


def done_then(fault: Fault) -> Fault:
    """The server executes the request; its answer is lost and `fault` follows."""

    async def answer(exchange: Exchange) -> None:
        await exchange.forward()
        await fault(exchange)

    return answer


def cut_after(count: int, then: Fault) -> Fault:
    """Send the head and `count` bytes of the body of the answer; `then` follows."""

    async def answer(exchange: Exchange) -> None:
        head, end, body = (await exchange.forward()).partition(b"\r\n\r\n")
        exchange.writer.write(head + end + body[:count])
        await exchange.writer.drain()
        await then(exchange)

    return answer


async def closed(_exchange: Exchange) -> None:
    """Close the connection with FIN."""


def with_etag(etag: str) -> Fault:
    """Answer with another ETag than the server's."""

    async def answer(exchange: Exchange) -> None:
        found = await exchange.forward()
        exchange.writer.write(
            re.sub(rb'(?i)(\r\netag: )"[^"]*"', rb'\1"%b"' % etag.encode(), found)
        )
        await exchange.writer.drain()

    return answer


@dataclass(slots=True)
class _Rule:
    """A fault of the next `times` requests whose first line contains `when`."""

    fault: Fault
    when: bytes
    times: int


class S3Proxy:
    """A proxy in front of the server at `upstream_port`, on a port of its own."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._rules: list[_Rule] = []
        self._server: asyncio.Server | None = None
        self._exchanges: set[asyncio.Task] = set()
        self.port = 0
        self.requests: list[bytes] = []
        """The first lines of all requests."""

    def fail(self, fault: Fault, *, when: bytes = b"", times: int = FOREVER) -> None:
        """Apply `fault` to the next requests whose first line contains `when`."""
        self._rules.append(_Rule(fault, when, times))

    def heal(self) -> None:
        """Forward everything again; requests without an answer are reset."""
        self._rules.clear()
        for task in self._exchanges:
            task.cancel()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Drop all connections."""
        assert self._server is not None
        self._server.close()
        self.heal()
        await asyncio.gather(*self._exchanges, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._exchanges.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                line = head.partition(b"\r\n")[0]
                self.requests.append(line)
                await self._fault_for(line)(Exchange(head, body, writer, self._upstream_port))
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._exchanges.discard(task)
            writer.close()

    def _fault_for(self, line: bytes) -> Fault:
        for rule in self._rules:
            if rule.times and rule.when in line:
                rule.times -= 1
                return rule.fault
        return passed
