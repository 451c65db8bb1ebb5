"""Names to addresses, outside libcurl: its wheel resolves in 20 threads a process.

With 43 hanging names those threads cut fast downloads from 3,000/s to 17/s; c-ares through aiodns stayed
at 3,100/s (measured, 2 cores). Lookups of one name are single-flight. Answers, "no such name" among them,
are cached for seconds only, because a pinned address that moved is a broken photo. A name server that
fails is not cached: the next attempt of the photo asks it again.
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

KEPT_S: Final = 30.0
FAILURE_KEPT_S: Final = 10.0
ANSWER_MAX_S: Final = 6.0
"""Time for one lookup, all questions of it together."""
QUESTIONS_MAX: Final = 5
"""c-ares waits as little as 0.25 s for the reply of a server that was quick before, twice as long each further time."""
NAMES_MAX: Final = 20_000
_NO_SUCH_NAME: Final = frozenset({1, 4})  # ARES_ENODATA, ARES_ENOTFOUND


class NameFailed(Exception):
    """The name has no address now."""


@dataclass(frozen=True, slots=True)
class _Kept:
    until_s: float
    addresses: tuple[Address, ...]
    failure: str | None


class Names:
    """A resolver with a short memory, of one event loop."""

    def __init__(self, servers: str | None = None) -> None:
        self._servers = [s.strip() for s in servers.split(",")] if servers else None
        self._resolver: Any = None
        self._kept: dict[str, _Kept] = {}
        self._asking: dict[str, asyncio.Task[_Kept]] = {}

    async def resolve(self, name: str) -> tuple[Address, ...]:
        """Every address of `name`, IPv4 first. Raises: NameFailed."""
        kept = self._kept.get(name)
        if kept is None or kept.until_s < time.monotonic():
            asking = self._asking.get(name)
            if asking is None:
                asking = self._asking[name] = asyncio.create_task(self._ask(name))
                asking.add_done_callback(lambda _task: self._asking.pop(name, None))
            kept = await asyncio.shield(asking)
        if kept.failure is not None:
            raise NameFailed(kept.failure)
        return kept.addresses

    async def _ask(self, name: str) -> _Kept:
        if self._resolver is None:
            self._resolver = aiodns.DNSResolver(self._servers, timeout=3.0, tries=QUESTIONS_MAX)
        now_s = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                answer = await self._resolver.getaddrinfo(
                    name, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM
                )
        except TimeoutError:
            return _Kept(0.0, (), f"the name server did not answer within {ANSWER_MAX_S:.0f} s")
        except aiodns.error.DNSError as error:
            number, text = (*error.args, "", "")[:2]
            if number not in _NO_SUCH_NAME:
                return _Kept(0.0, (), f"the name server failed: {text}")
            kept = _Kept(now_s + FAILURE_KEPT_S, (), "no such name")
        else:
            found = {ipaddress.ip_address(_text(node.addr[0])) for node in answer.nodes}
            ordered = tuple(sorted(found, key=lambda a: (a.version, int(a))))
            failure = None if ordered else "the name has no address"
            kept = _Kept(now_s + KEPT_S, ordered, failure)
        if len(self._kept) >= NAMES_MAX:
            self._kept.clear()
        self._kept[name] = kept
        return kept

    async def close(self) -> None:
        """Stop asking."""
        if self._resolver is not None:
            await self._resolver.close()
            self._resolver = None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
