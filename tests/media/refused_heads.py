"""Ambiguous or oversized heads, with the status that refuses each."""

from __future__ import annotations

HOST = b"Host: a\r\n"
GET = b"GET /m/k HTTP/1.1\r\n"

REFUSED = {
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
    "long target": (414, b"GET /m/" + b"a" * 8300 + b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    "endless target": (414, b"GET /m/" + b"a" * 9000),
    "long field": (431, GET + HOST + b"X: " + b"a" * 8200 + b"\r\n\r\n"),
    "many fields": (431, GET + HOST + b"X: y\r\n" * 100 + b"\r\n"),
    "large head": (431, GET + HOST + (b"X: " + b"a" * 4000 + b"\r\n") * 9 + b"\r\n"),
    "endless head": (431, GET + HOST + (b"X: " + b"a" * 4000 + b"\r\n") * 9),
}
