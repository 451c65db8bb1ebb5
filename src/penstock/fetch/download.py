"""One photo from a stranger's host, within bounds: every hop judged, every fault an outcome.

    judge the URL -> resolve -> judge every address -> connect to that address -> the open-socket hook
    judges the peer again -> headers -> body through SHA-256 -> a redirect starts over with the next URL

libcurl never follows a redirect itself (CONNECT_TO does not cover the next host: seen to follow to a
private address), never reads a proxy from the environment, and is pinned to the judged address by
CONNECT_TO, whose connections are pooled by address. The hook is the judge: whatever came before, no
socket to a forbidden address is ever opened. Bodies are kept in memory up to 1 MiB, then on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urljoin

import certifi
import pycurl

from penstock.fetch.guard import (
    OPEN_NETWORK,
    OPEN_PORT,
    Address,
    Policy,
    Target,
    forbidden_reason,
    judge_url,
)
from penstock.fetch.model import BYTES_RECEIVED, FetchConfig, UrlRefused
from penstock.fetch.names import NameFailed, Names
from penstock.fetch.transfers import TransferFailed, Transfers

REDIRECTS_MAX: Final = 5
HEADER_BYTES_MAX: Final = 32 * 1024
ERROR_BODY_BYTES_MAX: Final = 16 * 1024
SPOOL_BYTES: Final = 2**20
CONNECT_TIMEOUT_S: Final = 10.0
SLOW_BYTES_PER_S: Final = 100
SLOW_S: Final = 10
RETRY_AFTER_S_MAX: Final = 86_400.0
VALIDATOR_CHARACTERS_MAX: Final = 1024
HOSTS_MAX: Final = 10_000
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_TLS: Final = frozenset(
    {
        pycurl.E_SSL_CONNECT_ERROR,
        pycurl.E_PEER_FAILED_VERIFICATION,
        pycurl.E_SSL_CACERT_BADFILE,
        pycurl.E_SSL_CERTPROBLEM,
        pycurl.E_SSL_CIPHER,
        pycurl.E_SSL_ISSUER_ERROR,
    }
)
_CODES: Final = {
    pycurl.E_COULDNT_RESOLVE_HOST: "dns",
    pycurl.E_COULDNT_CONNECT: "connect",
    pycurl.E_PARTIAL_FILE: "truncated",
    pycurl.E_GOT_NOTHING: "reset",
    pycurl.E_SEND_ERROR: "reset",
    pycurl.E_RECV_ERROR: "reset",
}


@dataclass(frozen=True, slots=True)
class Known:
    """The validators of a stored copy, to ask whether it changed."""

    etag: str | None = None
    last_modified: str | None = None


@dataclass(slots=True)
class Download:
    """How it ended: `outcome` is `received`, `unchanged`, `refused:<code>` or `failed:<code>`."""

    outcome: str
    text: str
    hops: list[str] = field(default_factory=list)
    took_s: float = 0.0
    body: tempfile.SpooledTemporaryFile[bytes] | None = None
    size_bytes: int = 0
    sha256: str | None = None
    etag: str | None = None
    last_modified: str | None = None
    retry_after_s: float | None = None


class _Ended(Exception):
    def __init__(self, outcome: str, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Hop:
    """What libcurl's callbacks gather of one request."""

    policy: Policy
    bytes_max: int
    status: int = 0
    header_bytes: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: tempfile.SpooledTemporaryFile[bytes] = field(
        default_factory=lambda: tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 - kept
    )
    body_bytes: int = 0
    hash: Any = field(default_factory=hashlib.sha256)
    stopped: tuple[str, str] | None = None
    """(outcome, text) where a callback of ours stopped the transfer."""
    is_dropped: bool = False
    """The rest of an uninteresting body was not read."""

    def open_socket(self, _purpose: int, address: tuple[int, int, int, tuple[Any, ...]]) -> Any:
        """The judge of the address that is really connected."""
        family, kind, protocol, peer = address
        reason = _peer_reason(peer, self.policy)
        if reason is not None:
            self.stopped = ("refused:forbidden_address", reason)
            return pycurl.SOCKET_BAD
        return _new_socket(family, kind, protocol)

    def on_header(self, line: bytes) -> int | None:
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
        self.body_bytes += len(block)
        if self.status != 200:
            if self.status in _REDIRECTS or self.body_bytes > ERROR_BODY_BYTES_MAX:
                self.is_dropped = True
                return -1
            return None
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", ""):
            self.stopped = (
                "refused:encoding",
                f"the body is packed ({encoding[:40]}) although plain was asked for",
            )
            return -1
        if self.body_bytes > self.bytes_max:
            self.stopped = ("refused:too_large", f"the body is over {self.bytes_max:,} bytes")
            return -1
        self.hash.update(block)
        self.body.write(block)
        return None


