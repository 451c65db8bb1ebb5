"""One worker process: accept clients and schedule them.

A private edge-triggered epoll holds all client sockets; its descriptor is a reader of the asyncio
loop. So serving costs as little as a plain epoll loop, and everything that waits for other systems,
such as the object store, uses async and await. It runs on any event loop.

A batch of events is one epoch of the cache, within which frames are looked up and sent. New
requests are served first, then up to QUEUED_MAX clients whose sockets have room again. Bounds:
`connections_max` clients (further ones get 503 or are closed), 1 MiB for each client and round, and
deadlines for every state. Running out of file descriptors pauses accepting.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from headrace.kernel.logs import logger
from headrace.media.cache.epochs import PLANE_CELLS
from headrace.media.cache.layout import parts_of_version, version_of
from headrace.media.cluster.cluster_config import is_reserved
from headrace.media.cluster.routing import Router
from headrace.media.errors import TooManyConnections
from headrace.media.header_rules import rule_for
from headrace.media.model import CONNECTIONS, Shape
from headrace.media.native import NativePlaneMissing, native_tls_missing
from headrace.media.worker.access_log import AccessLog
from headrace.media.worker.bodies import BlockBody, Body, FileBody
from headrace.media.worker.connection import Connection
from headrace.media.worker.native_library import PlaneEvent
from headrace.media.worker.native_plane import BODY, LATE, REFUSED, REQUEST, NativePlane
from headrace.media.worker.request_context import RequestContext
from headrace.media.worker.socket_io import Channel
from headrace.media.worker.timing import Exchange, samples
from headrace.media.worker.tls_io import ServerTls

log = logger(__name__)
EVENTS_MAX: Final = 512
QUEUED_MAX: Final = 64
"""Clients that continue their bodies before new requests are looked for: about 2 ms."""
ACCEPTS_MAX: Final = 64
REFUSED_MAX: Final = 64
ACCEPT_PAUSE_S: Final = 0.25
NOTSENT_BYTES: Final = 64 * 1024
"""A socket becomes writable when less than this is unsent (TCP_NOTSENT_LOWAT).

