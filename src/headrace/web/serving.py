"""Serving the API in this process: listening, and the end of its connections.

A stop closes idle connections at once. Requests that are still open after `web.graceful_stop` are
canceled.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any, Final

from headrace.web.connection import Connection, Shared
from headrace.web.model import AddressInUse, AddressRefused, Application, WebConfig
from headrace.web.server import Pages, create_layers

BACKLOG: Final = 2048
CANCELED_S: Final = 1.0
"""Time for canceled requests to be answered."""
LOOK_EVERY_S: Final = 0.01


async def run_api(
    app: Application,
    stop: asyncio.Event,
    on_ready: Callable[[str, int], None],
    pages: Pages | None = None,
) -> None:
    """Serve until `stop`; call `on_ready(host, port)` once connections are accepted.

    Raises: AddressInUse, AddressRefused.
    """
    config = app.config.section(WebConfig)
    listener = bind(config.listen)
    try:
        host, port = listener.getsockname()[:2]
        shared = Shared(*create_layers(app, pages), config)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(shared), sock=listener, backlog=BACKLOG
        )
        on_ready(host, port)
        await stop.wait()
        shared.is_draining = True
        server.close()
        await _end(shared, graceful_s=config.graceful_stop_s)
    finally:
        listener.close()


async def _end(shared: Shared, *, graceful_s: float) -> None:
    """Close idle connections, wait for the others, then cancel their requests."""
    _each(shared, Connection.drain)
    await _wait_closed(shared, graceful_s)
    _each(shared, Connection.cancel)
    await _wait_closed(shared, CANCELED_S)
    _each(shared, Connection.abort)


async def _wait_closed(shared: Shared, limit_s: float) -> None:
    """Wait until no connection is open, at most `limit_s`."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + limit_s
    while shared.open and loop.time() < ends_s:  # noqa: ASYNC110 - many connections, one wait
        await asyncio.sleep(LOOK_EVERY_S)


def _each(shared: Shared, act: Callable[[Connection], Any]) -> None:
    for connection in list(shared.open):
        act(connection)


def bind(listen: tuple[str, int]) -> socket.socket:
    """A listening socket. Raises: AddressInUse, AddressRefused."""
    host, port = listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{where} is in use by another program: stop it, or set web.listen"
                " (HEADRACE_WEB_LISTEN) to another address; port 0 selects a free port"
            ) from error
        raise AddressRefused(
            f"cannot listen at {where} ({error.strerror}): set web.listen (HEADRACE_WEB_LISTEN)"
            " to an address of this machine and a permitted port"
        ) from error
    # Connections inherit the option. asyncio sets it only if a socket names its protocol. Without
    # it a body waits for the acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
