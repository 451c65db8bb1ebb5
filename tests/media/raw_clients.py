"""Raw clients of a media node, and nodes in this process over a real store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from headrace.engines.blobs import Blobs
from headrace.kernel.metrics import REGISTRY
from headrace.media import Media, MediaConfig
from headrace.media.cache import Filler
from headrace.media.worker import serve

DEADLINE_S = 60.0
SECRET = "s" * 32
"""The root secret of every node under test."""
SMALL_BYTES = 8192
"""A receive buffer that makes a client slow."""


@dataclass
class Answer:
    """One answer as received; names of `fields` are in lower case."""

    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of a problem document."""
        assert self.fields["content-type"] == "application/problem+json", self.fields
        assert self.fields["cache-control"] == "no-store", self.fields
        problem = json.loads(self.body)
        assert problem["status"] == self.status
        return problem["code"]


class Client:
    """A raw connection that sends exactly what is written."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def send_in_pieces(self, data: bytes, step: int) -> None:
        """Send `data` so that the server receives it in several parts."""
        for start in range(0, len(data), step):
            self.writer.write(data[start : start + step])
            for _ in range(3):
                await asyncio.sleep(0)

    async def answer(self, *, method: str = "GET") -> Answer:
        async with asyncio.timeout(DEADLINE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            pairs = [line.split(": ", 1) for line in lines]
            fields = {name.lower(): value for name, value in pairs}
            assert len(fields) == len(pairs), f"a field is repeated: {head}"
            length = 0 if method == "HEAD" else int(fields.get("content-length", "0"))
            body = await self.reader.readexactly(length)
        return Answer(int(re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]+", first)[1]), fields, body)

    async def ask(self, key: str, *, method: str = "GET", **fields: str) -> Answer:
        self.send(head_of(key, method, fields))
        return await self.answer(method=method)

    async def wait_begun(self) -> None:
        """Return once the first bytes of an answer are here; read nothing."""
        await wait_until(lambda: len(self.reader._buffer) > 0)

    async def wait_closed(self) -> bytes:
        """The remaining bytes until the server closes the connection."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()

    async def read_up_to(self, count: int) -> tuple[bytes, bool]:
        """The next bytes, and whether the server cut the connection before `count`."""
        got = bytearray()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while len(got) < count:
                    piece = await self.reader.read(count - len(got))
                    if not piece:
                        # Over TLS a reset may arrive as an end.
                        assert self.writer.get_extra_info("ssl_object"), "it ended cleanly"
                        return bytes(got), True
                    got += piece
        except ConnectionResetError:
            return bytes(got), True
        return bytes(got), False

    def drop(self) -> None:
        self.writer.transport.abort()


def head_of(key: str, method: str = "GET", fields: dict[str, str] | None = None) -> bytes:
    """The head of a request for `key`."""
    lines = "".join(f"{n.replace('_', '-')}: {v}\r\n" for n, v in (fields or {}).items())
    return f"{method} /m/{key} HTTP/1.1\r\nHost: media.test\r\n{lines}\r\n".encode()


class Served:
    """A running node: where it listens, its store, its services."""

    def __init__(self, media: Media, *, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.media, self.blobs, self.port, self.tls = media, media.blobs, port, tls
        self.fillers: list[Filler] = []
        self.stop, self.task = asyncio.Event(), None
        self._clients: list[Client] = []

    async def connect(self, *, buffer_bytes: int = 0) -> Client:
        """A client; one with `buffer_bytes` receives little until it reads."""
        options = {"ssl": self.tls, "server_hostname": "media.test"} if self.tls else {}
        if buffer_bytes:
            options["sock"] = await connect_socket(self.port, buffer_bytes)
            options["limit"] = 1024
        else:
            options |= {"host": "127.0.0.1", "port": self.port}
        client = Client(*await asyncio.open_connection(**options))
        self._clients.append(client)
        return client

    async def put(self, data: bytes, extension: str = "jpg") -> str:
        key = photo_key(data, extension)
        await self.media.objects.put(key, data)
        return key

    def series(self, name: str, **labels: str) -> float:
        """The value of one series of the node, or the sum over its other labels."""
        found = 0.0
        for metric in REGISTRY._names_to_collectors[name].collect():
            for sample in metric.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found += sample.value
        return found

    def drop_clients(self) -> None:
        for client in self._clients:
            client.drop()


async def connect_socket(port: int, buffer_bytes: int) -> socket.socket:
    """A connected socket with a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


def photo_key(data: bytes, extension: str = "jpg") -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    return f"photos/{sha256[:2]}/{sha256}.{extension}"


@lru_cache(maxsize=64)
def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that no other offset or seed has."""
    return random.Random(f"{seed}/{size_bytes}").randbytes(size_bytes)


@asynccontextmanager
async def serving(blobs: Blobs, *, run: Path | None = None, tls=None, **settings):
    """A node in this process; with disks its filler runs here too. `run` is its folder."""
    settings.setdefault("listen", ("127.0.0.1", 0))
    media = Media(blobs, MediaConfig(**settings), secret=lambda: SECRET, folder=run)
    served = Served(media, port=0, tls=tls)
    async with AsyncExitStack() as stack:
        if media.config.disks:
            served.fillers.append(await stack.enter_async_context(filling(media)))
        ready = asyncio.get_running_loop().create_future()
        served.task = asyncio.create_task(
            serve(media, served.stop, lambda *listen: ready.set_result(listen), run=run)
        )
        await asyncio.wait([served.task, ready], return_when=asyncio.FIRST_COMPLETED)
        listen = ready.result() if ready.done() else served.task.result()
        served.port = int(listen[tls is not None].rpartition(":")[2])
        try:
            yield served
        finally:
            served.drop_clients()
            served.stop.set()
            await served.task


@asynccontextmanager
async def filling(media: Media):
    """The filler of a node, in this process."""
    filler = Filler(media.blobs, media.config.disks, run=media.folder, boot="", hash_key=b"k" * 32)
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(filler.run(stop, ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield filler
    finally:
        stop.set()
        await running


def open_files() -> int:
    """The number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def pause(delay_s: float) -> None:
    """The pace of a deliberately slow client."""
    try:
        async with asyncio.timeout(delay_s):
            await asyncio.Event().wait()
    except TimeoutError:
        return


async def wait_until(condition: Callable[[], object]) -> None:
    """Return once `condition()` holds; fail at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await pause(0.01)
