"""libcurl on asyncio: the options and callbacks of one request, its body, and the multi handle.

libcurl never follows a redirect itself, because CONNECT_TO does not cover the next host. It
ignores proxies of the environment and is pinned to the checked address by CONNECT_TO. Two hooks
make the final decision: the open-socket hook refuses a socket to a forbidden address, and the
pre-request hook refuses a request on a kept connection to one. The second hook also consumes the
rate-limit token, since libcurl repeats a request when a kept connection was dead.

Body parts are kept as they arrive and joined, hashed and written in large steps, in memory up to 1
MiB, then on disk. libcurl reports which sockets it waits for, and the event loop watches them.
Callbacks run on the loop's thread and never remove a handle: the waiter does.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final, Self

import certifi
import pycurl

from headrace.fetch.guard import (
    OPEN_NETWORK,
    OPEN_PORT,
    Address,
    Policy,
    Target,
    forbidden_reason,
)
from headrace.fetch.limits import RateTokens
from headrace.fetch.model import PhotoStep
from headrace.fetch.settings import FetchConfig

REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
HEADER_BYTES_MAX: Final = 32 * 1024
ERROR_BODY_BYTES_MAX: Final = 16 * 1024
READ_BYTES: Final = 256 * 1024
"""Read buffer, shared by all transfers; with the default 16 KiB a photo costs 16 % more CPU."""
IMAGES: Final = "image/avif,image/webp,image/png,image/jpeg,image/gif;q=0.9,*/*;q=0.1"
HELD_BYTES_MAX: Final = 2**20
CONNECTIONS_KEPT: Final = 1024
TICK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one download, and the type that it requests."""

    time_s: float
    """Of all its requests together, without waits for rate-limit tokens."""
    bytes_max: int
    """0: the body is dropped."""
    accept: str = IMAGES
    takes_gzip: bool = False
    """Accept a gzip body; it is stored compressed."""
    connections: int | None = None
    """Of this process to a host. None: as many as the fleet may have."""


@dataclass(frozen=True, slots=True)
class Validators:
    """ETag and date of a stored copy, for a conditional request."""

    etag: str | None = None
    last_modified: str | None = None


class Body:
    """A response body; a context manager that closes it."""

    __slots__ = ("_file", "_hash", "_held", "_held_bytes")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, part: bytes) -> None:
        """Append a part. Raises: OSError."""
        self._held.append(part)
        self._held_bytes += len(part)
        if self._held_bytes > HELD_BYTES_MAX:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            self._file.write(self._pop_parts())

    def sha256(self) -> str:
        """SHA-256 of all parts so far, in hex."""
        found = self._hash.copy()
        for part in self._joined():
            found.update(part)
        return found.hexdigest()

    def read(self) -> bytes:
        """The complete body. Raises: OSError."""
        if self._file is None:
            return b"".join(self._joined())
        self._file.seek(0)
        return b"".join((self._file.read(), *self._joined()))

    def copy_to(self, path: Path) -> None:
        """Write the complete body to a file. Raises: OSError."""
        with path.open("wb") as file:
            if self._file is not None:
                self._file.seek(0)
                shutil.copyfileobj(self._file, file, HELD_BYTES_MAX)
            file.writelines(self._joined())

    def close(self) -> None:
        """Free the memory and the file."""
        self._held = []
        if self._file is not None:
            self._file.close()

    def _joined(self) -> list[bytes]:
        """The parts in memory, joined into one."""
        if len(self._held) > 1:
            self._held = [b"".join(self._held)]
        return self._held

    def _pop_parts(self) -> bytes:
        """Hash, remove and return the parts in memory."""
        data = b"".join(self._held)
        self._hash.update(data)
        self._held, self._held_bytes = [], 0
        return data


