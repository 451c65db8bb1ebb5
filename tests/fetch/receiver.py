"""Receiver of a webhook on loopback: verifies and stores messages, responds as planned."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from dataclasses import dataclass, field


@dataclass
class Received:
    """One POST."""

    headers: dict[str, str]
    body: bytes
    status: int

    @property
    def document(self):
        return json.loads(self.body)

    def is_signed_with(self, secret: str) -> bool:
        """Independent implementation of the Standard Webhooks check."""
        key = base64.b64decode(secret.removeprefix("whsec_"))
        head = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}."
        wanted = hmac.new(key, head.encode() + self.body, hashlib.sha256).digest()
        given = [s.partition(",") for s in self.headers["webhook-signature"].split(" ")]
        return any(v == "v1" and base64.b64decode(s) == wanted for v, _, s in given)


@dataclass
class Receiver:
    """Answers `planned` one by one, then 204; `taken` lists the messages with a 2xx response."""

    planned: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    posts: list[Received] = field(default_factory=list)
    path: str = "/hook"
    is_hanging: bool = False
    answer: bytes = b""
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

    @property
    def port(self) -> int:
        assert self._server
        return self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"

    @property
    def taken(self) -> list[Received]:
        return [post for post in self.posts if 200 <= post.status < 300]

    def delivered(self) -> list[tuple[int, str, str, int]]:
        """(seq, action, id, version) of every result that was taken, in order."""
        return [
            (r["seq"], r["action"], r["id"], r["version"])
            for post in self.taken
            for r in post.document["results"]
        ]

    async def close(self) -> None:
        assert self._server
        self._server.close()
        for writer in list(self._open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
        headers = {name.lower(): value for name, value in headers.items()}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if self.is_hanging:
            await reader.read()
            return False
        status, more = self.planned.pop(0) if self.planned else (204, {})
        self.posts.append(Received(headers, body, status))
        lines = [f"HTTP/1.1 {status} Answer", f"Content-Length: {len(self.answer)}"]
        lines += [f"{name}: {value}" for name, value in more.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + self.answer)
        await writer.drain()
        return True
