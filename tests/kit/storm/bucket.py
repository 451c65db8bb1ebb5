"""An S3 bucket in this process, for nodes that read it: ranges, conditions, conditional puts.

It counts requests and can go away. Its server runs in the test's loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from contextlib import suppress
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit

NAME = "m"
MODIFIED = formatdate(1_700_000_000, usegmt=True)
ERROR = b"<Error><Code>SlowDown</Code></Error>"
Answer = tuple[int, dict[str, str], bytes]


class Bucket:
    """Objects by key, `reads` by (key, first byte), `heads` and the last `fields` by key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads: Counter[tuple[str, int]] = Counter()
        self.heads: Counter[str] = Counter()
        self.fields: dict[str, dict[str, str]] = {}
        self.port = 0
        self.error_status: int | None = None
        """The answer to every request, while the store fails."""
        self.endpoint: str | None = None
        """The address of a proxy before it; None: its own."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that uses this bucket."""
        return {
            "HEADRACE_BLOBS_URL": f"s3://{NAME}",
            "AWS_ENDPOINT": self.endpoint or f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_REGION": "here",
        }

    async def start(self) -> None:
        """Serve, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and drop open ones."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.rstrip().split("\r\n")
                method, target, _ = first.split(" ")
                pairs = (line.split(":", 1) for line in lines)
                fields = {name.lower(): value.strip() for name, value in pairs}
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                if self.error_status is None:
                    status, answer, data = self._answer(method, target, fields, body)
                else:
                    status, answer, data = self.error_status, {"Retry-After": "0"}, ERROR
                answer = {"Content-Length": str(len(data)), **answer}
                text = "".join(f"{name}: {value}\r\n" for name, value in answer.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{text}\r\n".encode() + data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    def _answer(self, method: str, target: str, fields: dict[str, str], body: bytes) -> Answer:
        parts = urlsplit(target)
        key = unquote(parts.path).removeprefix(f"/{NAME}").removeprefix("/")
        if method == "GET" and not key:
            return 200, {}, self._listed(parse_qs(parts.query).get("prefix", [""])[0])
        if method == "POST" and not key:
            return 200, {}, self._deleted(re.findall("<Key>(.*?)</Key>", body.decode()))
        data = self.objects.get(key)
        if _is_prevented(data, fields):
            is_read = method != "PUT" and "if-none-match" in fields
            return (304 if is_read else 412), {"ETag": etag_of(data or b"")}, b""
        if method == "PUT":
            self.objects[key] = body
            return 200, {"ETag": etag_of(body)}, b""
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, {}, b""
        return (404, {}, b"") if data is None else self._read(method, key, data, fields)

    def _read(self, method: str, key: str, data: bytes, fields: dict[str, str]) -> Answer:
        self.fields[key] = fields
        answer = {"ETag": etag_of(data), "Last-Modified": MODIFIED}
        if method == "HEAD":
            self.heads[key] += 1
            return 200, {**answer, "Content-Length": str(len(data))}, b""
        if "range" not in fields:
            return 200, answer, data
        start, _, last = fields["range"].removeprefix("bytes=").partition("-")
        part = data[int(start) : int(last) + 1]
        self.reads[key, int(start)] += 1
        span = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
        return 206, {**answer, "Content-Range": span}, part

    def _deleted(self, keys: list[str]) -> bytes:
        for key in keys:
            self.objects.pop(key, None)
        rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return f"<DeleteResult>{rows}</DeleteResult>".encode()

    def _listed(self, prefix: str) -> bytes:
        rows = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
            f"<ETag>{etag_of(data)}</ETag><Size>{len(data)}</Size></Contents>"
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><Name>{NAME}</Name>{rows}</ListBucketResult>".encode()


def _is_prevented(data: bytes | None, fields: dict[str, str]) -> bool:
    """Whether If-Match or If-None-Match forbids the request."""
    etag = None if data is None else etag_of(data).strip('"')
    wanted, unwanted = fields.get("if-match"), fields.get("if-none-match")
    if wanted is not None and (etag is None or wanted.strip('"') != etag):
        return True
    return unwanted is not None and etag is not None and unwanted.strip('"') in ("*", etag)


def etag_of(data: bytes) -> str:
    """The ETag of an S3 object that was put at once."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
