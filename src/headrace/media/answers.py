"""Heads of answers, problem documents (RFC 9457) and CORS fields as bytes.

Pure except for the Date; lines that repeat are cached. A problem document never repeats client
input and is never cached.

CORS (Fetch standard): pages may always embed media with <audio> or <img>. Scripts that read bytes
with `fetch`, a canvas or Web Audio need the fields of `Cors`; a range request by script also needs
a preflight in some browsers. Cookies are never allowed. A preflight is answered without checking
object or signature, so it reveals nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import msgspec

from headrace.kernel.errors import HeadraceError
from headrace.media.errors import PreconditionFailed, RangeUnsatisfiable
from headrace.media.header_rules import HeaderRule
from headrace.media.model import ANY_ORIGIN, STATUSES, Shape, content_type
from headrace.media.ranges import Decision, format_http_date
from headrace.media.requests import Request
from headrace.media.signing import UrlRights, cache_control

HIT: Final = "headrace; hit"
"""The Cache-Status of cached bytes."""
PEER: Final = "headrace; fwd=miss; detail=peer"
"""The Cache-Status of bytes from another node."""
MISS: Final = "headrace; fwd=miss"
"""The Cache-Status of an object that is not stored here."""
ALLOWED_METHODS: Final = "GET, HEAD, OPTIONS"
PREFLIGHT_S: Final = 86_400
"""How long a browser may cache a preflight answer."""
_EXPOSED: Final = (
    "Accept-Ranges, Cache-Status, Content-Length, Content-Range, Date, ETag, Retry-After"
)
_REQUEST_FIELDS: Final = (
    "Range, If-Range, If-Match, If-None-Match, If-Modified-Since, If-Unmodified-Since,"
    " Traceparent, Baggage"
)
Fields = tuple[tuple[str, str], ...]


def object_head(
    request: Request,
    decision: Decision,
    shape: Shape,
    *,
    key: str,
    rights: UrlRights,
    cache_status: str,
    keeps_alive: bool,
    cors: str = "",
    rule: HeaderRule | None = None,
    extra: Fields = (),
) -> bytes:
    """The head of a 200, 206 or 304 answer. `cors` holds lines of `Cors`."""
    now_s = int(time.time())
    freshness = cache_control(rights, is_immutable=shape.is_immutable, now_s=now_s)
    if rule is not None and rule.cache_control is not None and rights.expires_at is None:
        freshness = rule.cache_control
    lines = (
        f"{_first_lines(decision.status, now_s)}{version_lines(shape.etag, shape.modified_s)}"
        f"Cache-Control: {freshness}\r\n"
    )
    if decision.status == 304:
        lines += f"Cache-Status: {cache_status}\r\n{cors}{rule.lines if rule else ''}"
    else:
        lines += content_lines(key, cache_status=cache_status, cors=cors, rule=rule)
        lines += f"Content-Length: {decision.length_bytes}\r\n"
    if decision.status == 206:
        last = decision.start + decision.length_bytes - 1
        lines += f"Content-Range: bytes {decision.start}-{last}/{shape.size_bytes}\r\n"
    lines += _lines(extra)
    return f"{lines}{_last_lines(request, keeps_alive=keeps_alive)}".encode("latin-1")


def content_lines(key: str, *, cache_status: str, cors: str, rule: HeaderRule | None) -> str:
    """The lines from Cache-Status to those of the content and of a rule."""
    return (
        f"Cache-Status: {cache_status}\r\n{cors}"
        f"Content-Type: {content_type(key)}\r\nX-Content-Type-Options: nosniff\r\n"
        f"{rule.lines if rule else ''}"
    )


def problem(
    error: HeadraceError,
    request: Request | None,
    *,
    keeps_alive: bool,
    cors: str = "",
    extra: Fields = (),
) -> bytes:
    """A complete error answer in the format of the API, without body for HEAD."""
    body = msgspec.json.encode(
        {
            "type": f"/problems/{error.code}",
            "title": error.code.rpartition(".")[2].replace("_", " ").capitalize(),
            "status": error.status,
            "detail": error.text,
            "code": error.code,
            "retryable": error.retryable,
        }
    )
    fields = [
        ("Content-Type", "application/problem+json"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        *extra,
    ]
    if error.status == 405:
        fields.append(("Allow", ALLOWED_METHODS))
    if error.retry_after_s is not None:
        fields.append(("Retry-After", str(max(1, round(error.retry_after_s)))))
    head = _head(error.status, fields, request, keeps_alive=keeps_alive, cors=cors)
    return head if request is not None and request.method == "HEAD" else head + body


def decision_problem(decision: Decision, shape: Shape) -> tuple[HeadraceError, Fields] | None:
    """The error and extra fields of a decision without an object: 412 and 416."""
    if decision.status == 412:
        text = "the object is not the version in the request: read it again"
        return PreconditionFailed(text), ()
    if decision.status == 416:
        error = RangeUnsatisfiable(f"the range has none of the {shape.size_bytes} bytes")
        return error, (("Content-Range", f"bytes */{shape.size_bytes}"),)
    return None


def options(request: Request, *, cors: str, keeps_alive: bool) -> bytes:
    """The answer to OPTIONS: allowed methods and, in `cors`, what other origins may send."""
    fields = [("Allow", ALLOWED_METHODS), ("Cache-Control", "no-store")]
    return _head(204, fields, request, keeps_alive=keeps_alive, cors=cors)


def health(status: int, request: Request, *, keeps_alive: bool) -> bytes:
    """The answer to a health check: 200 while the node accepts requests, 503 while it stops."""
    body = b"ok\n" if status == 200 else b"stopping\n"
    fields = [
        ("Content-Type", "text/plain"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
    ]
    head = _head(status, fields, request, keeps_alive=keeps_alive)
    return head if request.method == "HEAD" else head + body


def _head(
    status: int,
    fields: Iterable[tuple[str, str]],
    request: Request | None,
    *,
    keeps_alive: bool,
    cors: str = "",
) -> bytes:
    first = _first_lines(status, int(time.time()))
    text = f"{first}{_lines(fields)}{cors}{_last_lines(request, keeps_alive=keeps_alive)}"
    return text.encode("latin-1")


@lru_cache(maxsize=64)
def _first_lines(status: int, now_s: int) -> str:
    return f"HTTP/1.1 {status} {STATUSES[status]}\r\nDate: {format_http_date(now_s)}\r\n"


@lru_cache(maxsize=4096)
def version_lines(etag: str, modified_s: int) -> str:
    """The lines that identify a version of an object."""
    modified = format_http_date(modified_s)
    return f'ETag: "{etag}"\r\nLast-Modified: {modified}\r\nAccept-Ranges: bytes\r\n'


def _lines(fields: Iterable[tuple[str, str]]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in fields])


def _last_lines(request: Request | None, *, keeps_alive: bool) -> str:
    if not keeps_alive:
        return "Connection: close\r\n\r\n"
    if request is not None and request.is_http_1_0:
        return "Connection: keep-alive\r\n\r\n"
    return "\r\n"


class Cors:
    """The fields that let scripts of other origins read an answer."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)
        self._is_any = origins == (ANY_ORIGIN,)

    def lines(self, fields: Mapping[str, str]) -> str:
        """The CORS lines of the answer to a request with `fields` (names in lower case)."""
        if not self._origins:
            return ""
        vary = "" if self._is_any else "Vary: Origin\r\n"
        allowed = ANY_ORIGIN if self._is_any else fields.get("origin", "")
        if not self._is_any and allowed not in self._origins:
            return vary
        return (
            f"{vary}Access-Control-Allow-Origin: {allowed}\r\n"
            f"Access-Control-Expose-Headers: {_EXPOSED}\r\n"
        )

    def preflight_lines(self, fields: Mapping[str, str]) -> str:
        """The CORS lines of the answer to OPTIONS."""
        lines = self.lines(fields)
        if "Access-Control-Allow-Origin" not in lines:
            return lines
        return (
            f"{lines}Access-Control-Allow-Methods: {ALLOWED_METHODS}\r\n"
            f"Access-Control-Allow-Headers: {_REQUEST_FIELDS}\r\n"
            f"Access-Control-Max-Age: {PREFLIGHT_S}\r\n"
        )
