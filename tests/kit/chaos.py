"""A network that fails on command: a proxy between clients and a real server.

    with ChaosProxy(database_url) as proxy:
        ...                                      # clients use proxy.url or proxy.socket_url
        lost = proxy.lose_reply(b"enqueue_v1")   # the enqueue takes effect, its reply is lost
        proxy.set(BLACK_HOLE)                    # bytes vanish without an error
        proxy.set(PASS)

It runs in a thread with its own event loop, so clients may be this process or any other. Its
methods are synchronous and have taken effect when they return. Requests trigger the faults, not
times.

A connection that lost bytes in a black hole stays dead until its client closes it, as behind a
firewall; an idle connection continues. The proxy parses PostgreSQL (see `wire`); for other servers
the bytes of one read are a request. Clients send one request at a time per connection, as drivers
do: a lost reply drops everything after it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from tests.kit.wire import PostgresWire, RawWire, Request, Wire

T = TypeVar("T")
READ_BYTES: Final = 64 * 1024
_RST: Final = struct.pack("ii", 1, 0)
_POSTGRES: Final = ("postgresql", "postgres")


@dataclass(frozen=True, slots=True)
class Mode:
    """The behavior of a connection."""

    word: str
    delay_s: float = 0.0


PASS: Final = Mode("pass")
BLACK_HOLE: Final = Mode("black hole")
RESET: Final = Mode("reset")
ONE_WAY: Final = Mode("one way")
"""Requests arrive, replies are lost."""


def delay(seconds: float) -> Mode:
    """A mode that delays each request by `seconds`, or until the mode changes."""
    return Mode("delay", seconds)


class Effect(Enum):
    """The action of a fault."""

    LOSE_REQUEST = "lose the request"
    LOSE_REPLY = "lose the reply"
    HOLD_REPLY = "hold the reply"


@dataclass(slots=True)
class Fault:
    """Applies to the next `times` requests that contain all of `when`."""

    when: tuple[bytes, ...]
    times: int
    effect: Effect
    fired: int = 0
    """How often the fault was applied; for a reply, after the server sent it."""
    released: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The target of a URL: a unix socket or a host and port, and its protocol."""

    url: str
    path: str | None
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Upstream:
        """The target of `url`; a `host` parameter with a slash is a folder of sockets."""
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        host = options.get("host", [parts.hostname or "127.0.0.1"])[0]
        port = int(options.get("port", [str(parts.port or 5432)])[0])
        if parts.scheme == "unix":
            return cls(url, parts.path, "", 0)
        path = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else None
        return cls(url, path, host, port)

    def wire(self) -> Wire:
        """The protocol state for one connection."""
        return PostgresWire() if urlsplit(self.url).scheme in _POSTGRES else RawWire()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to the server."""
        if self.path is not None:
            return await asyncio.open_unix_connection(self.path)
        return await asyncio.open_connection(self.host, self.port)

    def url_at(self, host: str, port: int) -> str:
        """The same URL at another host and port."""
        parts = urlsplit(self.url)
        user, at, _ = parts.netloc.rpartition("@")
        kept = {k: v for k, v in parse_qs(parts.query).items() if k not in ("host", "port")}
        query = "&".join(f"{name}={quote(v)}" for name, values in kept.items() for v in values)
        if parts.scheme == "unix":
            return f"tcp://{host}:{port}"
        return urlunsplit((parts.scheme, f"{user}{at}{host}:{port}", parts.path, query, ""))

    def url_in(self, folder: Path, name: str) -> str:
        """The same URL at the socket `name` in `folder`."""
        parts = urlsplit(self.url)
        if parts.scheme not in _POSTGRES:
            return f"unix://{folder}/{name}"
        user, at, _ = parts.netloc.rpartition("@")
        query = f"host={quote(str(folder), safe='/')}"
        return urlunsplit((parts.scheme, user + at, parts.path, query, ""))


class ChaosProxy:
    """A proxy in front of the server of `upstream_url`, for a `with` block."""

    def __init__(self, upstream_url: str) -> None:
        self._upstream = Upstream.of(upstream_url)
        self._mode = PASS
        self._next_mode: Mode | None = None
        self._faults: list[Fault] = []
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos", daemon=True)
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self._servers: list[asyncio.Server] = []
        self.refused = 0
        """Connections that were reset on arrival."""
        self.url = ""
        """The URL through this proxy over TCP loopback."""
        self.socket_url = ""
        """The URL through this proxy over a unix socket."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ask(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()

    def set(self, mode: Mode, *, asked: bytes | None = None) -> None:
        """Set the mode of all connections, or of open ones with a request that contains `asked`."""

        async def change() -> None:
            if asked is None:
                self._mode, self._next_mode = mode, None
            links = self._with(asked)
            for link in links:
                link.change(mode)
            if mode == RESET:
                for link in links:
                    await link.ended.wait()

        self._ask(change())

    def lead_to(self, upstream_url: str) -> None:
        """Connect new clients to another server, as an address that moved does; cut the others."""

        async def change() -> None:
            self._upstream = Upstream.of(upstream_url)
            for link in list(self._links):
                link.cut()

        self._ask(change())

    def set_next(self, mode: Mode) -> None:
        """Set the mode of the next connection, until `set` is called."""

        def change() -> None:
            self._next_mode = mode

        self._do(change)

    def lose_reply(self, *when: bytes, times: int = 1) -> Fault:
        """Drop the replies of requests that contain all of `when`, and close the connections."""
        return self._add(Fault(when, times, Effect.LOSE_REPLY))

    def lose_request(self, *when: bytes, times: int = 1) -> Fault:
        """Drop requests that contain all of `when`, and close the connections."""
        return self._add(Fault(when, times, Effect.LOSE_REQUEST))

    def hold_reply(self, *when: bytes, times: int = 1) -> Fault:
        """Hold the replies of requests that contain all of `when` until `release`."""
        return self._add(Fault(when, times, Effect.HOLD_REPLY))

    def release(self, fault: Fault) -> None:
        """End a fault and send the replies that it holds."""

        def end() -> None:
            fault.times = 0
            fault.released.set()

        self._do(end)

    def connections(self, asked: bytes | None = None) -> int:
        """The number of open connections, or of those with a request that contains `asked`."""
        return self._do(lambda: len(self._with(asked)))

    def _with(self, asked: bytes | None) -> list[_Link]:
        return [link for link in self._links if asked is None or link.has_asked(asked)]

    def _add(self, fault: Fault) -> Fault:
        self._do(lambda: self._faults.append(fault))
        return fault

    def _do(self, change: Callable[[], T]) -> T:
        async def run() -> T:
            return change()

        return self._ask(run())

    def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _open(self) -> None:
        name = Path(self._upstream.path or ".s.PGSQL.5432").name
        folder = Path(self._folder.name)
        tcp = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        unix = await asyncio.start_unix_server(self._serve, str(folder / name))
        self._servers = [tcp, unix]
        self.url = self._upstream.url_at(*tcp.sockets[0].getsockname()[:2])
        self.socket_url = self._upstream.url_in(folder, name)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        links = list(self._links)
        for link in links:
            link.cut()
        for link in links:
            await link.ended.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mode, self._next_mode = self._next_mode or self._mode, None
        if mode == RESET:
            self.refused += 1
            _abort(writer)
            return
        link = _Link(self._faults, self._upstream.wire(), mode)
        self._links.add(link)
        try:
            await link.run(reader, writer, self._upstream)
        finally:
            self._links.discard(link)
            link.ended.set()


