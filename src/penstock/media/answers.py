"""Heads of answers, and problem documents (RFC 9457), as the bytes that go out.

Pure but for the Date, which is made once a second. An answer that ends the connection says so; a problem
never repeats what the client sent, and is never cached.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Final

import msgspec

from penstock.kernel.errors import PenstockError
from penstock.media.model import Shape, content_type
from penstock.media.ranges import Decision, format_http_date
from penstock.media.requests import Request

REASONS: Final = {
    200: "OK",
    206: "Partial Content",
    304: "Not Modified",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    412: "Precondition Failed",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
FOREVER: Final = "public, max-age=31536000, immutable"
A_MINUTE: Final = "public, max-age=60"
FROM_DISK: Final = "penstock; hit"
FROM_ORIGIN: Final = "penstock; fwd=bypass"


def object_head(
    request: Request,
    decision: Decision,
    shape: Shape,
    *,
    key: str,
    cache_status: str,
    keeps_alive: bool,
) -> bytes:
    """The head of a 200, 206 or 304 answer."""
    fields = [
        ("ETag", f'"{shape.etag}"'),
        ("Last-Modified", _http_date(shape.modified_s)),
        ("Cache-Control", FOREVER if shape.is_immutable else A_MINUTE),
        ("Cache-Status", cache_status),
        ("Accept-Ranges", "bytes"),
    ]
    if decision.status != 304:
        fields.append(("Content-Type", content_type(key)))
        fields.append(("Content-Length", str(decision.length_bytes)))
        fields.append(("X-Content-Type-Options", "nosniff"))
    if decision.status == 206:
        last = decision.start + decision.length_bytes - 1
        content_range = f"bytes {decision.start}-{last}/{shape.size_bytes}"
        fields.append(("Content-Range", content_range))
    return _head(decision.status, fields, request, keeps_alive=keeps_alive)


def problem(
    error: PenstockError,
    request: Request | None,
    *,
    keeps_alive: bool,
    extra: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """A whole answer that says what went wrong, in the shape the API uses; no body for HEAD."""
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
    if error.retry_after_s is not None:
        fields.append(("Retry-After", str(max(1, round(error.retry_after_s)))))
    head = _head(error.status, fields, request, keeps_alive=keeps_alive)
    return head if request is not None and request.method == "HEAD" else head + body


def _head(
    status: int, fields: list[tuple[str, str]], request: Request | None, *, keeps_alive: bool
) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"Date: {_http_date(int(time.time()))}"]
    lines += [f"{name}: {value}" for name, value in fields]
    if not keeps_alive:
        lines.append("Connection: close")
    elif request is not None and request.is_http_1_0:
        lines.append("Connection: keep-alive")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


@lru_cache(maxsize=4096)
def _http_date(moment_s: int) -> str:
    return format_http_date(moment_s)