@dataclass(slots=True)
class Exchange:
    """State of one request, filled by libcurl's callbacks."""

    policy: Policy
    bounds: Bounds
    tokens: RateTokens
    status: int = 0
    header_bytes: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Body = field(default_factory=Body)
    body_bytes: int = 0
    stopped: tuple[str, str] | None = None
    """(outcome, text) if a callback stopped the transfer."""
    is_sent: bool = False
    needs_token: bool = False
    """The hook stopped a repeated send, which needs a token of its own."""
    is_dropped: bool = False
    """The body of an error or redirect was not read to its end."""
    error: TransferFailed | None = None

    @property
    def is_refusal(self) -> bool:
        """The host responded with an error, which no callback refused."""
        return self.status >= 400 and self.stopped is None

    @property
    def retry_after_s(self) -> float | None:
        """Seconds of the Retry-After header; None if it is missing, malformed or in the past."""
        return parsed_retry_after_s(self.headers.get("retry-after"))

    def open_socket(self, _purpose: int, address: tuple[int, int, int, tuple[Any, ...]]) -> Any:
        """Refuse a socket to a forbidden address."""
        family, kind, protocol, peer = address
        reason = peer_reason(peer[0], int(peer[1]), self.policy)
        if reason is not None:
            self.stopped = ("refused:forbidden_address", reason)
            return pycurl.SOCKET_BAD
        return socket.socket(family, kind, protocol)

    def before_request(self, peer: str, _local: str, port: int, _local_port: int) -> int:
        """Refuse a request over a forbidden connection, or without a rate-limit token."""
        reason = peer_reason(peer, port, self.policy)
        if reason is not None:
            self.stopped = ("refused:forbidden_address", reason)
            return int(pycurl.PREREQFUNC_ABORT)
        if not self.tokens.consume():
            self.needs_token = True
            return int(pycurl.PREREQFUNC_ABORT)
        self.is_sent = True
        return int(pycurl.PREREQFUNC_OK)

    def on_header(self, line: bytes) -> int | None:
        """Store a header line; a status line resets the headers."""
        self.header_bytes += len(line)
        if self.header_bytes > HEADER_BYTES_MAX:
            self.stopped = (
                "refused:headers_too_large",
                f"the headers are over {HEADER_BYTES_MAX} bytes",
            )
            return -1
        text = line.decode("latin-1").strip()
        if text.startswith("HTTP/"):
            status = text.split(" ", 2)[1:2]
            self.status = int(status[0]) if status and status[0].isdigit() else 0
            self.headers = {}
        elif ":" in text:
            name, _, value = text.partition(":")
            self.headers.setdefault(name.strip().lower(), value.strip())
        return None

    def on_body(self, block: bytes) -> int | None:
        """Store a part of the body of a requested 200; drop other bodies up to a limit."""
        self.body_bytes += len(block)
        if self.status != 200 or not self.bounds.bytes_max:
            if self.status in REDIRECTS or self.body_bytes > ERROR_BODY_BYTES_MAX:
                self.is_dropped = True
                return -1
            return None
        encoding = self.headers.get("content-encoding", "identity").lower()
        is_packed = encoding not in ("identity", "")
        if is_packed and not (self.bounds.takes_gzip and encoding in ("gzip", "x-gzip")):
            self.stopped = (
                "refused:encoding",
                f"the body has Content-Encoding {encoding[:40]}, identity was requested",
            )
            return -1
        if self.body_bytes > self.bounds.bytes_max:
            self.stopped = (
                "refused:too_large",
                f"the body is over {self.bounds.bytes_max:,} bytes",
            )
            return -1
        self.body.add(block)
        return None

    def step(self, target: Target, address: Address, handle: Any) -> PhotoStep:
        """The request as a step of a report."""
        return PhotoStep(
            url=target.url,
            address=str(address),
            status=self.status,
            connect_s=handle.getinfo(pycurl.APPCONNECT_TIME) or handle.getinfo(pycurl.CONNECT_TIME),
            first_byte_s=handle.getinfo(pycurl.STARTTRANSFER_TIME),
            took_s=handle.getinfo(pycurl.TOTAL_TIME),
            is_sent=self.is_sent,
        )


