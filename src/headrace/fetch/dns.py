"""DNS resolution by c-ares, outside of libcurl, which resolves in 20 threads per process.

A few hanging names would occupy those threads and stop fast downloads. Lookups of one name are
single-flight. Answers, "no such name" included, are cached for seconds only, because a pinned
address that changed breaks a photo. A failure of the name server is not cached: the next attempt
queries it again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

import aiodns

from headrace.fetch.guard import Address
from headrace.kernel.single_flight import SingleFlight

CACHED_S: Final = 30.0
FAILURE_CACHED_S: Final = 10.0
LOOKUP_S_MAX: Final = 6.0
"""Time limit of one lookup with all its queries."""
TRIES_MAX: Final = 5
"""c-ares waits from 0.25 s for a server that was fast before, twice as long for each further
query.
"""
NAMES_MAX: Final = 20_000
_NO_SUCH_NAME: Final = frozenset({1, 4})  # ARES_ENODATA, ARES_ENOTFOUND


class DnsFailed(Exception):
    """The name cannot be resolved now."""


@dataclass(frozen=True, slots=True)
class _Cached:
    until_s: float
    addresses: tuple[Address, ...]
    failure: str | None


class DnsCache:
    """A resolver with a short-lived cache, for one event loop."""

    def __init__(self, servers: str | None = None) -> None:
        self._servers = [s.strip() for s in servers.split(",")] if servers else None
        self._resolver: Any = None
        self._cache: dict[str, _Cached] = {}
        self._lookups: SingleFlight[str, _Cached] = SingleFlight()

    async def resolve(self, name: str) -> tuple[Address, ...]:
        """Every address of `name`, IPv4 first. Raises: DnsFailed."""
        cached = self._cache.get(name)
        if cached is None or cached.until_s < time.monotonic():
            cached = await self._lookups.call(name, lambda: self._look_up(name))
        if cached.failure is not None:
            raise DnsFailed(cached.failure)
        return cached.addresses

    async def _look_up(self, name: str) -> _Cached:
        if self._resolver is None:
            self._resolver = aiodns.DNSResolver(self._servers, timeout=3.0, tries=TRIES_MAX)
        now_s = time.monotonic()
        try:
            async with asyncio.timeout(LOOKUP_S_MAX):
                answer = await self._resolver.getaddrinfo(
                    name, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM
                )
        except TimeoutError:
            return _Cached(0.0, (), f"the name server did not respond within {LOOKUP_S_MAX:.0f} s")
        except aiodns.error.DNSError as error:
            number, text = (*error.args, "", "")[:2]
            if number not in _NO_SUCH_NAME:
                return _Cached(0.0, (), f"the name server failed: {text}")
            cached = _Cached(now_s + FAILURE_CACHED_S, (), "no such name")
        else:
            found = {ipaddress.ip_address(_text(node.addr[0])) for node in answer.nodes}
            ordered = tuple(sorted(found, key=lambda a: (a.version, int(a))))
            failure = None if ordered else "the name has no address"
            cached = _Cached(now_s + CACHED_S, ordered, failure)
        if len(self._cache) >= NAMES_MAX:
            self._cache.clear()
        self._cache[name] = cached
        return cached

    async def close(self) -> None:
        """Close the resolver."""
        if self._resolver is not None:
            await self._resolver.close()
            self._resolver = None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