def _peer_reason(peer: tuple[Any, ...], policy: Policy) -> str | None:
    host = peer[0].decode() if isinstance(peer[0], bytes) else str(peer[0])
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host} is no address"
    reason = forbidden_reason(address, policy)
    if reason is not None:
        return f"{reason}; {OPEN_NETWORK}"
    if int(peer[1]) not in policy.ports:
        return f"port {peer[1]} of {address} is not allowed; {OPEN_PORT}"
    return None


def _new_socket(family: int, kind: int, protocol: int) -> Any:
    return socket.socket(family, kind, protocol)


class Downloader:
    """Downloads of one process: one resolver, one multi handle, a bound of connections a host."""

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self.policy = Policy.of(config.allow_networks, config.allow_ports)
        self._names = Names(config.name_servers)
        self._transfers: Transfers | None = None
        self._hosts: OrderedDict[tuple[str, int], asyncio.Semaphore] = OrderedDict()

    async def close(self) -> None:
        """Close connections and the resolver."""
        await self._names.close()
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None

    async def download(self, url: str, known: Known | None = None) -> Download:
        """Bring the body of `url`; never raises for what a host or its URL does.

        The time of all hops together is bounded by `fetch.timeout`; waiting for a free connection to
        the host is not part of it.
        """
        hops: list[str] = []
        started_s = time.monotonic()
        try:
            target = judge_url(url, self.policy)
            async with self._slot(target):
                started_s = time.monotonic()
                async with asyncio.timeout(self._config.timeout_s):
                    found = await self._follow(target, known or Known(), hops)
        except UrlRefused as error:
            found = Download(f"refused:{error.reason}", error.text)
        except _Ended as ended:
            found = Download(ended.outcome, ended.text, retry_after_s=ended.retry_after_s)
        except TimeoutError:
            found = Download("failed:timeout", f"not done within {self._config.timeout_s:g} s")
        found.hops = hops
        found.took_s = time.monotonic() - started_s
        return found

    def _slot(self, target: Target) -> asyncio.Semaphore:
        key = (target.host, target.port)
        slot = self._hosts.get(key)
        if slot is None:
            slot = self._hosts[key] = asyncio.Semaphore(max(1, self._config.host_connections))
            if len(self._hosts) > HOSTS_MAX:
                self._hosts.popitem(last=False)
        return slot

    async def _follow(self, target: Target, known: Known, hops: list[str]) -> Download:
        seen = {target.url}
        while True:
            hops.append(target.url)
            hop = await self._ask(target, known)
            if hop.status not in _REDIRECTS:
                return self._finish(hop, known)
            if len(hops) > REDIRECTS_MAX:
                raise _Ended("refused:redirect_limit", f"more than {REDIRECTS_MAX} redirects")
            target = self._next_target(target, hop)
            if target.url in seen:
                raise _Ended(
                    "refused:redirect_loop", f"the redirects come back to {target.url[:200]}"
                )
            seen.add(target.url)

    def _next_target(self, target: Target, hop: _Hop) -> Target:
        location = hop.headers.get("location", "")
        if not location:
            raise _Ended(
                "refused:redirect_without_location", f"status {hop.status} without a Location"
            )
        try:
            # Header bytes were read as Latin-1; what a server means by them is UTF-8.
            text = location.encode("latin-1").decode("utf-8", errors="replace")
            following = judge_url(urljoin(target.url, text), self.policy)
        except UrlRefused as error:
            code = (
                error.reason if error.reason == "forbidden_address" else f"redirect_{error.reason}"
            )
            raise _Ended(f"refused:{code}", f"redirected to a refused URL: {error.text}") from None
        except ValueError:
            raise _Ended("refused:redirect_syntax", "the Location is no URL") from None
        if target.scheme == "https" and following.scheme == "http":
            raise _Ended("refused:redirect_downgrade", "redirected from https to http")
        return following

    async def _ask(self, target: Target, known: Known) -> _Hop:
        """One request; tries the second address when the first does not connect."""
        addresses = await self._addresses(target)
        for address in addresses[:2]:
            hop = _Hop(self.policy, self._config.photo_max_bytes)
            handle = self._handle(target, address, known, hop)
            if self._transfers is None:
                self._transfers = Transfers()
            try:
                await self._transfers.perform(handle)
            except TransferFailed as error:
                if hop.is_dropped:
                    return hop
                if (
                    error.number == pycurl.E_COULDNT_CONNECT
                    and hop.stopped is None
                    and address != addresses[:2][-1]
                ):
                    continue
                raise _ended_by(hop, error) from None
            finally:
                handle.close()
            return hop
        raise _Ended("failed:connect", f"no connection to {target.host}")

    async def _addresses(self, target: Target) -> tuple[Address, ...]:
        """Where to connect; one bad answer among several refuses the name."""
        if target.literal is not None:
            return (target.literal,)
        try:
            addresses = await self._names.resolve(target.host)
        except NameFailed as error:
            raise _Ended("failed:dns", f"{target.host}: {error}") from None
        for address in addresses:
            reason = forbidden_reason(address, self.policy)
            if reason is not None:
                raise _Ended(
                    "refused:forbidden_address",
                    f"{target.host}: {reason}; {OPEN_NETWORK}",
                )
        return addresses

    def _handle(self, target: Target, address: Address, known: Known, hop: _Hop) -> Any:
        handle = pycurl.Curl()
        headers = ["Accept: image/avif,image/webp,image/png,image/jpeg,image/gif;q=0.9,*/*;q=0.1"]
        headers.append("Accept-Encoding: identity")
        if known.etag:
            headers.append(f"If-None-Match: {known.etag}")
        elif known.last_modified:
            headers.append(f"If-Modified-Since: {known.last_modified}")
        host = f"[{target.host}]" if ":" in target.host else target.host
        peer = f"[{address}]" if address.version == 6 else str(address)
        handle.setopt(pycurl.URL, target.url)
        handle.setopt(pycurl.CONNECT_TO, [f"{host}:{target.port}:{peer}:{target.port}"])
        handle.setopt(pycurl.OPENSOCKETFUNCTION, hop.open_socket)
        handle.setopt(pycurl.HEADERFUNCTION, hop.on_header)
        handle.setopt(pycurl.WRITEFUNCTION, hop.on_body)
        handle.setopt(pycurl.HTTPHEADER, headers)
        handle.setopt(pycurl.USERAGENT, self._config.user_agent)
        handle.setopt(pycurl.PROXY, "")
        handle.setopt(pycurl.NOSIGNAL, 1)
        handle.setopt(pycurl.FOLLOWLOCATION, 0)
        handle.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        handle.setopt(pycurl.HTTP_CONTENT_DECODING, 0)
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, int(CONNECT_TIMEOUT_S * 1000))
        handle.setopt(pycurl.TIMEOUT_MS, max(1, int(self._config.timeout_s * 1000)))
        handle.setopt(pycurl.LOW_SPEED_LIMIT, SLOW_BYTES_PER_S)
        handle.setopt(pycurl.LOW_SPEED_TIME, SLOW_S)
        handle.setopt(pycurl.MAXFILESIZE_LARGE, self._config.photo_max_bytes)
        handle.setopt(pycurl.CAINFO, self._config.ca_file or certifi.where())
        return handle

    def _finish(self, hop: _Hop, known: Known) -> Download:
        if hop.status == 304 and (known.etag or known.last_modified):
            return Download("unchanged", "the host says that it did not change")
        if hop.status == 200:
            BYTES_RECEIVED.inc(hop.body_bytes)
            return Download(
                "received",
                f"{hop.body_bytes:,} bytes",
                body=hop.body,
                size_bytes=hop.body_bytes,
                sha256=hop.hash.hexdigest(),
                etag=_validator(hop.headers.get("etag")),
                last_modified=_validator(hop.headers.get("last-modified")),
            )
        retry_after_s = _retry_after_s(hop.headers.get("retry-after"))
        if hop.status == 429:
            raise _Ended(
                "failed:rate_limited", "the host answers 429: too many requests", retry_after_s
            )
        raise _Ended(f"failed:http_{hop.status}", f"the host answers {hop.status}", retry_after_s)


