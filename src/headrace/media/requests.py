r"""Parse heads of HTTP/1.1 requests from a stream of bytes: strict, bounded, without I/O.

A head is first cut at its empty line and then parsed by llhttp (httptools) in strict mode, with a
new parser for each head. So bytes of a pipelined request never become part of an earlier one. What
llhttp still accepts (two spaces in the request line, HTTP/0.9, several Hosts) is refused here,
because differences between parsers allow request smuggling. A bare line feed or control byte is
refused when it arrives, as it may be the only sign that no head will follow.

Every error raised here is final for its connection: answer and close.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import httptools

from headrace.engines.blobs import InvalidBlobKey, require_key
from headrace.kernel.errors import HeadraceError
from headrace.media.errors import (
    BadRequest,
    HeadTooLarge,
    MethodNotAllowed,
    ObjectUnknown,
    TargetTooLong,
    TransferCodingUnknown,
    VersionUnknown,
)

HEAD_BYTES_MAX: Final = 32 * 1024
LINE_BYTES_MAX: Final = 8 * 1024
FIELDS_MAX: Final = 100
EMPTY_LINES_MAX: Final = 2
PATH_PREFIX: Final = "/m/"
_STRAY: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?![\n])(?!\Z)")
_PLAIN: Final = bytes({9, 10, 13, *range(32, 256)} - {127})
_REQUEST_LINE: Final = re.compile(rb"[A-Z-]{1,32} [\x21-\x7e]+ HTTP/(\d\.\d)\r\n")
_HOST: Final = re.compile(
    r"[A-Za-z0-9._~%!$&'()*+,;=-]+(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?"
)
_ONCE: Final = frozenset(
    {"content-length", "host", "if-modified-since", "if-range", "if-unmodified-since", "range"}
)


class Request(NamedTuple):
    """The head of one request. Names in `fields` are in lower case, repeated fields are joined."""

    method: str
    target: str
    fields: dict[str, str]
    is_http_1_0: bool
    keeps_alive: bool
    has_body: bool


class HeadReader:
    """Feed bytes with `feed`, get requests with `take`. `begun`: a partial head was received."""

    __slots__ = ("_buffer", "_empty_lines", "_seen_bytes")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen_bytes = 0
        self._empty_lines = 0

    @property
    def begun(self) -> bool:
        return bool(self._buffer) or self._empty_lines > 0

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> Request | None:
        """The next request, or None while its head is incomplete.

        Raises: BadRequest, HeadTooLarge, TargetTooLong, TransferCodingUnknown, VersionUnknown.
        """
        buffer = self._buffer
        if not buffer:
            return None
        self._skip_empty_lines()
        end = buffer.find(b"\r\n\r\n", max(0, self._seen_bytes - 3))
        known_end = len(buffer) if end < 0 else end + 4
        is_plain = end >= 0 and not self._seen_bytes and _is_plain(buffer[:known_end])
        if not is_plain and _STRAY.search(buffer, max(0, self._seen_bytes - 1), known_end):
            raise BadRequest(
                "the head has a control byte or a bare CR or LF: end every line with CR LF"
            )
        if end < 0 or known_end > HEAD_BYTES_MAX:
            self._require_bounds(known_end)
            self._seen_bytes = known_end
            return None
        head = bytes(buffer[:known_end])
        del buffer[:known_end]
        self._seen_bytes = self._empty_lines = 0
        return parse_head(head)

    def _skip_empty_lines(self) -> None:
        # RFC 9112 section 2.2: ignore empty lines before a request, but not any number of them.
        while self._buffer[:2] == b"\r\n":
            del self._buffer[:2]
            self._seen_bytes = 0
            self._empty_lines += 1
            if self._empty_lines > EMPTY_LINES_MAX:
                raise BadRequest("empty lines were sent instead of a request")

    def _require_bounds(self, head_bytes: int) -> None:
        line_end = self._buffer.find(b"\r\n", 0, LINE_BYTES_MAX + 64)
        if line_end < 0 and head_bytes >= LINE_BYTES_MAX + 64:
            raise TargetTooLong(f"the request line is longer than {LINE_BYTES_MAX} bytes")
        if head_bytes > HEAD_BYTES_MAX:
            raise HeadTooLarge(f"the head is larger than {HEAD_BYTES_MAX} bytes")


def _is_plain(head: bytearray) -> bool:
    """Whether a complete head has no control bytes or bare CR or LF. Faster than the expression."""
    lines = head.count(b"\r\n")
    no_strays = lines == head.count(b"\n") == head.count(b"\r")
    return no_strays and not head.translate(None, _PLAIN)


def parse_head(head: bytes) -> Request:
    """The request of one complete head with its empty line. Raises: as `HeadReader.take`."""
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise BadRequest("the first line is no request line such as GET /m/key HTTP/1.1")
    if line[1] not in (b"1.0", b"1.1"):
        raise VersionUnknown(f"HTTP/{line[1].decode()} is not supported: use HTTP/1.1")
    seen = _Seen()
    parser = seen.parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        seen.keeps_alive = False
    except httptools.HttpParserError as error:
        raise _refusal(head, error) from error
    finally:
        seen.parser = None  # or the two would wait for the collector of cycles, once a request
    fields = _joined(seen.fields)
    is_http_1_0 = line[1] == b"1.0"
    target = _origin_form(seen.target.decode("ascii"), fields.get("host"), is_optional=is_http_1_0)
    return Request(
        method=parser.get_method().decode(),
        target=target,
        fields=fields,
        is_http_1_0=is_http_1_0,
        keeps_alive=seen.keeps_alive,
        has_body=_has_body(fields),
    )


def require_read(request: Request) -> None:
    """Check that a request is GET, HEAD or OPTIONS without a body.

    Raises: MethodNotAllowed, BadRequest.
    """
    if request.method not in ("GET", "HEAD", "OPTIONS"):
        raise MethodNotAllowed("this address only serves objects: use GET or HEAD")
    if request.has_body:
        raise BadRequest("the request has a body: send GET, HEAD and OPTIONS without one")


def key_of(target: str) -> str:
    """The key of a path such as `/m/photos/ab/x.jpg`. Raises: ObjectUnknown.

    Escapes are decoded once, and an escaped slash or percent sign is invalid. So a path has one
    structure, and a proxy in front cannot interpret it differently.
    """
    return _key_of_path(target.partition("?")[0])


@lru_cache(maxsize=4096)
def _key_of_path(path: str) -> str:
    escaped = path.lower()
    if not path.startswith(PATH_PREFIX) or "%2f" in escaped or "%25" in escaped:
        raise ObjectUnknown("this path names no object: objects are found under /m/{key}")
    try:
        return require_key(unquote(path[len(PATH_PREFIX) :], errors="strict"))
    except (InvalidBlobKey, UnicodeDecodeError) as error:
        raise ObjectUnknown("this path names no object: it is not a valid key") from error


class _Seen:
    """The events of llhttp for one head."""

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.keeps_alive = False
        self.parser: httptools.HttpRequestParser | None = None

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        # Only here: llhttp forgets it once the message is complete.
        assert self.parser is not None
        self.keeps_alive = self.parser.should_keep_alive()


def _refusal(head: bytes, error: Any) -> HeadraceError:
    if "invalid `Transfer-Encoding`" in str(error) and b"\r\ntransfer-encoding:" in head.lower():
        return TransferCodingUnknown("the Transfer-Encoding is not known: a GET needs none")
    return BadRequest(f"the request cannot be parsed: {error}")


def _joined(pairs: list[tuple[bytes, bytes]]) -> dict[str, str]:
    if len(pairs) > FIELDS_MAX:
        raise HeadTooLarge(f"the head has {len(pairs)} fields: at most {FIELDS_MAX} are read")
    fields: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        if len(raw_name) + len(raw_value) > LINE_BYTES_MAX:
            raise HeadTooLarge(f"a header field is longer than {LINE_BYTES_MAX} bytes")
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip(" \t")
        if name not in fields:
            fields[name] = value
        elif name in _ONCE:
            raise BadRequest(f"the field {name} is repeated: send it once")
        else:
            fields[name] = f"{fields[name]}, {value}"
    return fields


def _has_body(fields: dict[str, str]) -> bool:
    return "transfer-encoding" in fields or bool(fields.get("content-length", "").strip("0"))


def _origin_form(target: str, host: str | None, *, is_optional: bool) -> str:
    """Path and query of `target`, after checking its Host."""
    if len(target) > LINE_BYTES_MAX:
        raise TargetTooLong(f"the target is longer than {LINE_BYTES_MAX} bytes")
    if not (host is None and is_optional) and _HOST.fullmatch(host or "") is None:
        raise BadRequest("the request needs one valid Host field")
    if "#" in target:
        raise BadRequest("the target has a fragment: leave out # and what follows")
    if target.startswith("/") or target == "*":
        return target
    parts = urlsplit(target)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadRequest("the target is neither a path nor an http URL")
    if host is not None and parts.netloc.lower() != host.lower():
        raise BadRequest("the target names another host than the Host field")
    return target[len(parts.scheme) + 3 + len(parts.netloc) :] or "/"
