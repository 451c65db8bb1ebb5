"""One request and its response as an ASGI application sees them, and responses without one."""

from __future__ import annotations

import asyncio
import http
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools
import msgspec

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.web.model import Stopping
from headrace.web.parsing import RequestHead
from headrace.web.problems import MEDIA_TYPE, headers_of, problem_of

BUFFER_BYTES_MAX: Final = 64 * 1024
"""Reading pauses while this much of a body waits for its handler."""
STATUS_LINES: Final = {
    int(status): f"HTTP/1.1 {status} {status.phrase}\r\n".encode() for status in http.HTTPStatus
}
BODILESS: Final = frozenset({204, 304})
_CLOSE: Final = b"connection: close\r\n"
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_log: Final = logger(__name__)


class Line(Protocol):
    """What an exchange needs of its connection."""

    is_write_paused: bool

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is closed."""

    def date_line(self) -> bytes:
        """The Date field."""

    async def wait_writable(self) -> None:
        """Wait until the peer has read enough, or the connection ended."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Read again, unless another request waits."""

    def is_last_response(self) -> bool:
        """Whether the server closes this connection after the current response."""


class Exchange:
    """One request and its response.

    It checks what an application sends: a response must have the announced length, and a field
    cannot contain the end of a line.
    """

    __slots__ = (
        "_body",
        "_chunked",
        "_head",
        "_held",
        "_left_bytes",
        "_line",
        "_news",
        "_waits_for_continue",
        "is_answered",
        "is_body_whole",
        "is_disconnected",
        "is_last",
        "is_started",
        "scope",
    )

    def __init__(self, line: Line, head: RequestHead, scope: dict[str, Any]) -> None:
        self._line = line
        self._head = head
        self.scope = scope
        self._body = bytearray()
        self.is_body_whole = False
        self._news = asyncio.Event()
        """Set when `receive` may have something to return."""
        self._waits_for_continue = head.version != "1.0" and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in head.fields
        )
        self.is_disconnected = False
        self.is_started = False
        self.is_answered = False
        self.is_last = not head.keep_alive
        """Whether the connection is closed after the response."""
        self._chunked = False
        self._left_bytes: int | None = None
        """Bytes of the announced length that are missing; None without one."""
        self._held = b""
        """The head of a response of known length, sent with the first bytes of its body."""

    def add_body(self, data: bytes) -> None:
        """Add a part of the body; it is dropped after the response."""
        if self.is_answered:
            return
        self._body += data
        if len(self._body) > BUFFER_BYTES_MAX:
            self._line.pause_reading()
        self._news.set()

    def end_body(self) -> None:
        """Note that the body is complete."""
        self.is_body_whole = True
        self._news.set()

    def disconnect(self) -> None:
        """Note that nothing can be sent any more."""
        self.is_disconnected = True
        self._news.set()

    async def run(self, app: Any) -> None:
        """Let `app` answer. Afterwards, a response that is not complete ends the connection."""
        try:
            await app(self.scope, self.receive, self.send)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the guard answers errors
            if not self.is_disconnected:
                _log.error("response_broken", path=self.scope["path"], exc_info=error)
        else:
            if not self.is_answered and not self.is_disconnected:
                _log.error("response_incomplete", path=self.scope["path"])

    async def receive(self) -> dict[str, Any]:
        """The next part of the body, or the end of the connection."""
        if self._waits_for_continue:
            self._waits_for_continue = False
            if not (self.is_started or self.is_disconnected):
                self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.is_disconnected and not self.is_answered:
            self._line.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self.is_disconnected or self.is_answered:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_body_whole}

    async def send(self, message: Any) -> None:
        """Send one ASGI message."""
        if self._line.is_write_paused and not self.is_disconnected:
            await self._line.wait_writable()
        if self.is_disconnected:
            return
        if self.is_answered:
            raise RuntimeError(f"{message['type']} after the end of the response")
        if not self.is_started:
            assert message["type"] == "http.response.start", message["type"]
            self._start(message["status"], message.get("headers", ()))
        else:
            assert message["type"] == "http.response.body", message["type"]
            self._send_body(message.get("body", b""), is_more=message.get("more_body", False))

    def _start(self, status: int, headers: Any) -> None:
        lines = [STATUS_LINES[status], self._line.date_line()]
        length: int | None = None
        is_closing = False
        for raw_name, value in headers:
            name = raw_name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                is_closing = b"close" in value.lower()
            lines.append(b"%b: %b\r\n" % (name, value))
        if is_closing:
            self.is_last = True
        elif self.is_last or self._line.is_last_response():
            self.is_last = True
            lines.append(_CLOSE)
        if self._head.method == "HEAD" or status in BODILESS:
            length = 0
        elif length is None:
            self._chunked = self._head.version != "1.0"
            self.is_last = self.is_last or not self._chunked
            lines += [_CHUNKED] if self._chunked else []
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
            raise RuntimeError("a field of the response contains the end of a line")
        self.is_started = True
        self._waits_for_continue = False
        self._left_bytes = length
        head += b"\r\n"
        if length is None:
            self._line.write(head)
        else:
            self._held = head

    def _send_body(self, body: bytes, *, is_more: bool) -> None:
        if self._head.method == "HEAD":
            body = b""
        data = body
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data += b"" if is_more else b"0\r\n\r\n"
        elif self._left_bytes is not None:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes and not is_more):
                raise RuntimeError("the response does not have its announced length")
        if self._held:
            data, self._held = self._held + data, b""
        if data:
            self._line.write(data)
        if not is_more:
            self.is_answered = True
            self._news.set()


def scope_of_request(head: RequestHead, client: Any, server: Any) -> dict[str, Any]:
    """The ASGI scope of a request. Raises: httptools.HttpParserInvalidURLError."""
    url = httptools.parse_url(head.target)
    path = url.path.decode("ascii")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.version,
        "server": server,
        "client": client,
        "scheme": "http",
        "root_path": "",
        "headers": head.fields,
        "state": {},
        "method": head.method,
        "path": unquote(path) if "%" in path else path,
        "raw_path": url.path,
        "query_string": url.query or b"",
    }


def error_bytes(error: HeadraceError) -> bytes:
    """A complete HTTP response with `error`, for a request that was not parsed."""
    body = msgspec.json.encode(problem_of(error))
    headers = {
        "content-type": MEDIA_TYPE,
        "content-length": str(len(body)),
        "x-content-type-options": "nosniff",
        **headers_of(error),
        "connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINES[error.status] + lines.encode() + b"\r\n" + body


def stopped() -> Stopping:
    """The error for a request that a stop cancels."""
    return Stopping("the server stops and the request took too long", retry_after_s=1)
