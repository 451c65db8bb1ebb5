"""The listener of a role for probes and Prometheus: `GET /healthz` and `GET /metrics`.

`headrace api` serves the series of its own machine only. Roles on other machines, such as agents,
serve theirs at `data.metrics_listen`, without a token: the address belongs into a private network.
All roles of a data folder share the port by SO_REUSEPORT, and each serves the series of all, so
one setting fits a machine with several roles. The event loop of the role answers: `/healthz` fails
while it is blocked.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST

from headrace.kernel.errors import Conflict
from headrace.kernel.metrics import merged_metrics

HEAD_BYTES_MAX: Final = 8192
CLIENT_S: Final = 10.0
"""Time limit of one request with its response."""
CLIENTS_MAX: Final = 32


class MetricsListenFailed(Conflict):
    """A role cannot listen at `data.metrics_listen`."""

    code = "cli.metrics_listen_failed"


async def serve_metrics(listen: tuple[str, int], folder: Path) -> asyncio.Server:
    """Serve the series of the snapshots in `folder`. Raises: MetricsListenFailed."""
    host, port = listen
    clients = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        try:
            # A client that sends too much, too slowly or nothing is disconnected.
            with suppress(OSError, ValueError, EOFError, asyncio.LimitOverrunError):
                if clients <= CLIENTS_MAX:
                    async with asyncio.timeout(CLIENT_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(await _response(head, folder))
                        await writer.drain()
        finally:
            clients -= 1
            writer.close()

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, reuse_port=True)
    except OSError as error:
        raise MetricsListenFailed(
            f"cannot listen at {host}:{port} ({error.strerror}): set data.metrics_listen"
            " (HEADRACE_DATA_METRICS_LISTEN) to an address of this machine and a free port"
        ) from error
    return await asyncio.start_server(serve, sock=listener, limit=HEAD_BYTES_MAX)


async def _response(head: bytes, folder: Path) -> bytes:
    """The response to one request, with all its bytes."""
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    status, kind, body = "404 Not Found", "text/plain", b"/metrics and /healthz are here\n"
    if method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", b"GET and HEAD are allowed\n"
    elif path == b"/healthz":
        status, body = "200 OK", b"ok\n"
    elif path == b"/metrics":
        status, kind = "200 OK", CONTENT_TYPE_LATEST
        body = await asyncio.to_thread(merged_metrics, folder, None)
    fields = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + (b"" if method == b"HEAD" else body)