class _Link:
    """A client's connection and the proxy's connection to the server for it."""

    def __init__(self, faults: list[Fault], wire: Wire, mode: Mode) -> None:
        self.ended = asyncio.Event()
        self._faults = faults
        self._wire = wire
        self._mode = mode
        self._mode_changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._has_lost_bytes = False
        self._met: tuple[Fault, Request] | None = None

    def has_asked(self, pattern: bytes) -> bool:
        """Whether a request so far contains `pattern`."""
        return any(pattern in text for text in self._wire.asked_before)

    def change(self, mode: Mode) -> None:
        """Set the mode."""
        self._mode = mode
        self._mode_changed.set()
        self._mode_changed = asyncio.Event()
        if mode == RESET:
            self.cut()

    def cut(self) -> None:
        """Close both connections; the client receives a reset."""
        self._cut.set()

    async def run(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: Upstream
    ) -> None:
        """Forward bytes until one side closes."""
        try:
            server_reader, server_writer = await upstream.connect()
        except OSError:
            _abort(writer)
            return
        async with _ending(writer, server_writer, self._cut):
            pumps = [
                asyncio.create_task(self._carry_requests(reader, server_writer)),
                asyncio.create_task(self._carry_replies(server_reader, writer)),
            ]
            cut = asyncio.create_task(self._cut.wait())
            await asyncio.wait([*pumps, cut], return_when=asyncio.FIRST_COMPLETED)
            for task in (*pumps, cut):
                task.cancel()
            await asyncio.gather(*pumps, cut, return_exceptions=True)

    async def _carry_requests(
        self, client: asyncio.StreamReader, server: asyncio.StreamWriter
    ) -> None:
        while data := await client.read(READ_BYTES):
            if not await self._is_carried():
                continue
            asked = self._wire.asked(data)
            fault = self._fault_for(asked)
            if fault is not None and fault.effect is Effect.LOSE_REQUEST:
                fault.fired += 1
                self.cut()
                return
            server.write(data)
            await server.drain()

    async def _carry_replies(
        self, server: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        kept = b""
        while data := await server.read(READ_BYTES):
            answers = self._wire.answers(data)
            if self._met is not None:
                fault, asked = self._met
                kept += data
                if answers < asked.answer:
                    continue
                fault.fired += 1
                if fault.effect is Effect.LOSE_REPLY:
                    self.cut()
                    return
                await fault.released.wait()
                self._met, data, kept = None, kept, b""
            if self._mode in (BLACK_HOLE, ONE_WAY) or self._has_lost_bytes:
                self._has_lost_bytes = True
            else:
                client.write(data)
                await client.drain()
        if self._mode in (BLACK_HOLE, ONE_WAY) or self._has_lost_bytes:
            await self._cut.wait()

    async def _is_carried(self) -> bool:
        """Whether to forward bytes; waits for a delay."""
        if self._mode.delay_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._mode_changed.wait(), self._mode.delay_s)
        self._has_lost_bytes = self._has_lost_bytes or self._mode == BLACK_HOLE
        return not self._has_lost_bytes

    def _fault_for(self, asked: list[Request]) -> Fault | None:
        for request in asked:
            for fault in self._faults:
                if fault.times and all(part in request.text for part in fault.when):
                    fault.times -= 1
                    self._met = (fault, request)
                    return fault
        return None


@asynccontextmanager
async def _ending(
    client: asyncio.StreamWriter, server: asyncio.StreamWriter, cut: asyncio.Event
) -> AsyncIterator[None]:
    """Close both sides; bytes in transit still arrive unless the connection was reset."""
    try:
        yield
    finally:
        for writer in (client, server):
            if cut.is_set():
                _abort(writer)
            else:
                writer.close()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    writer.transport.abort()
