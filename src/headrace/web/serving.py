"""Serving the API in this process: listening, and the end of its connections.

A stop closes idle connections at once. A drain, for a process that another one replaces, leaves
them open until their next request, whose response closes the connection: a client that sends a
request while the server closes its connection would get no answer. Both end after
`web.graceful_stop`, when the requests that are still open are canceled.
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
    *,
    listener: socket.socket | None = None,
    drain: asyncio.Event | None = None,
) -> None:
    """Serve until `stop` or `drain`; call `on_ready(host, port)` once connections are accepted.

    Without a `listener`, it listens at `web.listen`. Raises: AddressInUse, AddressRefused.
    """
    config = app.config.section(WebConfig)
    [listener] = [listener] if listener is not None else bind(config.listen)
    try:
        host, port = listener.getsockname()[:2]
        shared = Shared(*create_layers(app, pages), config)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(shared), sock=listener, backlog=BACKLOG
        )
        on_ready(host, port)
        is_stop = await _wait_first(stop, drain or asyncio.Event())
        shared.is_draining = True
        server.close()
        await _end(shared, stop, closes_idle=is_stop, graceful_s=config.graceful_stop_s)
    finally:
        listener.close()


async def _wait_first(stop: asyncio.Event, drain: asyncio.Event) -> bool:
    """Wait for one of them; return whether it was `stop`."""
    waits = [asyncio.create_task(one.wait()) for one in (stop, drain)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return stop.is_set()


async def _end(
    shared: Shared, stop: asyncio.Event, *, closes_idle: bool, graceful_s: float
) -> None:
    """Wait for the connections, then end the rest; a stop while draining closes idle ones."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + graceful_s
    _each(shared, lambda one: one.drain(closes_idle=closes_idle))
    # At the end of a process, looking is simpler than an event that every connection sets.
    while shared.open and loop.time() < ends_s:
        if stop.is_set() and not closes_idle:
            closes_idle = True
            _each(shared, lambda one: one.drain(closes_idle=True))
        await asyncio.sleep(LOOK_EVERY_S)
    _each(shared, Connection.cancel)
    ends_s = loop.time() + CANCELED_S
    while shared.open and loop.time() < ends_s:  # noqa: ASYNC110 - as above
        await asyncio.sleep(LOOK_EVERY_S)
    _each(shared, Connection.abort)


def _each(shared: Shared, act: Callable[[Connection], Any]) -> None:
    for connection in list(shared.open):
        act(connection)


def bind(listen: tuple[str, int], count: int = 1) -> list[socket.socket]:
    """`count` listening sockets of one address. Raises: AddressInUse, AddressRefused.

    Several share the port by SO_REUSEPORT: the kernel distributes new connections among them.
    """
    host, port = listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: list[socket.socket] = []
    try:
        if count > 1 and port:
            # SO_REUSEPORT would share the port with another server of the same user.
            socket.create_server((host, port), family=family).close()
        for _ in range(count):
            one = socket.create_server(
                (host, port), family=family, backlog=BACKLOG, reuse_port=count > 1
            )
            # Connections inherit the option. asyncio sets it only if a socket names its protocol.
            # Without it a body waits for the acknowledgement of its head.
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.append(one)
            port = one.getsockname()[1]
    except OSError as error:
        for one in found:
            one.close()
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
    return found