def _ended_by(hop: _Hop, error: TransferFailed) -> _Ended:
    """The outcome of a transfer that libcurl gave up, or that a callback stopped."""
    if hop.stopped is not None:
        return _Ended(*hop.stopped)
    if error.number == pycurl.E_OPERATION_TIMEDOUT:
        code = "slow" if "too slow" in error.text else "timeout"
        return _Ended(f"failed:{code}", error.text)
    if error.number == pycurl.E_FILESIZE_EXCEEDED:
        return _Ended("refused:too_large", f"the body is over {hop.bytes_max:,} bytes")
    if error.number in _TLS:
        return _Ended("failed:tls", error.text)
    if error.number == pycurl.E_RECV_ERROR and hop.body_bytes:
        return _Ended("failed:truncated", f"the connection broke after {hop.body_bytes:,} bytes")
    return _Ended(f"failed:{_CODES.get(error.number, 'protocol')}", error.text)


def _validator(value: str | None) -> str | None:
    """An ETag or a date that can be sent back: printable ASCII of a bounded length."""
    if (
        not value
        or len(value) > VALIDATOR_CHARACTERS_MAX
        or not value.isascii()
        or not value.isprintable()
    ):
        return None
    return value


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After, capped at a day; None for what means nothing or lies in the past."""
    if value is None:
        return None
    if value.isdigit():
        seconds = float(value[:9])
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(seconds, RETRY_AFTER_S_MAX) if seconds > 0 else None
