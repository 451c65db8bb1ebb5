"""Only watched requests pass their trace tag to a remote object store."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.engines.blobs import Blobs
from headrace.kernel.logs import onward
from headrace.media.tracing import TraceTag, onward_fields, read_trace

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HEAD = (
    'HTTP/1.1 {status}\r\nContent-Length: 3\r\nETag: "x"\r\n{more}'
    "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n"
)


class Origin:
    """A store of one object, `abc`, that records its requests."""

    def __init__(self) -> None:
        self.heads: list[dict[str, str]] = []

    async def serve(self, reader, writer) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.rstrip().split("\r\n")
                self.heads.append(dict(line.lower().split(": ", 1) for line in lines))
                is_head = first.startswith("HEAD")
                more = "" if is_head else "Content-Range: bytes 0-2/3\r\n"
                status = "200 OK" if is_head else "206 Partial Content"
                writer.write(HEAD.format(status=status, more=more).encode())
                writer.write(b"" if is_head else b"abc")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def running(origin: Origin):
    server = await asyncio.start_server(origin.serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.fixture
async def origin(monkeypatch):
    for name, value in {
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    found = Origin()
    async with running(found) as port:
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{port}")
        yield found


async def read(blobs: Blobs, fields=()) -> None:
    """In its own task, as a request is."""

    async def ask() -> None:
        onward.set(fields)
        assert await blobs.read_range("a.mp3", 0, 3) == b"abc"
        assert (await blobs.read_part("a.mp3", 0, 3))[1] == b"abc"
        assert (await blobs.info("a.mp3")).size_bytes == 3

    await asyncio.create_task(ask())


async def test_an_origin_is_told_whom_a_watched_read_is_for(origin):
    tag = TraceTag(PARENT, "42", "r7", "a.mp3")
    blobs = Blobs("s3://m")
    await read(blobs, onward_fields(tag))
    assert len(origin.heads) == 3
    for head in origin.heads:
        there = read_trace(head, "a.mp3")
        assert (there.trace, there.user, there.request) == (tag.trace, "42", "r7")
        # Part of the signature, so that no proxy can change it.
        assert "baggage;" in head["authorization"]


async def test_no_other_read_tells_anything(origin):
    blobs = Blobs("s3://m")
    await read(blobs)
    await read(blobs, onward_fields(TraceTag(PARENT, "42", None, "a.mp3")))
    await read(blobs)
    told = ["traceparent" in head or "baggage" in head for head in origin.heads]
    assert told == [False] * 3 + [True] * 3 + [False] * 3


async def test_a_folder_is_read_as_ever(blobs):
    await blobs.put("a.mp3", b"abc")
    await read(blobs, onward_fields(TraceTag(PARENT, "42", None, "a.mp3")))
