"""The sellers' HTTP hosts: one process, an address a shop, real photos, a log of all requests.

    python -m examples.bazaar.origins --port 8300 --log origins.log --shops 50

The first part of a path selects the behavior of the host:

    ok      answers at once                     slow    answers after 0.4 to 1.2 s
    hang    is silent for 3 s the first time and closes, then answers
    gone    404                                 page    200 with an HTML page instead of a photo
    flaky   503 the first time, then answers    moved   redirects to the photo under /ok/
    trap    redirects to an address that no fetcher may ever ask

Photos carry an ETag and If-None-Match is answered with 304. The log has one JSON line an answer;
`whole` is true when the body was written to the end. Prints one line when it listens, ends on
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import hashlib
import json
import signal
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from examples.bazaar.pictures import Album
from examples.bazaar.shops import SHOPS_COUNT, Shop, shops

HANG_S: Final = 3.0
HANGING: Final = "hanging.json"
"""Beside the log: hosts that are silent for now, each with the end of that, in Unix time."""
PORT_TAKEN: Final = 48
"""The exit code where somebody else listens on the port of one of the addresses."""
FORBIDDEN: Final = "http://169.254.169.254/latest/meta-data/"
_HEAD_BYTES_MAX: Final = 16 * 1024
_IDLE_S: Final = 60.0
_REASONS: Final = {
    200: "OK",
    302: "Found",
    304: "Not Modified",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the host does with one request; status 0 hangs up without a word."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    delay_s: float = 0.0


_TEXT: Final = ("Content-Type", "text/plain")
_BUSY: Final = Answer(503, b"busy\n", (_TEXT, ("Retry-After", "1")))
_GONE: Final = Answer(404, b"no such photo\n", (_TEXT,))
_PAGE: Final = Answer(200, b"<!doctype html><p>Sign in first.\n", (("Content-Type", "text/html"),))


def decide(album: Album, path: str, *, asked_before: int, known_etag: str | None) -> Answer:
    """The response of the host to `path` after `asked_before` requests."""
    _, kind, *_, name = path.split("/") if path.count("/") > 1 else ("", "", "")
    if asked_before == 0 and kind in ("hang", "flaky"):
        return Answer(0, delay_s=HANG_S) if kind == "hang" else _BUSY
    if kind in ("moved", "trap"):
        target = f"/ok/{name}" if kind == "moved" else FORBIDDEN
        return Answer(302, headers=(("Location", target),))
    if kind not in ("ok", "slow", "hang", "flaky"):
        return _PAGE if kind == "page" else _GONE
    # Content follows from the name alone, so the name's hash is a right strong ETag.
    etag = f'"{hashlib.sha256(name.encode()).hexdigest()[:20]}"'
    delay_s = 0.4 + zlib.crc32(name.encode()) % 800 / 1000 if kind == "slow" else 0.0
    if known_etag == etag:
        return Answer(304, headers=(("ETag", etag),), delay_s=delay_s)
    mime = "image/png" if name.endswith(".png") else "image/jpeg"
    headers = (("Content-Type", mime), ("ETag", etag), ("Cache-Control", "max-age=3600"))
    return Answer(200, album.photo(name), headers, delay_s)


class Host:
    """One shop's server. All hosts write to one log."""

    def __init__(self, shop: Shop, album: Album, log: TextIO, hanging: Path) -> None:
        self._shop, self._album, self._log, self._hanging = shop, album, log, hanging
        self._asked: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(writer.close)
                while await self._serve_one(reader, writer):
                    pass
        except (
            ConnectionError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            TimeoutError,
        ):
            return  # the client went away, or is none: the log has what it was given

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _IDLE_S)
        method, path, headers = parse_head(head)
        asked_before = self._asked[path]
        self._asked[path] += 1
        if not path.startswith("/"):
            answer = Answer(400)
        elif method not in ("GET", "HEAD"):
            answer = Answer(405, headers=(("Allow", "GET, HEAD"),))
        else:
            known = headers.get("if-none-match")
            answer = decide(self._album, path, asked_before=asked_before, known_etag=known)
        whole = False
        if (hangs_s := self._hangs_s()) > 0:
            answer = Answer(0, delay_s=hangs_s)
        try:
            await asyncio.sleep(answer.delay_s)
            if answer.status:
                writer.write(encode(answer, with_body=method != "HEAD"))
                await writer.drain()
                whole = True
        finally:
            self._note(path, answer, whole=whole)
        return (
            answer.status >= 200 and answer.status != 400 and headers.get("connection") != "close"
        )

    def _hangs_s(self) -> float:
        """How much longer this host is silent, as the page `/break` requested."""
        try:
            until = json.loads(self._hanging.read_bytes()).get(self._shop.name, 0.0)
        except (OSError, ValueError):
            return 0.0
        return float(until) - time.time()

    def _note(self, path: str, answer: Answer, *, whole: bool) -> None:
        line = {
            "at": round(time.time(), 3),
            "shop": self._shop.name,
            "path": path,
            "status": answer.status,
            "bytes": len(answer.body),
            "whole": whole,
        }
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()


def parse_head(head: bytes) -> tuple[str, str, Mapping[str, str]]:
    """Method, path without its query, and headers by lower-case name."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.rpartition(" ")[0].partition("?")[0]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


def encode(answer: Answer, *, with_body: bool) -> bytes:
    """The answer as it goes over the wire."""
    lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}"]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    if answer.status != 304:
        lines.append(f"Content-Length: {len(answer.body)}")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + answer.body if with_body else head


async def run(*, port: int, log_file: Path, shops_count: int, pictures: Path | None) -> None:
    """Serve all shops on `port` of their addresses until SIGTERM or Ctrl-C."""
    sockets = [socket.create_server((shop.address, port)) for shop in shops(shops_count)]
    album = Album(pictures)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        log = stack.enter_context(log_file.open("a", encoding="utf-8"))
        for shop, listening in zip(shops(shops_count), sockets, strict=True):
            host = Host(shop, album, log, log_file.with_name(HANGING))
            server = await asyncio.start_server(host.serve, sock=listening, limit=_HEAD_BYTES_MAX)
            stack.callback(server.close)
        print(json.dumps({"ready": True, "shops": shops_count, "port": port}), flush=True)
        await stop.wait()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description="The HTTP hosts of the demo's sellers.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--shops", type=int, default=SHOPS_COUNT)
    parser.add_argument("--pictures", type=Path, help="where drawn pictures are kept")
    given = parser.parse_args()
    world = {"port": given.port, "log_file": given.log, "shops_count": given.shops}
    try:
        asyncio.run(run(**world, pictures=given.pictures))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        sys.exit(PORT_TAKEN)


if __name__ == "__main__":
    main()
