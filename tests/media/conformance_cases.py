"""The table of requests and their answers, which holds for every kind of node.

The objects: `track` is mutable, `photo` is content-addressed, `empty` has no bytes. Texts may name
`{etag}`, `{date}`, `{earlier}` and `{later}` of the object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raw_clients import pattern, photo_key

from headrace.media.model import BLOCK_BYTES

SHOP, LOCAL = "https://shop.example", "http://localhost:3000"
FORMER = "f" * 32
"""A root secret that a node accepts besides its own."""
SIZE_BYTES = 3 * BLOCK_BYTES + 1234
LAST = SIZE_BYTES - 1
PHOTO = pattern(70_000)
OBJECTS = {
    "track": ("tracks/a.mp3", pattern(SIZE_BYTES), "audio/mpeg"),
    "photo": (photo_key(PHOTO), PHOTO, "image/jpeg"),
    "empty": ("empty.wav", b"", "audio/wav"),
    "page": ("x.jpg.html", b"<script>alert(1)</script>", "application/octet-stream"),
    "odd": ("photos/a@b~c", b"odd", "application/octet-stream"),
}
"""Key, bytes and expected content type. Nothing is served as a type that a browser executes."""


@dataclass(frozen=True)
class Row:
    """A request and its answer: a status, and a span of the object or the code of a problem."""

    name: str
    status: int
    fields: Mapping[str, str] = field(default_factory=dict)
    span: tuple[int, int] | None = None
    code: str = ""
    method: str = "GET"
    of: str = "track"
    more: Mapping[str, str] = field(default_factory=dict)
    """Further fields of the answer."""


def part(name: str, text: str, start: int, end: int, **options) -> Row:
    return Row(name, 206, {"Range": text}, (start, end), **options)


def whole(name: str, fields: Mapping[str, str], **options) -> Row:
    return Row(name, 200, fields, (0, SIZE_BYTES), **options)


def beyond(name: str, text: str, size_bytes: int = SIZE_BYTES, **options) -> Row:
    more = {"content-range": f"bytes */{size_bytes}"}
    code = "media.range_unsatisfiable"
    return Row(name, 416, {"Range": text}, code=code, more=more, **options)


RANGES = (
    whole("no range", {}),
    part("a part", "bytes=10-19", 10, 20),
    part("one byte", "bytes=0-0", 0, 1),
    part(
        "over a block's end",
        f"bytes={BLOCK_BYTES - 5}-{BLOCK_BYTES + 5}",
        BLOCK_BYTES - 5,
        BLOCK_BYTES + 6,
    ),
    part("a block", f"bytes={BLOCK_BYTES}-{2 * BLOCK_BYTES - 1}", BLOCK_BYTES, 2 * BLOCK_BYTES),
    part("just over what is copied", "bytes=5-32773", 5, 32_774),
    part("to the end", f"bytes={BLOCK_BYTES + 7}-", BLOCK_BYTES + 7, SIZE_BYTES),
    part("all but the start", "bytes=5-", 5, SIZE_BYTES),
    part("past the end", f"bytes={LAST}-{LAST + 100}", LAST, SIZE_BYTES),
    part("the end alone", "bytes=-77", SIZE_BYTES - 77, SIZE_BYTES),
    part("a suffix beyond the start", "bytes=-99999999", 0, SIZE_BYTES),
    part("a huge last byte", "bytes=7-99999999999999999999", 7, SIZE_BYTES),
    beyond("at the end", f"bytes={SIZE_BYTES}-"),
    beyond("far beyond", "bytes=999999999999999999-"),
    beyond("an empty suffix", "bytes=-0"),
    whole("backwards", {"Range": "bytes=9-3"}),
    whole("several", {"Range": "bytes=0-1,4-5"}),
    whole("another unit", {"Range": "items=0-1"}),
    whole("no number", {"Range": "bytes=-"}),
    whole("a sign", {"Range": "bytes=+1-2"}),
    Row("a field in small letters", 206, {"range": "bytes=10-19"}, (10, 20)),
    Row("the whole photo", 200, {}, (0, len(PHOTO)), of="photo"),
    part("of a photo", "bytes=9-9999", 9, 10_000, of="photo"),
    Row("an empty object", 200, {}, (0, 0), of="empty"),
    beyond("of an empty object", "bytes=0-", 0, of="empty"),
    Row("a page of HTML", 200, {}, (0, 25), of="page"),
    Row("a trace", 206, {"Range": "bytes=3-9", "baggage": "user=42"}, (3, 10)),
    Row(
        "last request",
        206,
        {"Range": "bytes=0-4", "Connection": "close"},
        (0, 5),
        more={"connection": "close"},
    ),
)
TEN = (0, 10)
FAILED = {"code": "media.precondition_failed"}
CONDITIONS = (
    Row("the same version", 304, {"If-None-Match": "{etag}", "Range": "bytes=0-9"}),
    Row("weakly the same", 304, {"If-None-Match": 'W/{etag}, "x"'}),
    Row("any version", 304, {"If-None-Match": "*"}),
    Row("another one", 206, {"If-None-Match": '"x"', "Range": "bytes=0-9"}, TEN),
    Row("required", 206, {"If-Match": "{etag}", "Range": "bytes=0-9"}, TEN),
    Row("another required", 412, {"If-Match": '"x"'}, **FAILED),
    Row("only strongly", 412, {"If-Match": "W/{etag}"}, **FAILED),
    Row("unchanged since", 304, {"If-Modified-Since": "{date}"}),
    Row("unchanged for long", 304, {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"}),
    Row("changed since", 206, {"If-Modified-Since": "{earlier}", "Range": "bytes=0-9"}, TEN),
    Row("changed too early", 412, {"If-Unmodified-Since": "{earlier}"}, **FAILED),
    Row("not changed", 206, {"If-Unmodified-Since": "{date}", "Range": "bytes=0-9"}, TEN),
    Row("a current range", 206, {"If-Range": "{etag}", "Range": "bytes=0-9"}, TEN),
    whole("an outdated range", {"If-Range": '"old"', "Range": "bytes=0-9"}),
    whole("a date is too coarse", {"If-Range": "{date}", "Range": "bytes=0-9"}),
    Row("except of a photo", 206, {"If-Range": "{date}", "Range": "bytes=0-9"}, TEN, of="photo"),
    Row("an unchanged photo", 304, {"If-None-Match": "{etag}"}, of="photo"),
)
METHODS = (
    Row("HEAD", 200, {}, (0, SIZE_BYTES), method="HEAD"),
    Row("HEAD of a range", 200, {"Range": "bytes=0-9"}, (0, SIZE_BYTES), method="HEAD"),
    Row("HEAD of the same version", 304, {"If-None-Match": "{etag}"}, method="HEAD"),
    Row("HEAD of a photo", 200, {}, (0, len(PHOTO)), method="HEAD", of="photo"),
    *(
        Row(
            method,
            405,
            {"Range": "bytes=0-9"},
            method=method,
            code="media.method_not_allowed",
            more={"allow": "GET, HEAD, OPTIONS"},
        )
        for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "PURGE")
    ),
)
TOPICS = {"ranges": RANGES, "conditions": CONDITIONS, "methods": METHODS}

NO_KEYS = (
    "/m/../secret", "/m/%2e%2e/secret", "/m/photos/..%2f..%2fsecret", "/m/a%252e", "/m//etc/passwd",
    "/m/", "/m", "/", "*", "/m/a//b", "/m/a/", "/m/.hidden", "/m/a%00.jpg", "/m/a%0d%0aX:y",
    "/m/a\\b", "/m/" + "a" * 600, "/m/%ff", "/m/caf%C3%A9", "/m/a%", "/n/a", "/M/a", "/m/a;x",
    "/m/%2Fetc/passwd", "/m/a/%2e/b", "/m/photos/none.jpg", "/m/_headrace/media/membership.json",
)  # fmt: skip
"""Targets that name no object, and objects that are not served."""
SPELLINGS = (
    "/m/photos/a@b~c",
    "/m/photos/a%40b~c?v=2&x=../..",
    "http://media.test/m/photos/a%40b~c",
)
"""Targets of the object `odd`: a key may be escaped once and have a query."""

HOST = b"Host: a\r\n"
GET = b"GET /m/tracks/a.mp3 HTTP/1.1\r\n"
BAD_HEADS = {
    "both lengths": (400, GET + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "two lengths": (400, GET + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n"),
    "length +5": (400, GET + HOST + b"Content-Length: +5\r\n\r\n"),
    "length list": (400, GET + HOST + b"Content-Length: 5,5\r\n\r\n"),
    "length hex": (400, GET + HOST + b"Content-Length: 0x5\r\n\r\n"),
    "length huge": (400, GET + HOST + b"Content-Length: 99999999999999999999999\r\n\r\n"),
    "unknown coding": (501, GET + HOST + b"Transfer-Encoding: xchunked\r\n\r\n"),
    "bare LF": (400, b"GET /m/k HTTP/1.1\nHost: a\n\n"),
    "bare LF in a field": (400, GET + b"Host: a\nX: y\r\n\r\n"),
    "bare CR in a field": (400, GET + b"Host: a\rX: y\r\n\r\n"),
    "NUL": (400, GET + b"Host: a\0\r\n\r\n"),
    "folded field": (400, GET + b"Host: a\r\n b\r\n\r\n"),
    "space before colon": (400, GET + b"Host : a\r\n\r\n"),
    "field without name": (400, GET + HOST + b": x\r\n\r\n"),
    "field without colon": (400, GET + HOST + b"X\r\n\r\n"),
    "no Host": (400, GET + b"\r\n"),
    "two Hosts": (400, GET + HOST + HOST + b"\r\n"),
    "empty Host": (400, GET + b"Host:\r\n\r\n"),
    "Host with a path": (400, GET + b"Host: a/b\r\n\r\n"),
    "other Host in the target": (400, b"GET http://b/m/k HTTP/1.1\r\n" + HOST + b"\r\n"),
    "fragment": (400, b"GET /m/k#x HTTP/1.1\r\n" + HOST + b"\r\n"),
    "two spaces": (400, b"GET  /m/k HTTP/1.1\r\n" + HOST + b"\r\n"),
    "tab": (400, b"GET\t/m/k HTTP/1.1\r\n" + HOST + b"\r\n"),
    "space in the target": (400, b"GET /m/k x HTTP/1.1\r\n" + HOST + b"\r\n"),
    "byte over 127 in the target": (400, b"GET /m/\xff HTTP/1.1\r\n" + HOST + b"\r\n"),
    "HTTP/0.9": (400, b"GET /m/k\r\n\r\n"),
    "HTTP/2.0": (505, b"GET /m/k HTTP/2.0\r\n" + HOST + b"\r\n"),
    "HTTP/2 preface": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "unknown method": (400, b"FOO /m/k HTTP/1.1\r\n" + HOST + b"\r\n"),
    "empty lines": (400, b"\r\n" * 3 + GET + HOST + b"\r\n"),
    "two Ranges": (400, GET + HOST + b"Range: bytes=0-1\r\nRange: bytes=2-3\r\n\r\n"),
    "two equal Ranges": (400, GET + HOST + b"Range: bytes=0-9\r\nRange: bytes=0-9\r\n\r\n"),
    "long target": (414, b"GET /m/" + b"a" * 8300 + b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    "endless target": (414, b"GET /m/" + b"a" * 9000),
    "long field": (431, GET + HOST + b"X: " + b"a" * 8200 + b"\r\n\r\n"),
    "many fields": (431, GET + HOST + b"X: y\r\n" * 100 + b"\r\n"),
    "large head": (431, GET + HOST + (b"X: " + b"a" * 4000 + b"\r\n") * 9 + b"\r\n"),
    "endless head": (431, GET + HOST + (b"X: " + b"a" * 4000 + b"\r\n") * 9),
}
"""Ambiguous or oversized heads: the status that refuses each, which ends the connection."""
UNFINISHED = {"TLS", "endless target", "endless head", "bare LF", "HTTP/2 preface"}
BODIES = (
    (400, b"GET /m/tracks/a.mp3 HTTP/1.1\r\nHost: a\r\nContent-Length: 39\r\n\r\n"),
    (400, b"GET /m/tracks/a.mp3 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"),
    (405, b"POST /m/tracks/a.mp3 HTTP/1.1\r\nHost: a\r\nContent-Length: 39\r\n\r\n"),
    (405, b"POST /m/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"),
)
"""Requests with a body: bytes behind the head are never read as a request."""
ALTERATIONS = (
    ("/m/tracks", "/m/%74racks"), ("a.mp3", "b.mp3"), ("?e=", "?&e="), ("?e=", "?e=0"),
    ("?e=", "?E="), ("&k=", "&&k="), ("&k=", ";k="), ("a=127.0.0.0/8", "a=127.0.0.0/08"),
    ("a=127.0.0.0/8", "a=0.0.0.0/0"), ("r=65536", "r=%36%35536"), ("r=65536", "r=+65536"),
    ("r=65536", "r=65537"), ("user=42,request=r7", "request=r7,user=42"), ("user=42", "user%3D42"),
    ("user=42", "user=43"), ("&s=", "&x=1&s="),
)  # fmt: skip
"""Changes of a signed URL: another meaning, or another spelling of the same."""
