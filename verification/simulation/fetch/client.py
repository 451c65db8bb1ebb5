"""libcurl and c-ares of the simulation: the parts of `pycurl` and `aiodns` that fetch calls.

The product's `AsyncCurl`, `Exchange` and `Downloader` run unchanged on it: options, callbacks, kept
connections, a repeated send over a new connection, timeouts and error numbers are those of libcurl.
A transfer is a task of its process, so it pauses and dies with it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urlsplit

import aiodns
import pycurl

from verification.simulation.fetch.sellers import LoggedRequest, Response, SellerHost, Sellers
from verification.simulation.loop import CURRENT

KEPT_MAX_S: Final = 60.0
"""Age at which hosts close kept connections."""
RESENT_S: Final = 1.0
"""A lost packet is sent again after this time."""
NO_SUCH_NAME: Final = 4
SOCKET: Final = 2, 1, 6
"""Family, kind and protocol that the hook of new sockets receives."""


class TransferEnded(Exception):
    """libcurl ends a transfer with an error number."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number, self.text = number, text


@dataclass(eq=False, slots=True)
class Connection:
    """A connection of a process to a host."""

    host: SellerHost
    used_s: float


class CurlHandle:
    """`pycurl.Curl`: options and times of one transfer."""

    def __init__(self) -> None:
        self.options: dict[int, Any] = {}
        self.times: dict[int, float] = {}

    def setopt(self, option: int, value: Any) -> None:
        """As pycurl's."""
        self.options[option] = value

    def getinfo(self, what: int) -> Any:
        """As pycurl's; 0 for what did not happen."""
        return self.times.get(what, 0)

    def close(self) -> None:
        """As pycurl's."""

    def header(self, name: str) -> str | None:
        """A header of the request."""
        found = (line.partition(": ") for line in self.options[pycurl.HTTPHEADER])
        return next((value for one, _, value in found if one == name), None)


