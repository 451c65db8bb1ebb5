"""Connections between simulated clients and nodes: two streams of bytes in order.

A lost segment is sent again and delays the following ones; after GIVE_UP_S both ends are reset. The
side of a client has the interface of an asyncio transport, the side of a node that of
`media.worker.socket_io.Channel`. If a process dies, its peers receive a reset.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from verification.simulation.loop import CURRENT, Process
from verification.simulation.world import World

WINDOW_BYTES: Final = 192 * 1024
"""Bytes that a node can send before its client receives some."""
SEGMENT_BYTES: Final = (8 * 1024, 96 * 1024)
RETRANSMIT_S: Final = 0.2
GIVE_UP_S: Final = 30.0
BREAK_BYTES_MAX: Final = 300_000
PORT: Final = 8081


class Server(Protocol):
    """A node that accepts connections."""

    process: Process

    def accept(self, channel: SimulatedChannel) -> None:
        """A client has connected."""

    def on_socket(self, fd: int, mask: int) -> None:
        """A socket is readable or writable, or was reset."""

    def frame(self, fd: int) -> bytes:
        """The bytes of a cached block."""


class MediaNetwork:
    """All connections to nodes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.stream("connections")
        self.break_share = 0.0
        """The share of new connections that break within an answer."""
        self._servers: dict[str, Server] = {}
        self._links: dict[Link, None] = {}
        self._fds = 1000
        world.on_death(self._end_links_of)

    def listen(self, name: str, server: Server) -> None:
        """Accept connections to this name in a process."""
        self._servers[name] = server
        self.world.loop.listen(name, partial(self.connect, name))

    async def connect(self, name: str, make: Callable[[], Any]) -> SimulatedTransport:
        """Connect the current process. Raises: ConnectionRefusedError, TimeoutError."""
        client, network = CURRENT.get(), self.world.network
        delays = network.delay_s(client.name, name), network.delay_s(name, client.name)
        if None in delays:
            await asyncio.sleep(GIVE_UP_S)
            raise TimeoutError
        await asyncio.sleep(sum(delay for delay in delays if delay is not None))
        server = self._servers.get(name)
        if server is None or not server.process.is_alive:
            raise ConnectionRefusedError
        self._fds += 1
        link = Link(self, client, server, self._fds)
        if self.chance.random() < self.break_share:
            link.left_bytes = self.chance.randint(1, BREAK_BYTES_MAX)
        self._links[link] = None
        self.world.in_process(server.process, 0.0, server.accept, link.channel)
        link.transport.protocol = make()
        link.transport.protocol.connection_made(link.transport)
        return link.transport

    def break_links(self, share: float) -> None:
        """Let this share of the open and new connections break within an answer."""
        self.break_share = share
        for link in self._links:
            if self.chance.random() < share:
                link.left_bytes = self.chance.randint(1, BREAK_BYTES_MAX)

    def heal_links(self) -> None:
        """Let no connection break any more; idle ones would break long after the fault."""
        self.break_share = 0.0
        for link in self._links:
            link.left_bytes = None

    def forget(self, link: Link) -> None:
        """A connection has ended."""
        self._links.pop(link, None)

    def _end_links_of(self, process: Process) -> None:
        for link in [one for one in self._links if process in (one.client, one.server.process)]:
            (link.to_server if link.client is process else link.to_client).break_off()
            self.forget(link)


END: Final = b"end"
RESET: Final = b"reset"


class Link:
    """One connection."""

    def __init__(self, net: MediaNetwork, client: Process, server: Server, fd: int) -> None:
        self.net, self.client, self.server = net, client, server
        self.left_bytes: int | None = None
        """After this many bytes of answers the connection breaks."""
        self.transport = SimulatedTransport(self)
        self.channel = SimulatedChannel(self, fd)
        names = client.name, server.process.name
        self.to_server = _Stream(self, *names, server.process, self.channel.take)
        self.to_client = _Stream(self, *reversed(names), client, self.transport.take)

    def reset(self) -> None:
        """Both ends receive a reset."""
        self.to_server.send(RESET)
        self.to_client.send(RESET)


class _Stream:
    """One direction. Items are bytes, or END or RESET themselves."""

    def __init__(
        self,
        link: Link,
        sender: str,
        receiver: str,
        process: Process,
        deliver: Callable[[bytes], None],
    ) -> None:
        self._link, self._names, self._process = link, (sender, receiver), process
        self._deliver, self._arrived_s, self._lost_since_s = deliver, 0.0, 0.0
        self._waiting: deque[bytes] = deque()

    def send(self, item: bytes) -> None:
        """Send an item behind the earlier ones."""
        self._waiting.append(item)
        if len(self._waiting) == 1:
            self._lost_since_s = self._link.net.world.now_s
            self._try(1)

    def break_off(self) -> None:
        """The sender has died: drop what it has not sent, and send a reset."""
        self._waiting.clear()
        self.send(RESET)

    def _try(self, attempt: int) -> None:
        world = self._link.net.world
        while self._waiting:
            delay_s = world.network.delay_s(*self._names)
            if delay_s is None:
                break
            self._arrived_s = max(world.now_s + delay_s, self._arrived_s)
            later_s = self._arrived_s - world.now_s
            world.in_process(self._process, later_s, self._deliver, self._waiting.popleft())
            self._lost_since_s, attempt = world.now_s, 0
        if not self._waiting:
            return
        if world.now_s - self._lost_since_s > GIVE_UP_S:
            self._waiting.clear()
            link = self._link
            world.in_process(link.client, 0.0, link.transport.take, RESET)
            world.in_process(link.server.process, 0.0, link.channel.take, RESET)
            return
        world.loop.call_later(RETRANSMIT_S * 2 ** min(attempt, 4), self._try, attempt + 1)


