"""A POST to an address that a customer gave: the same rules as for photos, and nothing is followed.

The URL is judged as it is read, every address of its name is judged, the connection is pinned to a judged
one, and the open-socket hook judges the peer once more: it is the judge. A redirect is an answer like any
other, proxies of the environment are ignored, and of the answer only status and Retry-After count.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, Final

import certifi
import pycurl

from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import Address, Policy, Target, forbidden_reason, judge_url
from headrace.fetch.names import NameFailed, Names
from headrace.fetch.settings import FetchConfig
from headrace.fetch.transfers import TransferFailed, Transfers

ANSWER_BYTES_MAX: Final = 64 * 1024
HEADER_BYTES_MAX: Final = 32 * 1024
CONNECT_TIMEOUT_S: Final = 10.0
ADDRESSES_TRIED: Final = 2


class PostFailed(Exception):
    """No answer came; `text` says why."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class NotConnected(PostFailed):
    """Nobody listens there."""


@dataclass(frozen=True, slots=True)
class Posted:
    """What was answered."""

    status: int
    retry_after_s: float | None = None


@dataclass(slots=True)
class _Exchange:
    """What libcurl's callbacks gather of one POST."""

    policy: Policy
    status: int = 0
    retry_after: str = ""
    header_bytes: int = 0
    body_bytes: int = 0
    refused: str | None = None
    is_cut: bool = False
    """The rest of a long answer was not read; its status counts."""

    def open_socket(self, _purpose: int, address: tuple[int, int, int, tuple[Any, ...]]) -> Any:
        """Judge the address that is really connected to."""
        family, kind, protocol, peer = address
        host = peer[0].decode() if isinstance(peer[0], bytes) else str(peer[0])
        reason = forbidden_reason(ipaddress.ip_address(host), self.policy)
        if reason is None and int(peer[1]) not in self.policy.ports:
            reason = f"port {peer[1]} is not allowed"
        if reason is not None:
            self.refused = reason
            return pycurl.SOCKET_BAD
        return socket.socket(family, kind, protocol)

    def on_header(self, line: bytes) -> int | None:
        """Keep the last status line and its Retry-After."""
        self.header_bytes += len(line)
        if self.header_bytes > HEADER_BYTES_MAX:
            self.is_cut = self.status > 0
            return -1
        text = line.decode("latin-1").strip()
        if text.startswith("HTTP/"):
            words = text.split(None, 2)
            self.status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        elif text.lower().startswith("retry-after:"):
            self.retry_after = text.partition(":")[2].strip()
        return None

    def on_body(self, block: bytes) -> int | None:
        """Drop the body, and stop where it is long."""
        self.body_bytes += len(block)
        if self.body_bytes > ANSWER_BYTES_MAX:
            self.is_cut = True
            return -1
        return None


class Poster:
    """POSTs of one process; opens nothing before the first."""

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self.policy = Policy.of(config.allow_networks, config.allow_ports)
        self._names = Names(config.name_servers)
        self._transfers: Transfers | None = None

    async def close(self) -> None:
        """Close connections and the resolver."""
        await self._names.close()
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None

    async def post(self, url: str, headers: list[str], body: bytes) -> Posted:
        """POST `body` and say what was answered, within `fetch.webhook_timeout`. Raises: PostFailed."""
        limit_s = self._config.webhook_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                target = judge_url(url, self.policy)
                return await self._post_to_any(target, headers, body)
        except UrlRefused as error:
            raise PostFailed(error.text) from None
        except TimeoutError:
            raise PostFailed(f"no answer within {limit_s:g} s") from None

    async def _post_to_any(self, target: Target, headers: list[str], body: bytes) -> Posted:
        """Try the second address where the first cannot be connected to."""
        addresses = (await self._addresses_of(target))[:ADDRESSES_TRIED]
        for address in addresses[:-1]:
            try:
                return await self._post(target, address, headers, body)
            except NotConnected:
                continue
        return await self._post(target, addresses[-1], headers, body)

    async def _addresses_of(self, target: Target) -> tuple[Address, ...]:
        if target.literal is not None:
            return (target.literal,)
        try:
            addresses = await self._names.resolve(target.host)
        except NameFailed as error:
            raise PostFailed(f"the name {target.host} cannot be resolved: {error}") from None
        for address in addresses:
            reason = forbidden_reason(address, self.policy)
            if reason is not None:
                raise PostFailed(f"{target.host}: {reason}")
        return addresses

    async def _post(
        self, target: Target, address: Address, headers: list[str], body: bytes
    ) -> Posted:
        exchange = _Exchange(self.policy)
        if self._transfers is None:
            self._transfers = Transfers()
        handle = self._handle(target, address, exchange)
        handle.setopt(pycurl.HTTPHEADER, [*headers, "Accept: */*", "Expect:"])
        handle.setopt(pycurl.POSTFIELDS, body)
        try:
            await self._transfers.perform(handle)
        except TransferFailed as error:
            if error.number == pycurl.E_COULDNT_CONNECT:
                raise NotConnected(exchange.refused or error.text) from None
            if not exchange.is_cut:
                raise PostFailed(exchange.refused or error.text) from None
        finally:
            handle.close()
        seconds = exchange.retry_after
        return Posted(exchange.status, float(seconds[:9]) if seconds.isdigit() else None)

    def _handle(self, target: Target, address: Address, exchange: _Exchange) -> Any:
        handle = pycurl.Curl()
        host = f"[{target.host}]" if ":" in target.host else target.host
        peer = f"[{address}]" if address.version == 6 else str(address)
        handle.setopt(pycurl.URL, target.url)
        handle.setopt(pycurl.CONNECT_TO, [f"{host}:{target.port}:{peer}:{target.port}"])
        handle.setopt(pycurl.OPENSOCKETFUNCTION, exchange.open_socket)
        handle.setopt(pycurl.HEADERFUNCTION, exchange.on_header)
        handle.setopt(pycurl.WRITEFUNCTION, exchange.on_body)
        handle.setopt(pycurl.USERAGENT, self._config.user_agent)
        handle.setopt(pycurl.PROXY, "")
        handle.setopt(pycurl.NOSIGNAL, 1)
        handle.setopt(pycurl.POST, 1)
        handle.setopt(pycurl.FOLLOWLOCATION, 0)
        handle.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, int(CONNECT_TIMEOUT_S * 1000))
        handle.setopt(pycurl.TIMEOUT_MS, max(1, int(self._config.webhook_timeout_s * 1000)))
        handle.setopt(pycurl.CAINFO, self._config.ca_file or certifi.where())
        return handle
