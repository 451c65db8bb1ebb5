"""One request of a download: what libcurl is told, and what its callbacks gather and judge.

libcurl never follows a redirect itself (CONNECT_TO does not cover the next host: seen to follow to a
private address), never reads a proxy from the environment, and is pinned to the judged address by
CONNECT_TO, whose connections are pooled by address. Two hooks are the judges, whatever came before: no
socket to a forbidden address is opened, and no request goes out over one that was kept. The second
also asks for the request's start, since libcurl silently sends again when a kept connection was dead.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import certifi
import pycurl

from headrace.fetch.body import Body
from headrace.fetch.guard import (
    OPEN_NETWORK,
    OPEN_PORT,
    Address,
    Policy,
    Target,
    forbidden_reason,
)
from headrace.fetch.model import PhotoStep
from headrace.fetch.settings import FetchConfig
from headrace.fetch.starts import Starts
from headrace.fetch.transfers import TransferFailed

REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
HEADER_BYTES_MAX: Final = 32 * 1024
ERROR_BODY_BYTES_MAX: Final = 16 * 1024
READ_BYTES: Final = 256 * 1024
"""Read at once; the buffer is shared by all transfers. With the usual 16 KiB a photo costs 70 us more, of 430."""
IMAGES: Final = "image/avif,image/webp,image/png,image/jpeg,image/gif;q=0.9,*/*;q=0.1"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one download may cost, and what it asks for."""

    time_s: float
    """Of all its requests together, without waits for starts of ours."""
    bytes_max: int
    accept: str = IMAGES
    takes_packed: bool = False
    """Whether the body may come as gzip; it is kept as it comes."""


@dataclass(frozen=True, slots=True)
class Known:
    """The validators of a stored copy, to ask whether it changed."""

    etag: str | None = None
    last_modified: str | None = None


@dataclass(slots=True)
class Hop:
    """What libcurl's callbacks gather of one request."""

    policy: Policy
    bounds: Bounds
    starts: Starts
    status: int = 0
    header_bytes: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Body = field(default_factory=Body)
    body_bytes: int = 0
    stopped: tuple[str, str] | None = None
    """(outcome, text) where a callback of ours stopped the transfer."""
    is_sent: bool = False
    wants_start: bool = False
    """libcurl was about to send it again; it was stopped, for that is a request of its own."""
    is_dropped: bool = False
    """The rest of an uninteresting body was not read."""
    error: TransferFailed | None = None

    def open_socket(self, _purpose: int, address: tuple[int, int, int, tuple[Any, ...]]) -> Any:
        """The judge of the address that is really connected."""
        family, kind, protocol, peer = address
        reason = peer_reason(peer[0], int(peer[1]), self.policy)
        if reason is not None:
            self.stopped = ("refused:forbidden_address", reason)
            return pycurl.SOCKET_BAD
        return _new_socket(family, kind, protocol)

    def before_request(self, peer: str, _local: str, port: int, _local_port: int) -> int:
        """The judge of the connection that is used, and of whether a request may leave now."""
        reason = peer_reason(peer, port, self.policy)
        if reason is not None:
            self.stopped = ("refused:forbidden_address", reason)
            return int(pycurl.PREREQFUNC_ABORT)
        if not self.starts.send():
            self.wants_start = True
            return int(pycurl.PREREQFUNC_ABORT)
        self.is_sent = True
        return int(pycurl.PREREQFUNC_OK)

    def on_header(self, line: bytes) -> int | None:
        """Gather a header line; a new status line begins anew."""
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
        """Keep a part of the body of a 200; read no more of others than keeps the connection."""
        self.body_bytes += len(block)
        if self.status != 200:
            if self.status in REDIRECTS or self.body_bytes > ERROR_BODY_BYTES_MAX:
                self.is_dropped = True
                return -1
            return None
        encoding = self.headers.get("content-encoding", "identity").lower()
        is_packed = encoding not in ("identity", "")
        if is_packed and not (self.bounds.takes_packed and encoding in ("gzip", "x-gzip")):
            self.stopped = (
                "refused:encoding",
                f"the body is packed ({encoding[:40]}) although plain was asked for",
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
        """What happened, for people."""
        return PhotoStep(
            url=target.url,
            address=str(address),
            status=self.status,
            connect_s=handle.getinfo(pycurl.APPCONNECT_TIME) or handle.getinfo(pycurl.CONNECT_TIME),
            first_byte_s=handle.getinfo(pycurl.STARTTRANSFER_TIME),
            took_s=handle.getinfo(pycurl.TOTAL_TIME),
            is_sent=self.is_sent,
        )


@lru_cache(maxsize=10_000)
def peer_reason(peer: str | bytes, port: int, policy: Policy) -> str | None:
    """Why a peer may not be talked to, or None if it may."""
    host = peer.decode() if isinstance(peer, bytes) else peer
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host} is no address"
    reason = forbidden_reason(address, policy)
    if reason is not None:
        return f"{reason}; {OPEN_NETWORK}"
    if port not in policy.ports:
        return f"port {port} of {address} is not allowed; {OPEN_PORT}"
    return None


def _new_socket(family: int, kind: int, protocol: int) -> Any:
    return socket.socket(family, kind, protocol)


def new_handle(config: FetchConfig, target: Target, address: Address, hop: Hop) -> Any:
    """A transfer to `address` without validators and times, which differ from try to try."""
    handle = pycurl.Curl()
    host = f"[{target.host}]" if ":" in target.host else target.host
    peer = f"[{address}]" if address.version == 6 else str(address)
    handle.setopt(pycurl.URL, target.url)
    handle.setopt(pycurl.CONNECT_TO, [f"{host}:{target.port}:{peer}:{target.port}"])
    handle.setopt(pycurl.OPENSOCKETFUNCTION, hop.open_socket)
    handle.setopt(pycurl.PREREQFUNCTION, hop.before_request)
    handle.setopt(pycurl.HEADERFUNCTION, hop.on_header)
    handle.setopt(pycurl.WRITEFUNCTION, hop.on_body)
    handle.setopt(pycurl.USERAGENT, config.user_agent)
    handle.setopt(pycurl.PROXY, "")
    handle.setopt(pycurl.BUFFERSIZE, READ_BYTES)
    handle.setopt(pycurl.NOSIGNAL, 1)
    handle.setopt(pycurl.FOLLOWLOCATION, 0)
    handle.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    handle.setopt(pycurl.HTTP_CONTENT_DECODING, 0)
    handle.setopt(pycurl.MAXFILESIZE_LARGE, hop.bounds.bytes_max)
    handle.setopt(pycurl.CAINFO, config.ca_file or certifi.where())
    return handle


def request_headers(bounds: Bounds, known: Known) -> list[str]:
    """What is sent beside the usual: what is taken, and the validators of the copy that is there."""
    encoding = "gzip, identity" if bounds.takes_packed else "identity"
    headers = [f"Accept: {bounds.accept}", f"Accept-Encoding: {encoding}"]
    if known.etag:
        headers.append(f"If-None-Match: {known.etag}")
    elif known.last_modified:
        headers.append(f"If-Modified-Since: {known.last_modified}")
    return headers