A small SO_SNDBUF instead would slow down answers by far.
"""
PLANE_LOOK_S: Final = 0.02
TICK_S: Final = 0.25
FILES_DESCRIBED_S: Final = 3600.0
_EDGES: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Node:
    """All clients of one process."""

    def __init__(
        self,
        context: RequestContext,
        listeners: Sequence[socket.socket],
        *,
        tls_listeners: Sequence[socket.socket] = (),
        ticket_seed: bytes,
        connections_max: int,
        worker: int = 0,
    ) -> None:
        self.config = context.config
        self.context = context
        self.is_stopping = False
        self.connections_max = connections_max
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._queue: deque[Connection] = deque()
        self._is_run_due = False
        self._samples = samples()
        self._listeners = {listener.fileno(): listener for listener in (*listeners, *tls_listeners)}
        self._tls = {listener.fileno() for listener in tls_listeners}
        self._server_tls: ServerTls | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._is_empty = asyncio.Event()
        self._plane_descriptors: set[int] = set()
        """Connections that belong to the native data plane, while they are answered here."""
        self.access_log = AccessLog(self.config) if self.config.access_log != "off" else None
        self._plane = self._make_plane(worker, ticket_seed)
        self._native_listeners = self._listeners_of_plane()
        self._described_for: object = None

    @property
    def connections_count(self) -> int:
        """The number of connected clients."""
        return len(self._connections) + (self._plane.connections_count if self._plane else 0)

    def _make_plane(self, worker: int, ticket_seed: bytes) -> NativePlane | None:
        own, folder = self.context.cache_source, self.context.folder
        is_possible = (own is not None and worker < PLANE_CELLS) or folder is not None
        if self.config.data_plane == "python" or not is_possible:
            return None
        try:
            plane = NativePlane(
                self.config,
                epochs=own.store.open_epochs(PLANE_CELLS + worker) if own is not None else None,
                folder=folder,
                access_log=self.access_log,
                ticket_seed=ticket_seed if self._tls else None,
                connections_max=self.connections_max,
                on_event=self._on_plane_event,
            )
        except (NativePlaneMissing, OSError) as error:
            log.warning("native_plane_not_used", error=str(error))
            return None
        if self.context.hop_gate is not None and self.context.hop_gate.guard is not None:
            plane.set_hop_keys(self.context.hop_gate.guard)
        return plane

    def _listeners_of_plane(self) -> set[int]:
        """Listeners whose clients the native data plane accepts."""
        if self._plane is None:
            return set()
        if not self._tls or not (why := native_tls_missing()):
            return set(self._listeners)
        log.warning("native_tls_not_used", reason=why)
        return set(self._listeners) - self._tls

    def start(self) -> None:
        """Start accepting. Raises: OSError if the certificate cannot be read."""
        if self._tls:
            is_native = self._plane is not None and self._native_listeners >= self._tls
            plane = self._plane if is_native else None
            self._server_tls = ServerTls(self.config, plane.set_certificate if plane else None)
        for descriptor, listener in self._listeners.items():
            listener.setblocking(False)
            if self._plane is not None and descriptor in self._native_listeners:
                self._plane.listen(listener, is_tls=descriptor in self._tls)
            else:
                self._epoll.register(descriptor, select.EPOLLIN)
        self._loop.add_reader(self._epoll.fileno(), self._on_events)
        if self._plane is not None:
            self._loop.add_reader(self._plane.event_fd, self._plane.handle_events)
            self._sync_plane(self._plane)
        self._tick()

    async def drain(self) -> None:
        """Stop accepting, close idle clients, and wait for answers up to `stop_timeout`."""
        self.is_stopping = True
        # Clients in the accept queue may have sent a request, and would be reset.
        for descriptor, listener in self._listeners.items():
            if descriptor not in self._native_listeners:
                self._accept(listener, is_tls=descriptor in self._tls)
        if self._plane is not None:
            self._plane.stop_listening()
        self._stop_listening()
        for connection in list(self._connections.values()):
            self._run_in_epoch(connection, connection.stop)
        try:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await self._wait_empty()
        except TimeoutError:
            log.warning("answers_cut_at_stop", connections=self.connections_count)

    async def _wait_empty(self) -> None:
        while True:
            if self._connections:
                self._is_empty.clear()
                await self._is_empty.wait()
            if self._plane is None or self._plane.is_idle():
                return
            # The plane counts its connections after each batch, and has no other notice.
            await asyncio.sleep(PLANE_LOOK_S)

    def close(self) -> None:
        """Cut remaining clients and release all resources."""
        self._stop_listening()
        for connection in list(self._connections.values()):
            connection.cut("stop")
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        if self._plane is not None:
            self._loop.remove_reader(self._plane.event_fd)
            self._plane.flush_counters()
            self._plane.close()
        if self.access_log is not None:
            self.access_log.close()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def now_s(self) -> float:
        return self._loop.time()

    def begin_exchange(self, began_s: float) -> Exchange:
        """The record of a new request."""
        return Exchange(
            began_s,
            now_s=self._loop.time,
            is_sampled=next(self._samples),
            traces=self.context.traces,
        )

    def watch(self, connection: Connection, delay_s: float) -> None:
        """Call `connection.expire` after `delay_s`, replacing an earlier deadline.

        Moving a deadline later, as each request does, costs nothing: an early timer is set again.
        """
        connection.deadline_s = self._loop.time() + delay_s
        if connection.timer is not None and connection.timer.when() > connection.deadline_s:
            connection.timer.cancel()
            connection.timer = None
        if connection.timer is None:
            self._set_timer(connection)

    def _set_timer(self, connection: Connection) -> None:
        at_s = connection.deadline_s
        connection.timer = self._loop.call_at(at_s, self._on_timer, connection)

    def _on_timer(self, connection: Connection) -> None:
        connection.timer = None
        if self._loop.time() < connection.deadline_s:
            self._set_timer(connection)
        else:
            self._run_in_epoch(connection, connection.expire)

    def resume_later(self, connection: Connection) -> None:
        """Continue `connection` after the other clients."""
        self._enqueue(connection)
        self._run_queue_soon()

    def resume_after(self, connection: Connection, delay_s: float) -> None:
        """Continue a rate-limited `connection` after `delay_s`."""
        self._loop.call_later(delay_s, self._run_in_epoch, connection, connection.end_pause)

    def resume(self, connection: Connection) -> None:
        """Continue `connection` now. Called by the loop, never inside an epoch."""
        self._run_in_epoch(connection, connection.advance)

    def forget(self, connection: Connection) -> None:
        """Remove a closing connection."""
        if self._connections.pop(connection.fd, None) is not None:
            CONNECTIONS.dec()
        if connection.fd in self._plane_descriptors:
            self._plane_descriptors.discard(connection.fd)
            if self._plane is not None and not connection.is_leaving:
                self._plane.note_closed()
        if connection.timer is not None:
            connection.timer.cancel()
        if not self._connections:
            self._is_empty.set()

    def note_answer(self, key: str, shape: Shape, *, is_hop: bool) -> None:
        """Let the native data plane answer the next requests for this object, if it may."""
        plane = self._plane
        if plane is None or plane.is_described(key, time.monotonic()):
            return
        if self.context.traces.is_on:
            return
        router = self.context.router
        # Clients never get tags, which other nodes request.
        is_for_peers = is_reserved(key) or (router is not None and not router.is_replica(key))
        if router is not None and is_for_peers and not is_hop:
            self._describe_of_peer(plane, router, key, shape)
            return
        described = self._description(key, shape)
        if described is not None:
            plane.describe(key, shape, *described, is_for_peers=is_for_peers, **self._of(key))

    def _describe_of_peer(self, plane: NativePlane, router: Router, key: str, shape: Shape) -> None:
        """Let the plane request an object from the node that keeps it."""
        found = router.description(key, shape)
        if found is None:
            return
        generation, expires_s, peer = found
        number = plane.peers.number(peer)
        if number:
            version = version_of(shape, generation)
            plane.describe(key, shape, version, expires_s, peer=number, **self._of(key))

    def _of(self, key: str) -> dict[str, Any]:
        """The lines of settings in a description of `key`."""
        rule = rule_for(self.config.headers, key)
        return {"cors": self.context.cors.lines({}), "rule": rule}

    def _description(self, key: str, shape: Shape) -> tuple[str, float] | None:
        """The version of an object and the end of its description, if it is kept here."""
        own = self.context.cache_source
        if own is not None:
            return own.store.description(key, shape)
        # The plane compares each file that it opens with this version.
        return version_of(shape, 0), time.monotonic() + FILES_DESCRIBED_S

    def give_back(self, connection: Connection) -> bool:
        """Return an idle connection to the native data plane. Return whether it came from there."""
        if self._plane is None or connection.fd not in self._plane_descriptors:
            return False
        self._epoll.unregister(connection.fd)
        self._plane.adopt(*connection.leave())
        return True

    def _on_plane_event(self, event: PlaneEvent) -> None:
        assert self._plane is not None, "it sent the event"
        try:
            channel = self._plane.channel(event)
        except OSError:
            os.close(event.fd)
            if self.access_log is not None and event.entry:
                self.access_log.end_native(event.entry, 0)
            return
        connection = Connection(channel, self)
        self._plane_descriptors.add(event.fd)
        self._connections[event.fd] = connection
        CONNECTIONS.inc()
        self._epoll.register(event.fd, _EDGES)
        self._run_in_epoch(connection, partial(self._take_over, connection, event))

    def _take_over(self, connection: Connection, event: PlaneEvent) -> None:
        if self._plane is not None:
            self._sync_plane(self._plane)
        if event.kind == REFUSED:
            text = f"this node is at its limit of {self.connections_max} clients: try again later"
            connection.refuse(TooManyConnections(text, retry_after_s=1))
        else:
            connection.take_over(event, self._rest_of(event, connection))
        if event.kind == LATE:
            connection.expire()
        elif self.is_stopping and event.kind == REQUEST and not event.data_bytes:
            connection.stop()
        else:
            connection.advance()

    def _rest_of(self, event: PlaneEvent, connection: Connection) -> Body | None:
        """The rest of a body that the plane began, of the same version; None: it began none."""
        if event.kind != BODY:
            return None
        key = event.key.decode()
        if self._plane is not None:
            # It may have been replaced: the next answer describes it again.
            self._plane.forget_object(key)
        wake = partial(self.resume, connection)
        own = self.context.cache_source
        if own is None:
            return FileBody(
                event.file, event.start, event.left, readers=self.context.readers, wake=wake
            )
        router = self.context.router
        return BlockBody(
            router.peer_source if event.peer and router is not None else own,
            key,
            Shape(*parts_of_version(event.version.decode()), 0, is_immutable=False),
            start=event.start,
            length_bytes=event.left,
            wake=wake,
        )

    def _sync_plane(self, plane: NativePlane) -> None:
        """Pass on what changed: disks, keys, and what makes descriptions invalid."""
        own = self.context.cache_source
        disks = own.store.disks_for_plane() if own is not None else None
        if disks is not None and disks.revision != plane.revision:
            plane.set_disks(disks)
        router = self.context.router
        if router is not None and plane.peers.drop_unused(router.is_trusted):
            plane.forget_objects()
        state = (
            # Another table after every change of the members.
            (router.table, router.copied, router.usable_names()) if router is not None else None,
            self.context.purges_version,
            self.context.traces.is_on,
        )
        if state != self._described_for:
            self._described_for = state
            plane.forget_objects()
        plane.set_keys(self.context.url_keys())

    def _run_in_epoch(self, connection: Connection, step: Callable[[], None]) -> None:
        with self.context.epoch:
            self._guard(connection, step)

    def _guard(self, connection: Connection, step: Callable[[], None]) -> None:
        """Run `step`; an unexpected error ends this client only."""
        try:
            step()
        except Exception:
            log.exception("connection_failed")
            connection.cut("source")

    def _on_events(self) -> None:
        accepts: list[int] = []
        with self.context.epoch:
            for descriptor, mask in self._epoll.poll(0, EVENTS_MAX):
                connection = self._connections.get(descriptor)
                if connection is None:
                    accepts.append(descriptor)
                elif mask == select.EPOLLOUT:
                    # Thousands of slow clients that read at once would delay new requests.
                    self._enqueue(connection)
                else:
                    self._guard(connection, partial(connection.on_event, mask))
            self._advance_queued()
        self._run_queue_soon()
        # Last, so that a descriptor closed above is not reused while its old events are handled.
        for descriptor in accepts:
            if descriptor in self._listeners:
                self._accept(self._listeners[descriptor], is_tls=descriptor in self._tls)

    def _accept(self, listener: socket.socket, *, is_tls: bool) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                client, _address = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                self._pause_accepting(listener, error)
                return
            self._welcome(client, is_tls=is_tls)

    def _welcome(self, client: socket.socket, *, is_tls: bool) -> None:
        held = len(self._connections)
        if held >= self.connections_max + REFUSED_MAX:
            client.close()
            return
        try:
            channel = self._channel(client, is_tls=is_tls)
        except OSError:
            # Disconnected already.
            client.close()
            return
        connection = Connection(channel, self)
        self._connections[connection.fd] = connection
        CONNECTIONS.inc()
        if held >= self.connections_max:
            text = f"this node is at its limit of {self.connections_max} clients: try again later"
            connection.refuse(TooManyConnections(text, retry_after_s=1))
        self._epoll.register(connection.fd, _EDGES)

    def _channel(self, client: socket.socket, *, is_tls: bool) -> Channel:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES)
        # Also limits bytes left to the kernel after the answer.
        unheard_ms = int(self.config.send_timeout_s * 1000)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, unheard_ms))
        if not is_tls:
            return Channel(client)
        assert self._server_tls is not None, "start loaded the certificate"
        return self._server_tls.wrap(client)

    def _pause_accepting(self, listener: socket.socket, error: OSError) -> None:
        log.warning("accepting_paused", error=str(error), connections=len(self._connections))
        self._epoll.unregister(listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting, listener)

    def _resume_accepting(self, listener: socket.socket) -> None:
        if listener.fileno() in self._listeners:
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    def _stop_listening(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._listeners = {}

    def _run_queue(self) -> None:
        self._is_run_due = False
        with self.context.epoch:
            self._advance_queued()
        self._run_queue_soon()

    def _enqueue(self, connection: Connection) -> None:
        if not connection.is_queued:
            connection.is_queued = True
            self._queue.append(connection)

    def _advance_queued(self) -> None:
        for _ in range(min(len(self._queue), QUEUED_MAX)):
            connection = self._queue.popleft()
            connection.is_queued = False
            self._guard(connection, connection.advance)

    def _run_queue_soon(self) -> None:
        # Once only, or one fast client could occupy the loop.
        if self._queue and not self._is_run_due:
            self._is_run_due = True
            self._loop.call_soon(self._run_queue)

    def _tick(self) -> None:
        if self._plane is not None:
            self._plane.flush_counters()
            with self.context.epoch:
                self._sync_plane(self._plane)
        if self._server_tls is not None:
            self._server_tls.renew(self._loop.time())
        self._tick_handle = self._loop.call_later(TICK_S, self._tick)