class SimulatedTransport:
    """The client's end; its protocol is asyncio's Protocol or BufferedProtocol."""

    def __init__(self, link: Link) -> None:
        self._link, self.is_closed = link, False
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        """As asyncio's."""
        if not self.is_closed:
            self._link.to_server.send(bytes(data))

    def abort(self) -> None:
        """As asyncio's: `connection_lost` is called soon."""
        if not self.is_closed:
            self.is_closed = True
            self._link.to_server.send(RESET)
            self._link.net.world.loop.call_soon(self.protocol.connection_lost, None)

    close = abort

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        """The address of the node."""
        return self._link.server.process.name, PORT

    def take(self, item: bytes) -> None:
        """Receive an item of the node."""
        if item is not END and item is not RESET:
            self._link.channel.note_received(len(item))
        if self.is_closed:
            return
        if item is END or item is RESET:
            self.is_closed = True
            self._link.net.forget(self._link)
            self.protocol.connection_lost(ConnectionResetError() if item is RESET else None)
        elif isinstance(self.protocol, asyncio.BufferedProtocol):
            self._fill(memoryview(item))
        else:
            self.protocol.data_received(item)

    def _fill(self, data: memoryview) -> None:
        while data and not self.is_closed:
            buffer = self.protocol.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            self.protocol.buffer_updated(count)
            data = data[count:]


class SimulatedChannel:
    """The node's end; see `media.worker.socket_io.Channel`."""

    def __init__(self, link: Link, fd: int) -> None:
        self._link, self.fd = link, fd
        self.is_full = self.is_drained = False
        self._inbox = bytearray()
        self._end: bytes | None = None
        self._is_closed = False
        self._coming_bytes = 0

    def take(self, item: bytes) -> None:
        """Receive an item of the client."""
        if self._is_closed:
            return
        if item is RESET or item is END:
            self._end = item
            if item is RESET:
                self._link.net.forget(self._link)
            self._notify(select.EPOLLIN | (select.EPOLLHUP if item is RESET else 0))
        else:
            self._inbox += item
            self._notify(select.EPOLLIN)

    def note_received(self, count: int) -> None:
        """The client received bytes, so that more can be sent."""
        was_full = self._coming_bytes >= WINDOW_BYTES
        self._coming_bytes -= count
        if was_full and not self._is_closed:
            process = self._link.server.process
            self._link.net.world.in_process(process, 0.0, self._notify, select.EPOLLOUT)

    def _notify(self, mask: int) -> None:
        if not self._is_closed:
            self._link.server.on_socket(self.fd, mask)

    def receive(self, bytes_max: int) -> bytes:
        """As Channel's."""
        if self._end is RESET:
            raise ConnectionResetError
        if not self._inbox and self._end is None:
            raise BlockingIOError
        data = bytes(self._inbox[:bytes_max])
        del self._inbox[:bytes_max]
        self.is_drained = bool(data) and not self._inbox and self._end is None
        return data

    def send(self, data: memoryview | bytes, *, is_more: bool = False) -> int:
        """As Channel's."""
        if self._end is RESET or self._is_closed:
            raise ConnectionResetError
        left = min(len(data), max(0, WINDOW_BYTES - self._coming_bytes))
        self.is_full = left < len(data)
        if not left:
            raise BlockingIOError
        self._send(bytes(data[:left]))
        return left

    def _send(self, data: bytes) -> None:
        link = self._link
        if link.left_bytes is not None:
            data = data[: link.left_bytes]
            link.left_bytes -= len(data)
        self._coming_bytes += len(data)
        while data:
            size_bytes = link.net.chance.randint(*SEGMENT_BYTES)
            link.to_client.send(data[:size_bytes])
            data = data[size_bytes:]
        if link.left_bytes == 0:
            link.left_bytes = None
            link.reset()

    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """As Channel's, from a cached block."""
        return self.send(memoryview(self._link.server.frame(descriptor))[offset : offset + count])

    def end(self) -> None:
        """As Channel's."""
        self._link.to_client.send(END)

    def peer(self) -> str:
        """As Channel's."""
        return self._link.client.name

    def reset(self) -> None:
        """As Channel's."""
        if not self._is_closed:
            self._is_closed = True
            self._link.to_client.send(RESET)

    def close(self) -> None:
        """As Channel's."""
        if not self._is_closed:
            self._is_closed = True
            self._link.to_client.send(END)


class Receiver(asyncio.Protocol):
    """Collects the bytes that a client receives."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_over = False
        self.is_reset = False
        self._more: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        """As asyncio's."""
        self.data += data
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio's."""
        self.is_over, self.is_reset = True, exc is not None
        self._wake()

    async def more(self) -> None:
        """Wait for more bytes or the end."""
        self._more = asyncio.get_running_loop().create_future()
        await self._more

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
