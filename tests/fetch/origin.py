"""A seller's host on loopback: every kind of answer a photo can meet, and its own access log."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from PIL import Image


@cache
def photo(name: str, *, kind: str = "JPEG", size: tuple[int, int] = (64, 48)) -> bytes:
    """A real picture, another one for each name."""
    digest = hashlib.sha256(name.encode()).digest()
    out = io.BytesIO()
    picture = Image.effect_noise(size, digest[0] % 40 + 10).convert("RGB")
    picture.paste((digest[1], digest[2], digest[3]), (0, 0, 20, 20))
    picture.putpixel((0, 0), (digest[4], digest[5], digest[6]))
    picture.save(out, kind, quality=90) if kind != "PNG" else picture.save(out, kind)
    return out.getvalue()


@dataclass
class Answer:
    """One response; `raw` goes out as it is, and the connection is closed after it.

    `hangs`: after `raw` nothing more comes. `drip_s`: a byte of `raw`, that long nothing, the next
    byte. `goes_on`: after `raw` these bytes come again and again, as long as somebody reads.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    hangs: bool = False
    drip_s: float = 0.0
    goes_on: bytes = b""


class Origin:
    """Serves `answers[path]`, or a photo for `/photo/...` with ETag and 304; logs every request."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.log: list[tuple[str, int]] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.connections = 0
        self.versions: dict[str, str] = {}
        self._server: asyncio.Server | None = None
        self._others: list[asyncio.Server] = []
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, *addresses: str) -> None:
        """Listen on one port of these addresses, 127.0.0.1 if none is named."""
        first, *others = addresses or ("127.0.0.1",)
        self._server = await asyncio.start_server(self._serve, first, 0)
        self._others = [await asyncio.start_server(self._serve, a, self.port) for a in others]

    @property
    def port(self) -> int:
        assert self._server
        return self._server.sockets[0].getsockname()[1]

    def url(self, path: str) -> str:
        assert self._server
        return f"http://{self._server.sockets[0].getsockname()[0]}:{self.port}{path}"

    def requests(self, path: str) -> list[int]:
        """The statuses answered for `path`, in order."""
        return [status for asked, status in self.log if asked == path]

    def statuses(self) -> Counter[int]:
        return Counter(status for _, status in self.log)

    async def close(self) -> None:
        assert self._server
        for server in (self._server, *self._others):
            server.close()
        for writer in list(self._open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split(" ")[1]
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        self.headers[path] = headers
        answer = self._answer_of(path, headers)
        self.log.append((path, answer.status))
        if answer.hangs or answer.drip_s or answer.goes_on:
            await self._misbehave(answer, reader, writer)
            return False
        if answer.raw is not None:
            writer.write(answer.raw)
            await writer.drain()
            return False
        lines = [f"HTTP/1.1 {answer.status} Answer", f"Content-Length: {len(answer.body)}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + answer.body)
        await writer.drain()
        return True

    async def _misbehave(
        self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until the client leaves."""
        left = asyncio.create_task(reader.read())
        size = 1 if answer.drip_s else len(answer.raw or b"")
        for at in range(0, len(answer.raw or b""), max(1, size)):
            writer.write((answer.raw or b"")[at : at + size])
            await asyncio.wait([left], timeout=answer.drip_s)
            if left.done():
                return
        while answer.goes_on and not left.done():
            writer.write(answer.goes_on)
            await writer.drain()
            await asyncio.wait([left], timeout=0)
        await left

    def _answer_of(self, path: str, headers: dict[str, str]) -> Answer:
        planned = self.answers.get(path)
        if planned:
            return planned.pop(0) if len(planned) > 1 else planned[0]
        if not path.startswith("/photo/"):
            return Answer(404, b"nothing here")
        name = f"{path}{self.versions.get(path, '')}"
        etag = f'"{hashlib.sha256(name.encode()).hexdigest()[:16]}"'
        if headers.get("if-none-match") == etag:
            return Answer(304, headers={"ETag": etag})
        return Answer(200, photo(name), {"ETag": etag, "Content-Type": "image/jpeg"})
