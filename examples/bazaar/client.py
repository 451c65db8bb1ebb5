"""A small HTTP client over asyncio, so that the demo needs no library that the product does not.

One kept connection per object, shared by its callers. It supports only the framing of Headrace's
servers: a Content-Length or chunks. Every exchange has a deadline, and waits for a server that
restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any, Final
from urllib.parse import urlsplit

PATIENCE_S: Final = 60.0
"""A role that dies is back within a second or two, on a busy machine within a minute."""
_DEADLINE_S: Final = 120.0
_AGAIN_S: Final = 0.1
_LINE_BYTES_MAX: Final = 64 * 1024
REASON_CHARACTERS_MAX: Final = 200
_SENTENCE: Final = re.compile(r'<p class="empty"[^>]*>([^<]+)')
"""The sentence of the site's error page."""
_CODE: Final = re.compile(r'data-code="([a-z0-9_.]+)"')
"""The error's code in the site's error page."""


class ServerFailedError(Exception):
    """The server answered with an error, or not at all."""


class ServerLeftError(ServerFailedError):
    """The server went away in the middle of what may have been done or not."""


class RefusedError(ServerFailedError):
    """Status 503: something that the call needs is away for now. It may be repeated later."""

    def __init__(self, text: str, code: str = "") -> None:
        """`code`: that of Headrace's error, such as `valkey.unavailable`."""
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def reason(self) -> str:
        """The error in one line: a problem's detail, or the sentence of a page."""
        text = self.body.decode("utf-8", "replace")
        if "html" in self._kind:
            found = _SENTENCE.search(text)
            text = unescape(found[1]) if found else ""
        else:
            text = self._problem.get("detail", text)
        return (text.strip().splitlines() or ["no reason given"])[0][:REASON_CHARACTERS_MAX]

    @property
    def code(self) -> str:
        """The code of Headrace's error; empty if the answer has none."""
        if "html" in self._kind:
            found = _CODE.search(self.body.decode("utf-8", "replace"))
            return found[1] if found else ""
        return self._problem.get("code", "")

    @property
    def _kind(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def _problem(self) -> dict[str, str]:
        """The texts of a problem in JSON; none if the body is something else."""
        if "json" in self._kind:
            with contextlib.suppress(ValueError, AttributeError):
                found = json.loads(self.body).items()
                return {name: value for name, value in found if isinstance(value, str)}
        return {}

    def require_done(self) -> None:
        """Require a status of 2xx. Raises: ServerFailedError, with the server's error."""
        if self.status // 100 != 2:
            raise ServerFailedError(f"status {self.status}: {self.reason}")

    def json(self) -> Any:
        """The body as JSON. Raises: as `require_done`."""
        self.require_done()
        return json.loads(self.body)


class Client:
    """A connection to `base`, such as `http://127.0.0.1:8080`, opened when needed."""

    def __init__(
        self, base: str, *, token: str | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._address = urlsplit(base)
        self._token = token
        self._patience_s = patience_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def get_json(self, path: str) -> Any:
        """The JSON at `path`. Raises: ServerFailedError."""
        return (await self.request("GET", path)).json()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool | None = None,
    ) -> Reply:
        """Send a request. Retry for `patience_s` while no server accepts the connection.

        A request that was sent is repeated only if `is_repeatable` (default: all methods except
        POST). Raises: RefusedError, for status 503; ServerLeftError, where it was begun and may
        not be sent again; ServerFailedError.
        """
        again = method != "POST" if is_repeatable is None else is_repeatable
        deadline_s = time.monotonic() + self._patience_s
        async with self._turn:
            while True:
                is_begun = False
                try:
                    async with asyncio.timeout(_DEADLINE_S):
                        reader, writer = await self._connected()
                        is_begun = True
                        writer.write(self._head(method, path, body, dict(headers or {})) + body)
                        await writer.drain()
                        reply = self._kept(await _read_reply(reader, has_body=method != "HEAD"))
                        break
                except (OSError, EOFError) as error:
                    self.close()
                    failed = f"{method} {self._address.netloc}{path}: {error!r}"
                    if is_begun and not again and not isinstance(error, TimeoutError):
                        raise ServerLeftError(failed) from error
                    if isinstance(error, TimeoutError) or time.monotonic() > deadline_s:
                        raise ServerFailedError(failed) from error
                except BaseException:
                    self.close()  # a half-read answer must not be taken for the next one
                    raise
                await asyncio.sleep(_AGAIN_S)
        if reply.status == 503:
            raise RefusedError(f"{method} {path}: {reply.reason}", reply.code)
        return reply

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and self._streams[0].at_eof():
            self.close()
        if self._streams is None:
            host, port = self._address.hostname, self._address.port
            self._streams = await asyncio.open_connection(host, port, limit=_LINE_BYTES_MAX)
        return self._streams

    def _head(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        headers["Host"] = self._address.netloc
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body or method in ("PUT", "POST"):
            headers["Content-Length"] = str(len(body))
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _kept(self, reply: Reply) -> Reply:
        if reply.headers.get("connection", "").lower() == "close":
            self.close()
        return reply


async def _read_reply(reader: asyncio.StreamReader, *, has_body: bool) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    pairs = (line.partition(":") for line in lines if ":" in line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    status = int(first.split()[1])
    if not has_body or status in (204, 304):
        return Reply(status, headers, b"")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Reply(status, headers, await _read_chunks(reader))
    return Reply(status, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readline()
    return b"".join(parts)
