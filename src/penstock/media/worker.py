"""The node: listens, accepts, and gives each client its turns.

One private edge-triggered epoll holds every client's socket; its own descriptor is a reader of the
asyncio loop. So the data plane costs what a bare epoll costs (22,400 answers of 256 KiB a second on one
core, nginx 22,300; asyncio's own callbacks 21,300) while everything that waits for other things, such as
an object store, is written with async and await (research of 2026-11-21). It runs on any event loop.

Bounds: `connections_max` clients (one more is answered 503, a few more are closed), one turn of 1 MiB a
client, deadlines for every state. Running out of file descriptors pauses accepting; it ends nothing.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from penstock.kernel.logs import logger
from penstock.media.connection import Connection
from penstock.media.deadlines import BUCKET_S, Deadlines
from penstock.media.model import CONNECTIONS, ListenFailed, TooManyConnections
from penstock.media.service import Media

log = logger(__name__)
EVENTS_MAX: Final = 256
ACCEPTS_MAX: Final = 64
REFUSED_MAX: Final = 64
ACCEPT_PAUSE_S: Final = 0.25
READERS: Final = 4
FILES_KEPT_BACK: Final = 128
"""Descriptors for everything but clients: engines, logs, files being made."""
_EDGES: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


async def serve(media: Media, stop: asyncio.Event, on_ready: Callable[[str, int], None]) -> None:
    """Serve `GET /m/{key}` until `stop`; then let answers under way end, for `stop_timeout`.

    `on_ready` gets the address once clients can connect. Raises: ListenFailed.
    """
    node = Node(media)
    try:
        on_ready(*node.listen())
        await stop.wait()
        await node.drain()
    finally:
        node.close()


class Node:
    """All clients of one process."""

    def __init__(self, media: Media) -> None:
        self.config = media.config
        self.blobs = media.blobs
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="media-read")
        self.is_stopping = False
        self.connections_max = allowed_connections(self.config.connections_max)
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._deadlines: Deadlines[Connection] = Deadlines()
        self._queue: deque[Connection] = deque()
        self._listener: socket.socket | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._is_empty = asyncio.Event()

    def listen(self) -> tuple[str, int]:
        """Begin to accept; the address and port in use. Raises: ListenFailed."""
        host, port = self.config.listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise ListenFailed(
                f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): choose another media.listen"
            ) from error
        listener.setblocking(False)
        self._listener = listener
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._loop.add_reader(self._epoll.fileno(), self._on_events)
        self._tick()
        address = listener.getsockname()
        return address[0], address[1]

    async def drain(self) -> None:
        """Accept no more, close idle clients, wait for answers under way up to `stop_timeout`."""
        self.is_stopping = True
        self._stop_listening()
        for connection in list(self._connections.values()):
            connection.stop()
        if self._connections:
            self._is_empty.clear()
            try:
                async with asyncio.timeout(self.config.stop_timeout_s):
                    await self._is_empty.wait()
            except TimeoutError:
                log.warning("answers_cut_at_stop", connections=len(self._connections))

    def close(self) -> None:
        """Cut what is left and give everything back."""
        self._stop_listening()
        for connection in list(self._connections.values()):
            connection.cut("stop")
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self.readers.shutdown(wait=False)

    def now_s(self) -> float:
        return self._loop.time()

    def watch(self, connection: Connection, delay_s: float) -> None:
        """Call `connection.expire` after `delay_s`, instead of at any earlier wish."""
        self._deadlines.watch(connection, self._loop.time() + delay_s)

    def take_turn_later(self, connection: Connection) -> None:
        """Let `connection` go on after the others had their turn."""
        if connection.is_queued:
            return
        connection.is_queued = True
        if not self._queue:
            self._loop.call_soon(self._run_queue)
        self._queue.append(connection)

    def forget(self, connection: Connection) -> None:
        """`connection` is closing."""
        if self._connections.pop(connection.fd, None) is not None:
            CONNECTIONS.dec()
        self._deadlines.forget(connection)
        if not self._connections:
            self._is_empty.set()

    def guard(self, connection: Connection, step: Callable[[], None]) -> None:
        """Run `step`; a fault of ours ends this one client, not the node."""
        try:
            step()
        except Exception:
            log.exception("connection_failed")
            connection.cut("source")

    def _on_events(self) -> None:
        accepts = False
        for descriptor, mask in self._epoll.poll(0, EVENTS_MAX):
            connection = self._connections.get(descriptor)
            if connection is None:
                accepts = True
                continue
            self.guard(connection, partial(connection.on_event, mask))
        # Last, so that a number freed above cannot be a new client's while its old events are handled.
        if accepts and self._listener is not None:
            self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                client, _address = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                self._pause_accepting(error)
                return
            self._welcome(client)

    def _welcome(self, client: socket.socket) -> None:
        held = len(self._connections)
        if held >= self.connections_max + REFUSED_MAX:
            client.close()
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Also for bytes that are left to the kernel after the answer: they must not outlive the client.
        unheard_ms = int(self.config.send_timeout_s * 1000)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, unheard_ms))
        connection = Connection(client, self)
        self._connections[connection.fd] = connection
        CONNECTIONS.inc()
        if held >= self.connections_max:
            text = f"this node holds its {self.connections_max} clients: try again or another node"
            connection.refuse(TooManyConnections(text, retry_after_s=1))
        self._epoll.register(connection.fd, _EDGES)

    def _pause_accepting(self, error: OSError) -> None:
        log.warning("accepting_paused", error=str(error), connections=len(self._connections))
        listener = self._listener
        assert listener is not None
        self._epoll.unregister(listener.fileno())

        def resume() -> None:
            if self._listener is listener:
                self._epoll.register(listener.fileno(), select.EPOLLIN)

        self._loop.call_later(ACCEPT_PAUSE_S, resume)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _run_queue(self) -> None:
        for _ in range(len(self._queue)):
            connection = self._queue.popleft()
            connection.is_queued = False
            self.guard(connection, connection.advance)
        if self._queue:
            self._loop.call_soon(self._run_queue)

    def _tick(self) -> None:
        for connection in self._deadlines.take_due(self._loop.time()):
            self.guard(connection, connection.expire)
        self._tick_handle = self._loop.call_later(BUCKET_S, self._tick)


def allowed_connections(wished: int) -> int:
    """`wished`, or what the limit of open files allows: a client takes a socket and a file."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(16, (files_max - FILES_KEPT_BACK) // 2)
    if files_max != resource.RLIM_INFINITY and allowed < wished:
        log.warning("connections_limited", wished=wished, allowed=allowed, files_max=files_max)
        return allowed
    return wished