class CurlMulti:
    """`pycurl.CurlMulti` of one process."""

    def __init__(self, sellers: Sellers) -> None:
        self._sellers, self._world = sellers, sellers.world
        self._network = sellers.world.network
        self._on_timer: Callable[[int], None] = lambda _timeout_ms: None
        self._running: dict[CurlHandle, asyncio.Task[None]] = {}
        self._ended: list[tuple[CurlHandle, int, str]] = []
        self._kept: dict[tuple[str, str], list[Connection]] = defaultdict(list)

    def setopt(self, option: int, value: Any) -> None:
        """As pycurl's."""
        if option == pycurl.M_TIMERFUNCTION:
            self._on_timer = value

    def add_handle(self, handle: CurlHandle) -> None:
        """As pycurl's: the transfer begins."""
        self._running[handle] = asyncio.get_running_loop().create_task(self._run(handle))

    def remove_handle(self, handle: CurlHandle) -> None:
        """As pycurl's: a running transfer stops, and its connection closes."""
        self._running.pop(handle).cancel()
        self._ended = [one for one in self._ended if one[0] is not handle]

    def socket_action(self, _descriptor: int, _events: int) -> None:
        """As pycurl's; transfers act by themselves here."""

    def info_read(self) -> tuple[int, list[CurlHandle], list[tuple[CurlHandle, int, str]]]:
        """As pycurl's: the transfers that have ended since the last call."""
        ended, self._ended = self._ended, []
        done = [handle for handle, number, _ in ended if number == 0]
        return 0, done, [one for one in ended if one[1] != 0]

    def close(self) -> None:
        """As pycurl's."""
        self._kept.clear()

    async def _run(self, handle: CurlHandle) -> None:
        began_s, number, text = self._world.now_s, 0, ""
        try:
            async with asyncio.timeout(handle.options[pycurl.TIMEOUT_MS] / 1000):
                await self._transfer(handle)
        except TransferEnded as ended:
            number, text = ended.number, ended.text
        except TimeoutError:
            number, text = pycurl.E_OPERATION_TIMEDOUT, "the transfer timed out"
        handle.times[pycurl.TOTAL_TIME] = self._world.now_s - began_s
        self._ended.append((handle, number, text))
        self._on_timer(0)

    async def _transfer(self, handle: CurlHandle) -> None:
        began_s = self._world.now_s
        url = urlsplit(handle.options[pycurl.URL])
        address = handle.options[pycurl.CONNECT_TO][0].rsplit(":", 2)[1]
        place = url.hostname or "", address
        kept = self._take_kept(handle, place)
        connection = kept or await self._connect(handle, place)
        connect_s = self._world.now_s - began_s
        handle.times[pycurl.CONNECT_TIME] = handle.times[pycurl.APPCONNECT_TIME] = connect_s
        self._before_request(handle, address)
        if kept is not None and self._world.now_s - kept.used_s > KEPT_MAX_S:
            # The host has closed it meanwhile: libcurl sends again over a new connection.
            connection = await self._connect(handle, place)
            self._before_request(handle, address)
        exchange = handle.options[pycurl.HEADERFUNCTION].__self__
        request = LoggedRequest(
            host=place[0],
            customer=url.path.split("/")[1],
            path=url.path,
            process=CURRENT.get(),
            sent_s=self._world.now_s,
            at_s=0.0,
            connections=exchange.bounds.connections or 0,
            connect_s=connect_s,
        )
        await self._exchange(handle, connection, request, began_s)
        connection.used_s = self._world.now_s
        self._kept[place].append(connection)

    def _take_kept(self, handle: CurlHandle, place: tuple[str, str]) -> Connection | None:
        kept = self._kept[place]
        return kept.pop() if kept and not handle.options.get(pycurl.FRESH_CONNECT) else None

    async def _connect(self, handle: CurlHandle, place: tuple[str, str]) -> Connection:
        """Connect to the address of a host. Raises: TransferEnded."""
        opened = handle.options[pycurl.OPENSOCKETFUNCTION](0, (*SOCKET, (place[1], 443)))
        if opened == pycurl.SOCKET_BAD:
            raise TransferEnded(pycurl.E_COULDNT_CONNECT, "the socket was refused")
        opened.close()
        host = self._sellers.by_address(place[1])
        try:
            async with asyncio.timeout(handle.options[pycurl.CONNECTTIMEOUT_MS] / 1000):
                takes_s = host.connect_s()
                if takes_s is None:
                    await asyncio.get_running_loop().create_future()
                    raise AssertionError("nothing ends this wait")
                await self._travel(CURRENT.get().name, host.name)
                await asyncio.sleep(abs(takes_s))
                await self._travel(host.name, CURRENT.get().name)
        except TimeoutError:
            raise TransferEnded(pycurl.E_OPERATION_TIMEDOUT, "not connected in time") from None
        if takes_s < 0:
            raise TransferEnded(pycurl.E_COULDNT_CONNECT, "the connection was refused")
        return Connection(host, self._world.now_s)

    def _before_request(self, handle: CurlHandle, address: str) -> None:
        allowed = handle.options[pycurl.PREREQFUNCTION](address, "10.0.0.1", 443, 50_000)
        if allowed != pycurl.PREREQFUNC_OK:
            raise TransferEnded(pycurl.E_ABORTED_BY_CALLBACK, "a callback aborted it")

    async def _exchange(
        self, handle: CurlHandle, connection: Connection, request: LoggedRequest, began_s: float
    ) -> None:
        """Send the request and receive its response. Raises: TransferEnded."""
        host, sellers = connection.host, self._sellers
        await self._travel(CURRENT.get().name, host.name)
        request.at_s = self._world.now_s
        number = sellers.receive(request)
        try:
            response = host.respond(request, handle.header("If-None-Match"), request.at_s)
            request.status = response.status if response.end != "never" else 0
            after = response.headers.get("Retry-After")
            request.retry_after_s = None if after is None else float(after)
            await asyncio.sleep(response.wait_s)
            if response.end == "never":
                await asyncio.get_running_loop().create_future()
            await self._travel(host.name, CURRENT.get().name)
            handle.times[pycurl.STARTTRANSFER_TIME] = self._world.now_s - began_s
            if response.end == "reset" and not response.body:
                raise TransferEnded(pycurl.E_RECV_ERROR, "the connection was reset")
            await self._deliver(handle, response, request)
            request.received_s = self._world.now_s
            sellers.on_response(request)
        finally:
            sellers.end(number)

    async def _deliver(
        self, handle: CurlHandle, response: Response, request: LoggedRequest
    ) -> None:
        """Call the callbacks with a response. Raises: TransferEnded."""
        lines = [f"HTTP/1.1 {response.status} Status"]
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        for line in [*lines, ""]:
            _require_taken(handle.options[pycurl.HEADERFUNCTION](f"{line}\r\n".encode()))
        length = response.headers.get("Content-Length")
        most = handle.options[pycurl.MAXFILESIZE_LARGE]
        if length is not None and 0 < most < int(length):
            raise TransferEnded(pycurl.E_FILESIZE_EXCEEDED, "the body is too large")
        size = max(1, -(-len(response.body) // response.parts))
        for start in range(0, len(response.body), size):
            if start:
                await asyncio.sleep(0.02)
            part = response.body[start : start + size]
            _require_taken(handle.options[pycurl.WRITEFUNCTION](part))
        if response.end == "reset":
            raise TransferEnded(pycurl.E_RECV_ERROR, "the connection was reset")
        if response.end == "cut" and length is not None:
            raise TransferEnded(pycurl.E_PARTIAL_FILE, "the body is shorter than its length")
        if response.status == 200 and response.end == "whole":
            self._sellers.note_served(request, response.body)

    async def _travel(self, sender: str, receiver: str) -> None:
        """Wait while a packet travels; a lost one is sent again."""
        while (delay_s := self._network.delay_s(sender, receiver)) is None:
            await asyncio.sleep(RESENT_S)
        await asyncio.sleep(delay_s)


def _require_taken(result: Any) -> None:
    if result is not None and result < 0:
        raise TransferEnded(pycurl.E_WRITE_ERROR, "a callback refused a part")


class SimulatedPycurl:
    """In place of the module `pycurl` in `headrace.fetch.curl`."""

    def __init__(self, sellers: Sellers) -> None:
        self._sellers = sellers
        self.Curl = CurlHandle

    def CurlMulti(self) -> CurlMulti:  # noqa: N802 - of pycurl
        """As pycurl's."""
        return CurlMulti(self._sellers)

    def __getattr__(self, name: str) -> Any:
        """The constants are the real ones."""
        return getattr(pycurl, name)


@dataclass(slots=True)
class SimulatedResolver:
    """`aiodns.DNSResolver`."""

    sellers: Sellers
    options: dict[str, Any] = field(default_factory=dict)

    async def getaddrinfo(self, name: str, **_options: Any) -> Any:
        """As aiodns's. Raises: DNSError."""
        world = self.sellers.world
        while world.network.delay_s(CURRENT.get().name, "dns") is None or self.sellers.is_dns_down:
            await asyncio.sleep(RESENT_S)
        await asyncio.sleep(0.005)
        host = self.sellers.hosts.get(name)
        if host is None or host.kind == "unknown":
            raise aiodns.error.DNSError(NO_SUCH_NAME, "Domain name not found")
        return SimpleNamespace(nodes=[SimpleNamespace(addr=(host.address, 443))])

    async def close(self) -> None:
        """As aiodns's."""


def simulated_aiodns(sellers: Sellers) -> Any:
    """In place of the module `aiodns` in `headrace.fetch.dns`."""
    return SimpleNamespace(
        error=aiodns.error,
        DNSResolver=lambda _servers, **options: SimulatedResolver(sellers, options),
    )
