"""Hosts of sellers for console tests: good photos and all kinds of faults.

The server has its own threads, as photos are also requested between two tests, while the event loop
of the tests is stopped.
"""

from __future__ import annotations

import hashlib
import io
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image, ImageDraw

ADDRESSES = ("127.0.0.1", "127.0.0.2")


@cache
def picture(name: str) -> bytes:
    """A JPEG with a unique pattern per name."""
    digest = hashlib.sha256(name.encode()).digest()
    image = Image.new("RGB", (320, 240), tuple(60 + part % 150 for part in digest[:3]))
    draw = ImageDraw.Draw(image)
    for index in range(6):
        x, y = digest[4 + index] * 320 // 256, digest[12 + index] * 240 // 256
        colour = tuple(digest[18 + (index + part) % 12] for part in range(3))
        draw.ellipse((x - 40, y - 40, x + 40, y + 40), fill=colour)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return out.getvalue()


class SellerHost:
    """Serves photos at `/photo/`, 404 at `/gone/`, HTML at `/page/`, a webhook at `/hook`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        handler, self.port = self._handler(), 0
        self._servers = []
        for address in ADDRESSES:
            self._servers.append(ThreadingHTTPServer((address, self.port), handler))
            self.port = self._servers[0].server_address[1]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def url(self, path: str, *, address: str = ADDRESSES[0]) -> str:
        """URL of `path`."""
        return f"http://{address}:{self.port}{path}"

    def close(self) -> None:
        """Stop the server."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body of a path."""
        if path.startswith("/photo/"):
            return 200, "image/jpeg", picture(path)
        if path.startswith("/page/"):
            return 200, "image/jpeg", b"<!doctype html><script>alert('hostile')</script>"
        if path in self.files:
            return 200, "text/csv", self.files[path]
        return 404, "text/plain", b"<script>alert('hostile')</script>"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        host = self

        class Handler(BaseHTTPRequestHandler):
            """Handler of one connection."""

            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say(*host.answer(self.path))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", "0")))
                self._say(200, "text/plain", b"")

            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def _say(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler
