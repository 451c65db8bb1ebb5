"""Another node as this worker asks it: kept-alive connections, one exchange at a time on each.

Bodies are received straight into their own memory (BufferedProtocol), so a block costs one copy here. Every
wait has its bound: connecting, the whole exchange, and half a second without an answer makes `on_slow` be
called, which probes the peer; `drop` ends all exchanges with a peer that was found dead.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.kernel.config import parse_listen
from penstock.kernel.errors import Unavailable
from penstock.media.cluster.health import PROBE_TIMEOUT_S, Health
from penstock.media.cluster.hop import HOP_FIELD, HopLine, HopSigner, covered_by
from penstock.media.cluster.membership import Member
from penstock.media.model import BLOCK_BYTES

CONNECT_TIMEOUT_S: Final = 0.5
SLOW_S: Final = 0.5
LINES_MAX: Final = 128
"""Exchanges with one peer at once; more wait."""
LINES_KEPT: Final = 32
FIRST_BYTES: Final = 20 * 1024
"""What is received at once while the head is not known: it and a small body with it."""
BODY_BYTES_MAX: Final = BLOCK_BYTES
NO_BODY: Final = frozenset({204, 304})


class PeerLost(Unavailable):
    """A node of the cluster did not answer as a node does; the next one is asked."""

    code = "media.peer_lost"

    def __init__(self, text: str, *, is_gone: bool = False, is_unheard: bool = False) -> None:
        super().__init__(text, retry_after_s=1)
        self.is_gone = is_gone
        self.is_unheard = is_unheard


class Answer(NamedTuple):
    """What a peer said; names of fields are in lower case. `mac` is that of the hop that asked."""

    status: int
    fields: dict[str, str]
    body: bytes
    mac: str


class Asked(NamedTuple):
    """One request to a peer."""

    method: str
    target: str
    fields: tuple[tuple[str, str], ...] = ()
    generation: int = 0


class _Line(asyncio.BufferedProtocol):
    """One connection. Bytes that nobody asked for end it."""

    def __init__(self, signing: HopLine, on_lost: Callable[[_Line], None]) -> None:
        self.signing = signing
        self.is_open = False
        self.watch: asyncio.TimerHandle | None = None
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._coming: asyncio.Future[tuple[int, dict[str, str], bytes]] | None = None
        self._is_head_request = False
        self._head = bytearray(FIRST_BYTES)
        self._filled = 0
        self._status = 0
        self._fields: dict[str, str] = {}
        self._body: bytearray | None = None

    def ask(
        self, head: bytes, *, is_head_request: bool
    ) -> asyncio.Future[tuple[int, dict[str, str], bytes]]:
        """Send a request; its status, fields and body. Raises (from the future): PeerLost."""
        assert self._coming is None
        coming = self._coming = asyncio.get_running_loop().create_future()
        self._is_head_request = is_head_request
        self._filled, self._body = 0, None
        assert self._transport is not None
        self._transport.write(head)
        return coming

    def close(self) -> None:
        """End it now, whatever is under way."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the library's word
        into = self._head if self._body is None else self._body
        return memoryview(into)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._coming is None:
            self.close()
            return
        try:
            if self._body is None and not self._take_head():
                return
        except ValueError as error:
            self.fail(PeerLost(f"a node answers no HTTP ({error})"))
            return
        if self._body is not None and self._filled == len(self._body):
            self._finish(bytes(self._body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        is_unheard = self._body is None and self._filled == 0
        why = type(exc).__name__ if exc else "closed"
        self.fail(
            PeerLost(f"a node's connection ended ({why})", is_gone=True, is_unheard=is_unheard)
        )
        self._on_lost(self)

    def _take_head(self) -> bool:
        """Whether the head is complete; its body is begun then."""
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == len(self._head):
                raise ValueError("its head is too long")
            return False
        self._status, self._fields = parse_answer_head(bytes(self._head[:end]))
        has_body = not self._is_head_request and self._status not in NO_BODY
        length_bytes = int(self._fields["content-length"]) if has_body else 0
        begun = self._head[end + 4 : self._filled]
        if not len(begun) <= length_bytes <= BODY_BYTES_MAX:
            raise ValueError("its body has another length than it may")
        self._body = bytearray(length_bytes)
        self._body[: len(begun)] = begun
        self._filled = len(begun)
        return True

    def _finish(self, body: bytes) -> None:
        coming, self._coming = self._coming, None
        self._filled, self._body = 0, None
        if self._fields.get("connection", "").lower() == "close":
            self.close()
        if coming is not None and not coming.done():
            coming.set_result((self._status, self._fields, body))

    def fail(self, error: PeerLost) -> None:
        """End it, with `error` for whoever waits."""
        coming, self._coming = self._coming, None
        self.close()
        if coming is not None and not coming.done():
            coming.set_exception(error)


class Peer:
    """One other node: its connections and what is known of its health."""

    def __init__(
        self,
        member: Member,
        signer: HopSigner,
        *,
        timeout_s: float,
        on_slow: Callable[[Peer], None] = lambda _: None,
    ) -> None:
        self.name = member.name
        self.dc = member.dc
        self.address = member.address
        self.health = Health()
        self._host, self._port = parse_listen(member.address)
        self._signer = signer
        self._timeout_s = timeout_s
        self._on_slow = on_slow
        self._turns = asyncio.Semaphore(LINES_MAX)
        self._idle: list[_Line] = []
        self._busy: set[_Line] = set()

    async def ask(self, asked: Asked) -> Answer:
        """Its answer, whatever the status.

        Asked once more where a kept connection ended unheard: the other side may have found it idle too long.

        Raises: PeerLost.
        """
        await self._take_turn()
        try:
            line = self._take_idle()
            if line is not None:
                try:
                    return await self._exchange(line, asked)
                except PeerLost as error:
                    if not error.is_unheard or not self.health.is_usable:
                        raise
            return await self._exchange(await self._connect(), asked)
        finally:
            self._turns.release()

    async def probe(self) -> bool:
        """Whether it says that it serves, over a connection of its own."""
        line: _Line | None = None
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                line = await self._connect()
                head = f"GET /healthz HTTP/1.1\r\nHost: {self.address}\r\n\r\n".encode()
                status, _, _ = await line.ask(head, is_head_request=False)
        except (PeerLost, TimeoutError):
            return False
        finally:
            if line is not None:
                line.close()
        return status == 200

    def drop(self) -> None:
        """End every connection: whoever waits asks the next node."""
        for line in [*self._idle, *self._busy]:
            line.close()

    def close(self) -> None:
        """End every connection and keep no new one."""
        self.health.is_usable = False
        self.drop()

    async def _connect(self) -> _Line:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, line = await loop.create_connection(
                    lambda: _Line(self._signer.line(), self._forget), self._host, self._port
                )
        except (OSError, socket.gaierror) as error:
            # TimeoutError is an OSError: a peer that drops packets is as gone as one that refuses.
            raise PeerLost(
                f"node {self.name} at {self.address} cannot be reached ({type(error).__name__})",
                is_gone=not isinstance(error, TimeoutError),
            ) from error
        return line

    async def _take_turn(self) -> None:
        """Wait while LINES_MAX exchanges are under way; a timeout is made only where one has to wait."""
        if not self._turns.locked():
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise PeerLost(f"node {self.name} has no turn in {self._timeout_s:g} s") from error

    def _take_idle(self) -> _Line | None:
        while self._idle:
            line = self._idle.pop()
            if line.is_open:
                return line
        return None

    async def _exchange(self, line: _Line, asked: Asked) -> Answer:
        head, mac = self._head(line, asked)
        line.watch = asyncio.get_running_loop().call_later(SLOW_S, self._is_slow, line)
        self._busy.add(line)
        is_kept = False
        try:
            found = await line.ask(head, is_head_request=asked.method == "HEAD")
            is_kept = line.is_open and self.health.is_usable and len(self._idle) < LINES_KEPT
            return Answer(*found, mac)
        finally:
            if line.watch is not None:
                line.watch.cancel()
            self._busy.discard(line)
            if is_kept:
                self._idle.append(line)
            else:
                line.close()

    def _is_slow(self, line: _Line) -> None:
        """One timer an exchange: first for whoever wants to know, then as its end."""
        left_s = max(0.0, self._timeout_s - SLOW_S)
        error = PeerLost(f"node {self.name} did not answer in {self._timeout_s:g} s")
        line.watch = asyncio.get_running_loop().call_later(left_s, line.fail, error)
        self._on_slow(self)

    def _head(self, line: _Line, asked: Asked) -> tuple[bytes, str]:
        covered = covered_by(asked.method, asked.target, dict(asked.fields))
        value, mac = line.signing.sign(self.name, covered, asked.generation)
        fields = [("host", self.address), (HOP_FIELD, value), *asked.fields]
        lines = [f"{asked.method} {asked.target} HTTP/1.1", *(f"{n}: {v}" for n, v in fields)]
        return "\r\n".join([*lines, "\r\n"]).encode("latin-1"), mac

    def _forget(self, line: _Line) -> None:
        if line in self._idle:
            self._idle.remove(line)


def target_of(key: str) -> str:
    """The path of `key`; keys hold nothing that a path would escape."""
    return f"/m/{key}"


def parse_answer_head(data: bytes) -> tuple[int, dict[str, str]]:
    """Status and fields of an answer's head without its empty line. Raises: ValueError."""
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest.partition(" ")[0]
    if version != "HTTP/1.1" or not (status.isascii() and status.isdecimal() and len(status) == 3):
        raise ValueError("its first line is no status")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name in fields:
            raise ValueError("a field is malformed or came twice")
        fields[name] = value.strip(" \t")
    length = fields.get("content-length", "0")
    if "transfer-encoding" in fields or not (length.isascii() and length.isdecimal()):
        raise ValueError("its length is unclear")
    fields.setdefault("content-length", "0")
    return int(status), fields