def parsed_retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After; None if it is malformed or in the past."""
    if value is None:
        return None
    if value.isdigit():
        seconds = float(value[:9])
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return seconds if seconds > 0 else None


@lru_cache(maxsize=10_000)
def peer_reason(peer: str | bytes, port: int, policy: Policy) -> str | None:
    """Why a peer is forbidden, or None if it is allowed."""
    host = peer.decode() if isinstance(peer, bytes) else peer
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host} is not an IP address"
    reason = forbidden_reason(address, policy)
    if reason is not None:
        return f"{reason}; {OPEN_NETWORK}"
    if port not in policy.ports:
        return f"port {port} of {address} is not allowed; {OPEN_PORT}"
    return None


def new_handle(config: FetchConfig, target: Target, address: Address, exchange: Exchange) -> Any:
    """A transfer that connects to `address` only; the caller sets headers and timeouts."""
    handle = pycurl.Curl()
    host = f"[{target.host}]" if ":" in target.host else target.host
    peer = f"[{address}]" if address.version == 6 else str(address)
    handle.setopt(pycurl.URL, target.url)
    handle.setopt(pycurl.CONNECT_TO, [f"{host}:{target.port}:{peer}:{target.port}"])
    handle.setopt(pycurl.OPENSOCKETFUNCTION, exchange.open_socket)
    handle.setopt(pycurl.HEADERFUNCTION, exchange.on_header)
    handle.setopt(pycurl.WRITEFUNCTION, exchange.on_body)
    handle.setopt(pycurl.USERAGENT, config.user_agent)
    handle.setopt(pycurl.PROXY, "")
    handle.setopt(pycurl.NOSIGNAL, 1)
    handle.setopt(pycurl.FOLLOWLOCATION, 0)
    handle.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    handle.setopt(pycurl.CAINFO, config.ca_file or certifi.where())
    handle.setopt(pycurl.PREREQFUNCTION, exchange.before_request)
    handle.setopt(pycurl.BUFFERSIZE, READ_BYTES)
    handle.setopt(pycurl.HTTP_CONTENT_DECODING, 0)
    handle.setopt(pycurl.MAXFILESIZE_LARGE, exchange.bounds.bytes_max)
    return handle


def request_headers(bounds: Bounds, known: Validators) -> list[str]:
    """Request headers: accepted types and encodings, validators of the stored copy."""
    encoding = "gzip, identity" if bounds.takes_gzip else "identity"
    headers = [f"Accept: {bounds.accept}", f"Accept-Encoding: {encoding}"]
    if known.etag:
        headers.append(f"If-None-Match: {known.etag}")
    elif known.last_modified:
        headers.append(f"If-Modified-Since: {known.last_modified}")
    return headers


class TransferFailed(Exception):
    """libcurl ended a transfer with an error.

    `number` is one of `pycurl.E_*`, `verify_result` OpenSSL's result for the host's certificate.
    """

    def __init__(self, number: int, text: str, verify_result: int) -> None:
        super().__init__(text)
        self.number = number
        self.text = text
        self.verify_result = verify_result


class AsyncCurl:
    """A CurlMulti handle on the running event loop: one future per transfer."""

    stalled_s: float = 0.0
    """Total time in which this process was too busy to read its sockets during transfers.

    It is not counted as the host's time: on an overloaded machine a fast host would appear slow.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticking: asyncio.TimerHandle | None = None
        self._multi: Any = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, CONNECTIONS_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Any, asyncio.Future[None]] = {}
        self._watched: dict[int, int] = {}

    async def perform(self, handle: Any) -> None:
        """Run a transfer to its end; cancellation stops it at once. Raises: TransferFailed."""
        future = self._loop.create_future()
        self._waiting[handle] = future
        if self._ticking is None:
            self._tick_soon()
        try:
            self._multi.add_handle(handle)
            await future
        finally:
            del self._waiting[handle]
            self._multi.remove_handle(handle)

    def close(self) -> None:
        """Close every connection; no transfer may be running."""
        for timer in (self._timer, self._ticking):
            if timer is not None:
                timer.cancel()
        for descriptor in list(self._watched):
            self._unwatch(descriptor)
        self._multi.close()

    def _tick_soon(self) -> None:
        due_s = time.monotonic() + TICK_S
        self._ticking = self._loop.call_later(TICK_S, self._tick, due_s)

    def _tick(self, due_s: float) -> None:
        """Measure the delay of the event loop while transfers run."""
        self.stalled_s += max(0.0, time.monotonic() - due_s - TICK_S / 4)
        self._ticking = None
        if self._waiting:
            self._tick_soon()

    def _watch(self, what: int, descriptor: int, _multi: Any, _data: Any) -> None:
        self._unwatch(descriptor)
        if what == pycurl.POLL_REMOVE:
            return
        self._watched[descriptor] = what
        if what & pycurl.POLL_IN:
            self._loop.add_reader(descriptor, self._act, descriptor, pycurl.CSELECT_IN)
        if what & pycurl.POLL_OUT:
            self._loop.add_writer(descriptor, self._act, descriptor, pycurl.CSELECT_OUT)

    def _unwatch(self, descriptor: int) -> None:
        what = self._watched.pop(descriptor, 0)
        if what & pycurl.POLL_IN:
            self._loop.remove_reader(descriptor)
        if what & pycurl.POLL_OUT:
            self._loop.remove_writer(descriptor)

    def _set_timer(self, timeout_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if timeout_ms >= 0:
            self._timer = self._loop.call_later(
                timeout_ms / 1000, self._act, pycurl.SOCKET_TIMEOUT, 0
            )

    def _act(self, descriptor: int, events: int) -> None:
        self._multi.socket_action(descriptor, events)
        while True:
            left, done, failed = self._multi.info_read()
            for handle in done:
                self._end(handle, None)
            for handle, number, text in failed:
                verified = handle.getinfo(pycurl.SSL_VERIFYRESULT)
                self._end(handle, TransferFailed(number, text, verified))
            if not left:
                return

    def _end(self, handle: Any, error: TransferFailed | None) -> None:
        future = self._waiting.get(handle)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
