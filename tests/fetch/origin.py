"""A seller's host on loopback: any response, fast or slow, and its own access log."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
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
    """One response; `raw` is sent unchanged, and the connection is closed after it.

    `hangs`: nothing follows `raw`. `drip_s`: the delay after each byte of `raw`. `repeats`: sent
    after `raw` again and again until the client leaves.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    hangs: bool = False
    drip_s: float = 0.0
    repeats: bytes = b""


def redirect(to: str, status: int = 302) -> Answer:
    return Answer(status, b"x" * 100, {"Location": to})


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

    async def listen(self, address: str) -> None:
        """Listen on the same port of another address too: another host for its clients."""
        self._others.append(await asyncio.start_server(self._serve, address, self.port))

    @property
    def port(self) -> int:
        assert self._server
        return self._server.sockets[0].getsockname()[1]

    def url(self, path: str) -> str:
        assert self._server
        return f"http://{self._server.sockets[0].getsockname()[0]}:{self.port}{path}"

    def requests(self, path: str) -> list[int]:
        """The statuses answered for `path`, in order."""
        return [status for requested, status in self.log if requested == path]

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
        if answer.hangs or answer.drip_s or answer.repeats:
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
        while answer.repeats and not left.done():
            writer.write(answer.repeats)
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


LOOK_S = 0.01


class PacedOrigin(Origin):
    """Waits `delays_s` of the longest matching prefix; logs when each request arrived.

    Closes the connection without a response for the first `dies_after[path]` requests of a path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.came: list[tuple[float, str]] = []
        self.delays_s: dict[str, float] = {}
        self.dies_after: dict[str, int] = {}
        self.refusal: Answer | None = None
        """The response to everything while it is set."""
        self.late_s = 0.0
        """The longest delay of this process: a request may be logged that late."""
        self._looking: asyncio.TimerHandle | None = None
        self.held_now = 0
        """Requests that `hold` keeps."""
        self._held: str | None = None
        self._closing = asyncio.Event()
        self._released = asyncio.Event()

    async def start(self, *addresses: str) -> None:
        await super().start(*addresses)
        self._look(time.monotonic())

    def _look(self, due_s: float) -> None:
        now_s = time.monotonic()
        self.late_s = max(self.late_s, now_s - due_s + LOOK_S)
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(LOOK_S, self._look, now_s + LOOK_S)

    def hold(self, prefix: str = "/") -> None:
        """Do not answer requests below `prefix` before `release`."""
        self._held = prefix
        self._released.clear()

    def release(self) -> None:
        """Answer all waiting requests at once."""
        self._held = None
        self._released.set()

    async def close(self) -> None:
        self._closing.set()
        self.release()
        if self._looking is not None:
            self._looking.cancel()
        await super().close()

    def times(self, among: str = "") -> list[float]:
        """The arrival times of requests whose path contains `among`."""
        return [at for at, path in self.came if among in path]

    def most_in_window(self, window_s: float, among: str = "") -> int:
        """The most requests in any window, within the precision of its clock."""
        return most_in_window(self.times(among), window_s - self.late_s)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        peeked = await reader.readuntil(b"\r\n\r\n")
        path = peeked.split(b" ", 2)[1].decode()
        self.came.append((time.monotonic(), path))
        if self.dies_after.get(path, 0) > 0:
            self.dies_after[path] -= 1
            self.log.append((path, 0))
            return False
        again = asyncio.StreamReader()
        again.feed_data(peeked)
        await self._wait(path)
        return await super()._answer(again, writer)

    async def _wait(self, path: str) -> None:
        if self._held is not None and path.startswith(self._held):
            self.held_now += 1
            await self._released.wait()
            self.held_now -= 1
        found = [prefix for prefix in self.delays_s if path.startswith(prefix)]
        if found:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self.delays_s[max(found, key=len)])

    def _answer_of(self, path: str, headers: dict[str, str]) -> Answer:
        return self.refusal or super()._answer_of(path, headers)


def most_in_window(times: Sequence[float], window_s: float) -> int:
    """The most of `times` in any window of that length."""
    ordered, first, most = sorted(times), 0, 0
    for last, at in enumerate(ordered):
        # A window below 0 is that of a machine that was late by more than the window.
        while first < last and ordered[first] <= at - window_s:
            first += 1
        most = max(most, last - first + 1)
    return most
