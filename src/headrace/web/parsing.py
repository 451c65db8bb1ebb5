"""Requests out of bytes, within the limits of heads; no I/O.

`httptools` wraps llhttp, the parser of Node.js, and is kept by the authors of uvloop. It is strict
about framing. This module adds what it accepts and other servers read differently (RFC 9112,
sections 6 and 7), and the maximum sizes: of a target, of a field, of all fields, and of the parts
of a chunked body that are not content.
"""

from __future__ import annotations

from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import httptools

from headrace.kernel.errors import HeadraceError
from headrace.web.model import (
    HEAD_BYTES_MAX,
    HEAD_FIELD_BYTES_MAX,
    HEAD_FIELDS_MAX,
    TARGET_BYTES_MAX,
    BadRequest,
    HeadTooLarge,
    TargetTooLong,
)

Fields = list[tuple[bytes, bytes]]
VERSIONS: Final = ("1.1", "1.0")


class RequestHead:
    """The head of one request; names of fields are in lower case."""

    __slots__ = ("fields", "keep_alive", "method", "target", "version")

    def __init__(
        self, method: str, target: bytes, version: str, fields: Fields, *, keep_alive: bool
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.fields = fields
        self.keep_alive = keep_alive


class Sink(Protocol):
    """Receives what a parser finds, in order."""

    def take_head(self, head: RequestHead) -> None:
        """A request begins."""

    def take_body(self, data: bytes) -> None:
        """A part of its body."""

    def take_end(self) -> None:
        """It is complete."""


class RequestParser:
    """The requests of one connection, passed to `sink`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._parser: Any = httptools.HttpRequestParser(self)
        self._refusal: HeadraceError | None = None
        self._target = b""
        self._fields: Fields = []
        self.is_in_head = False
        """Whether the last byte belongs to an incomplete head."""
        self.is_in_body = False
        """Whether the last byte belongs to an incomplete body."""
        self.is_over = False
        """Whether the last request was the last of its connection."""
        self._is_last = False
        self._read_bytes = 0
        self._is_head_cut = False
        self._idle_bytes = 0
        """Bytes of a head, or since the last content of a body."""

    def feed(self, data: bytes) -> None:
        """Parse `data`. Bytes after the last request are ignored. Raises: the refusal."""
        if self.is_over:
            return
        self._read_bytes = len(data)
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_rest(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if not self._is_ended():
                raise self._refusal or BadRequest(
                    f"the request cannot be parsed: {error}"
                ) from None
        self._is_head_cut = self.is_in_head
        if self.is_in_head or self.is_in_body:
            self._idle_bytes += self._read_bytes
            if self._idle_bytes > HEAD_BYTES_MAX + TARGET_BYTES_MAX:
                raise _head_too_large()

    def close(self) -> None:
        """Break the reference cycle of parser and callbacks."""
        self._parser, self.is_over = None, True

    def _parse_rest(self, data: memoryview) -> None:
        """Parse the bytes after a request for an upgrade, which is answered as any other."""
        while data and not self._is_ended():
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            else:
                return

    def _is_ended(self) -> bool:
        """Whether the last request ended; callbacks of the parser change this."""
        return self.is_over

    # Callbacks of the parser. It stops on any exception.

    def on_message_begin(self) -> None:
        """Begin a head."""
        self.is_in_head = True
        self._target, self._fields, self._idle_bytes = b"", [], 0

    def on_url(self, part: bytes) -> None:
        """Add a part of the target."""
        self._target += part
        if len(self._target) > TARGET_BYTES_MAX:
            self._refuse(
                TargetTooLong(f"the request target is longer than {TARGET_BYTES_MAX} bytes")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field of the head. Fields after a chunked body are dropped."""
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the head and pass it on."""
        self.is_in_head = False
        parser, fields, target = self._parser, self._fields, self._target
        if (
            self._is_head_cut
            or self._read_bytes > HEAD_FIELD_BYTES_MAX
            or len(fields) > HEAD_FIELDS_MAX
        ):
            self._check_sizes(fields)
        if not target.startswith(b"/") and target != b"*":
            self._check_target(target, fields)
        version = parser.get_http_version()
        self._check_framing(version, fields)
        self._idle_bytes = -self._read_bytes
        self.is_in_body = True
        method = parser.get_method().decode()
        keep_alive = version == "1.1" and bool(parser.should_keep_alive()) and method != "CONNECT"
        head = RequestHead(method, target, version, fields, keep_alive=keep_alive)
        self._fields = []
        self._is_last = not keep_alive
        self._sink.take_head(head)

    def on_body(self, data: bytes) -> None:
        """Pass on a part of the body."""
        self._idle_bytes = -self._read_bytes
        self._sink.take_body(data)

    def on_message_complete(self) -> None:
        """Pass on the end of the request."""
        self.is_in_body = False
        self.is_over = self._is_last
        self._sink.take_end()

    def _check_sizes(self, fields: Fields) -> None:
        """Refuse a head over the limits; `feed` bounds a head that arrives in several reads."""
        sizes = [len(name) + len(value) for name, value in fields]
        if (
            len(sizes) > HEAD_FIELDS_MAX
            or sum(sizes) > HEAD_BYTES_MAX
            or (sizes and max(sizes) > HEAD_FIELD_BYTES_MAX)
        ):
            self._refuse(_head_too_large())

    def _check_target(self, target: bytes, fields: Fields) -> None:
        """Accept only the absolute form of the same host (RFC 9112, 3.2)."""
        hosts = [value for name, value in fields if name == b"host"]
        parts = urlsplit(target)
        if parts.scheme not in (b"http", b"https") or [parts.netloc] != hosts:
            self._refuse(BadRequest("the request target is not a path of this host"))

    def _check_framing(self, version: str, fields: Fields) -> None:
        """Refuse framing that the parser accepts and other servers read differently."""
        if version not in VERSIONS:
            self._refuse(BadRequest("only HTTP/1.0 and HTTP/1.1 are supported"))
        for name, value in fields:
            if name == b"transfer-encoding":
                codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
                if codings != [b"chunked"]:
                    self._refuse(
                        BadRequest("the only supported transfer coding is chunked, given once")
                    )
                return

    def _refuse(self, error: HeadraceError) -> None:
        self._refusal = error
        raise ValueError(error.code)


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"the head is too large: expected at most {HEAD_FIELDS_MAX} fields,"
        f" {HEAD_FIELD_BYTES_MAX} bytes each and {HEAD_BYTES_MAX} bytes together"
    )
