"""A real node on a real port over a real store, and raw clients for it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.media import Media, MediaConfig
from headrace.media.worker import serve

DEADLINE_S = 60.0
SECRET = "s" * 32
"""The root secret of every node under test."""


@dataclass
class Answer:
    """One answer as received."""

    status: int
    fields: dict[str, str]
    body: bytes


class Client:
    """A raw connection that sends exactly what is written."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, method: str = "GET") -> Answer:
        async with asyncio.timeout(DEADLINE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            fields = {
                name.lower(): value for name, value in (line.split(": ", 1) for line in lines)
            }
            length = 0 if method == "HEAD" else int(fields.get("content-length", "0"))
            body = await self.reader.readexactly(length)
        return Answer(int(re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]+", first)[1]), fields, body)

    async def ask(self, key: str, *, method: str = "GET", **fields: str) -> Answer:
        lines = "".join(f"{n.replace('_', '-')}: {v}\r\n" for n, v in fields.items())
        self.send(f"{method} /m/{key} HTTP/1.1\r\nHost: media.test\r\n{lines}\r\n".encode())
        return await self.answer(method=method)

    async def wait_closed(self) -> bytes:
        """The remaining bytes until the server closes the connection."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()

    def drop(self) -> None:
        self.writer.transport.abort()


class Served:
    """A node, its store and its address."""

    def __init__(self, media: Media, host: str, port: int, stop: asyncio.Event, task) -> None:
        self.media, self.blobs, self.host, self.port = media, media.blobs, host, port
        self.stop, self.task = stop, task
        self._clients: list[Client] = []

    async def connect(self, **options) -> Client:
        reader, writer = await asyncio.open_connection(self.host, self.port, **options)
        client = Client(reader, writer)
        self._clients.append(client)
        return client

    async def put(self, data: bytes, extension: str = "jpg") -> str:
        key = photo_key(data, extension)
        await self.media.objects.put(key, data)
        return key

    def drop_clients(self) -> None:
        for client in self._clients:
            client.drop()


def photo_key(data: bytes, extension: str = "jpg") -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    return f"photos/{sha256[:2]}/{sha256[2:4]}/{sha256}.{extension}"


def pattern(size_bytes: int) -> bytes:
    """Bytes that differ at offsets that could be confused."""
    words = (n.to_bytes(4, "big") for n in range(size_bytes // 4 + 1))
    return b"".join(words)[:size_bytes]


@asynccontextmanager
async def serving(blobs, **settings):
    settings.setdefault("listen", ("127.0.0.1", 0))
    media = Media(blobs, MediaConfig(**settings), secret=lambda: SECRET)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(media, stop, lambda host, port: ready.set_result((host, port)))
    )
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    served = Served(media, *(ready.result() if ready.done() else task.result()), stop, task)
    try:
        yield served
    finally:
        served.drop_clients()
        stop.set()
        await task


async def pause(delay_s: float) -> None:
    """The pace of a deliberately slow client."""
    with suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await asyncio.Event().wait()


def open_files() -> int:
    """The number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def wait_until(condition) -> None:
    """Return once `condition()` holds; fail at the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await pause(0.01)
