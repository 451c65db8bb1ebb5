"""Another node: its health, and persistent connections with one exchange at a time each.

A response is returned once its head is received. Its body is received directly into its own memory
(BufferedProtocol: one copy) while the caller passes on the received part. So the first byte of a
block waits only for the peer's first byte. A body is one block at most.

Every wait is bounded: connecting, and the whole exchange. An exchange of over half a second calls
`on_slow`, which probes the peer. `drop` ends all exchanges with a dead peer.

**Health.** A peer that refuses or resets connections is out at once. One that is slow, full or
answers wrongly is out after three failures in a row, so that one failure costs one retry and not
the peer. Only a probe brings a peer back, never a request of a user. Probes request `/healthz`
every two seconds, and at once when a request has waited half a second. A probe without an answer
may be that of a busy host, so three in a row take a peer out. The first one raises a doubt: the
requests that wait for the peer end, and other replicas are requested first until a probe is
answered. So a hanging peer delays a request for about two seconds. `Health` is pure.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, cast

from headrace.kernel.config import parse_listen
from headrace.media.cluster.hop import (
    HopSequence,
    HopSigner,
    PeerLost,
    PeerRequest,
    PeerResponse,
    covered_text,
    parse_answer_head,
)
from headrace.media.cluster.membership import Member
from headrace.media.model import BLOCK_BYTES
from headrace.media.sources import PartialBlock

PROBE_EVERY_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 0.8
PROBES_MAX: Final = 3
"""Probes in a row without an answer that take a peer out; it is doubted from the first one on."""
LATE_S: Final = 0.3
"""A probe that ends later than this after its timeout shows that this process was late."""
FAILURES_MAX: Final = 3


class Health:
    """The health of one peer, which is usable until it fails."""

    __slots__ = ("failures", "is_doubted", "is_usable")

    def __init__(self) -> None:
        self.is_usable = True
        self.is_doubted = False
        """Whether its last probe was not answered: other replicas are requested first."""
        self.failures = 0

    def succeed(self) -> None:
        """Record a correct answer. It does not bring back a peer that is out."""
        if self.is_usable:
            self.failures = 0

    def fail(self, *, is_refused: bool) -> bool:
        """Record a failure, `is_refused` of a refused or reset connection.

        Return whether the peer is out now.
        """
        self.failures += 1
        is_out = is_refused or self.failures >= FAILURES_MAX
        return is_out and self.note_probe(is_answered=False)

    def note_probe(self, *, is_answered: bool) -> bool:
        """Record a probe. Return whether the peer is out or back now."""
        is_changed = self.is_usable != is_answered
        self.is_usable = is_answered
        self.is_doubted = not is_answered
        if is_changed and is_answered:
            self.failures = 0
        return is_changed


CONNECT_TIMEOUT_S: Final = 0.5
SLOW_S: Final = 0.5
CONNECTIONS_MAX: Final = 128
"""Concurrent exchanges with one peer; more wait."""
IDLE_MAX: Final = 32
FIRST_BYTES: Final = 20 * 1024
"""Receive buffer until the head is complete: it fits the head and a small body."""
BODY_BYTES_MAX: Final = BLOCK_BYTES
NO_BODY: Final = frozenset({204, 304})
_NO_CALLER: Final = "the caller was cancelled"


Head = tuple[int, dict[str, str], PartialBlock]
"""Status, fields and body."""


class PeerConnection(asyncio.BufferedProtocol):
    """One connection. It is closed when the peer sends unrequested bytes."""

    def __init__(
        self, signing: HopSequence | None, on_lost: Callable[[PeerConnection], None]
    ) -> None:
        self.signing = signing
        self.is_open = False
        self.watch: asyncio.TimerHandle | None = None
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._coming: asyncio.Future[Head] | None = None
        """The head of the current exchange; None: it was received, or there is no exchange."""
        self._on_end: Callable[[PeerConnection], None] | None = None
        """Called once at the end of the current exchange; None: there is none."""
        self._is_head_request = False
        self._head = bytearray(FIRST_BYTES)
        self._filled = 0
        self._body: PartialBlock | None = None

    def request(
        self, head: bytes, *, is_head_request: bool, on_end: Callable[[PeerConnection], None]
    ) -> asyncio.Future[Head]:
        """Send a request. The future raises: PeerLost."""
        assert self._on_end is None, "one exchange at a time"
        assert self._transport is not None
        self._coming = asyncio.get_running_loop().create_future()
        self._is_head_request, self._on_end = is_head_request, on_end
        self._filled, self._body = 0, None
        self._transport.write(head)
        return self._coming

    def close(self) -> None:
        """Close the connection and end its exchange."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """The peer's IP address and port; None if it has reset the connection."""
        assert self._transport is not None
        found = self._transport.get_extra_info("peername")
        return (found[0], found[1]) if found else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop, which commands use, are no subclass.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the library's word
        if self._body is None:
            return memoryview(self._head)[self._filled :]
        return self._body.view[self._body.filled_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._on_end is None:
            self.close()
        elif self._body is not None:
            self._body.grow(nbytes)
            self._end_if_whole(self._body)
        else:
            self._filled += nbytes
            try:
                self._take_head()
            except ValueError as error:
                self.fail(PeerLost(f"a node sent no valid HTTP response ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        is_unanswered = self._body is None and self._filled == 0
        why = type(exc).__name__ if exc else "closed"
        self.fail(
            PeerLost(
                f"a node's connection ended ({why})", is_refused=True, is_unanswered=is_unanswered
            )
        )
        self._on_lost(self)

    def _take_head(self) -> None:
        """Start the body once the head is complete."""
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == len(self._head):
                raise ValueError("its head is too long")
            return
        status, fields = parse_answer_head(bytes(self._head[:end]))
        has_body = not self._is_head_request and status not in NO_BODY
        length_bytes = int(fields["content-length"]) if has_body else 0
        begun_bytes = self._filled - end - 4
        if not begun_bytes <= length_bytes <= BODY_BYTES_MAX:
            raise ValueError("its body has an invalid length")
        data = bytearray(length_bytes)
        data[:begun_bytes] = memoryview(self._head)[end + 4 : self._filled]
        body = self._body = PartialBlock(data, begun_bytes)
        if fields.get("connection", "").lower() == "close":
            self.is_open = False
        coming, self._coming = self._coming, None
        if coming is not None and not coming.done():
            coming.set_result((status, fields, body))
        self._end_if_whole(body)

    def _end_if_whole(self, body: PartialBlock) -> None:
        if body.filled_bytes == body.length_bytes:
            self._filled, self._body = 0, None
            self._end()

    def fail(self, error: PeerLost) -> None:
        """Close the connection and pass `error` to the callers."""
        coming, self._coming = self._coming, None
        body, self._body = self._body, None
        self.close()
        if coming is not None and not coming.done():
            coming.set_exception(error)
        if body is not None:
            body.fail(error)
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)


class Peer:
    """One other node: its connections and its health. Without `signer` it is of another cluster."""

    connect_timeout_s = CONNECT_TIMEOUT_S
    probe_timeout_s = PROBE_TIMEOUT_S
    tls: ssl.SSLContext | None = None

    def __init__(
        self,
        member: Member,
        signer: HopSigner | None,
        *,
        timeout_s: float,
        on_slow: Callable[[Peer], None] = lambda _: None,
    ) -> None:
        self.name = member.name
        self.dc = member.dc
        self.address = member.address
        self.host = member.address
        """For the Host field."""
        self.health = Health()
        self.timeout_s = timeout_s
        self.endpoint: tuple[str, int] | None = None
        """The IP address and port of the last connection."""
        self._host, self._port = parse_listen(member.address)
        self._signer = signer
        self._on_slow = on_slow
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._idle: list[PeerConnection] = []
        self._busy: dict[PeerConnection, None] = {}
        """In the order of their begin, in which `drop` ends them."""

    async def request(self, request: PeerRequest) -> PeerResponse:
        """The response, whatever its status, once its head is received.

        The request is repeated if a persistent connection ended without a response, since the peer
        may have closed it as idle. Raises: PeerLost.
        """
        await self._take_slot()
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, request)
            except PeerLost as error:
                if not error.is_unanswered or not self.health.is_usable:
                    raise
            await self._take_slot()
        try:
            connection = await self._connect()
        except BaseException:
            self._slots.release()
            raise
        return await self._exchange(connection, request)

    async def is_alive(self) -> bool:
        """Whether the peer answers one of PROBES_MAX probes; a refused one is the last.

        Probes whose timeout this process itself noticed late do not count, up to PROBES_MAX.
        """
        loop, missed = asyncio.get_running_loop(), 0
        for _ in range(2 * PROBES_MAX):
            began_s = loop.time()
            found = await self.probe()
            if found is not None:
                return found
            missed += loop.time() - began_s < self.probe_timeout_s + LATE_S
            if missed == PROBES_MAX:
                break
            if missed:
                self._doubt()
        return False

    async def probe(self) -> bool | None:
        """Whether the peer answers its health check, over a new connection.

        None: no answer within the timeout.
        """
        connection: PeerConnection | None = None
        try:
            async with asyncio.timeout(self.probe_timeout_s):
                connection = await self._connect()
                head = f"GET /healthz HTTP/1.1\r\nHost: {self.address}\r\n\r\n".encode()
                status, _, _ = await connection.request(
                    head, is_head_request=False, on_end=_nothing
                )
        except PeerLost as error:
            return False if error.is_refused else None
        except TimeoutError:
            return None
        finally:
            if connection is not None:
                connection.close()
        return status == 200

    def drop(self) -> None:
        """Close all connections; waiting callers use the next node."""
        for connection in [*self._idle, *self._busy]:
            connection.close()

    def _doubt(self) -> None:
        """End all exchanges once, as a probe was not answered; the peer stays usable."""
        if self.health.is_doubted:
            return
        self.health.is_doubted = True
        for connection in [*self._idle, *self._busy]:
            connection.fail(PeerLost(f"node {self.name} did not answer a probe", is_counted=False))

    def close(self) -> None:
        """Close all connections and keep no new one."""
        self.health.is_usable = False
        self.drop()

    def report_slow(self) -> None:
        """Record that a request of the native data plane waits for long."""
        self._on_slow(self)

    async def _connect(self) -> PeerConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: PeerConnection(
                        self._signer.sequence() if self._signer else None, self._forget
                    ),
                    self._host,
                    self._port,
                    ssl=self.tls,
                )
        except (OSError, socket.gaierror) as error:
            # TimeoutError is an OSError: a peer that drops packets counts as one that refuses.
            raise PeerLost(
                f"node {self.name} at {self.address} cannot be reached ({type(error).__name__})",
                is_refused=not isinstance(error, TimeoutError),
            ) from error
        endpoint = connection.endpoint
        if endpoint is None:
            connection.close()
            raise PeerLost(
                f"node {self.name} at {self.address} reset a new connection", is_refused=True
            )
        self.endpoint = endpoint
        return connection

    async def _take_slot(self) -> None:
        """Wait for a free slot. The timeout is created only if all are in use."""
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise PeerLost(
                f"node {self.name} had no free connection for {self.timeout_s:g} s"
            ) from error

    def _take_idle(self) -> PeerConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _exchange(self, connection: PeerConnection, request: PeerRequest) -> PeerResponse:
        """Send a request on `connection`. The end of the body releases its slot."""
        head, mac = self._head(connection, request)
        self._begin_exchange(connection)
        coming = connection.request(
            head, is_head_request=request.method == "HEAD", on_end=self._end_exchange
        )
        try:
            return PeerResponse(*await coming, mac)
        except asyncio.CancelledError:
            connection.fail(PeerLost(_NO_CALLER))
            raise

    def _begin_exchange(self, connection: PeerConnection) -> None:
        connection.watch = asyncio.get_running_loop().call_later(SLOW_S, self._is_slow, connection)
        self._busy[connection] = None

    def _end_exchange(self, connection: PeerConnection) -> None:
        if connection.watch is not None:
            connection.watch.cancel()
        self._busy.pop(connection, None)
        self._slots.release()
        if connection.is_open and self.health.is_usable and len(self._idle) < IDLE_MAX:
            self._idle.append(connection)
        else:
            connection.close()

    def _is_slow(self, connection: PeerConnection) -> None:
        """Handle the timer of an exchange: first report it as slow, then end it."""
        left_s = max(0.0, self.timeout_s - SLOW_S)
        error = PeerLost(f"node {self.name} did not answer in {self.timeout_s:g} s")
        connection.watch = asyncio.get_running_loop().call_later(left_s, connection.fail, error)
        self._on_slow(self)

    def _head(self, connection: PeerConnection, request: PeerRequest) -> tuple[bytes, str]:
        """The head of a request, and the HMAC of its hop field; empty to another cluster."""
        method, target, span, if_match, fields, generation = request
        text = f"{method} {target} HTTP/1.1\r\nHost: {self.host}\r\n"
        if if_match:
            text += f"If-Match: {if_match}\r\n"
        for name, value in fields:
            text += f"{name}: {value}\r\n"
        if span:
            text += f"Range: {span}\r\n"
        mac = ""
        if connection.signing is not None:
            covered = covered_text(method, target, span, if_match)
            hop, mac = connection.signing.sign(self.name, covered, generation)
            text += f"X-Headrace-Hop: {hop}\r\n"
        return f"{text}\r\n".encode("latin-1"), mac

    def _forget(self, connection: PeerConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)


def _nothing(_: PeerConnection) -> None:
    """A probe closes its connection itself."""
