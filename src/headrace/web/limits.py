"""Limits of one API process: connections in total and per address, and requests per token."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol

import msgspec

from headrace.kernel.errors import HeadraceError
from headrace.web.model import Overloaded, RateLimited, TooManyRequestsOpen, WebConfig
from headrace.web.tokens import Caller


class Evictable(Protocol):
    """A connection that admission may close."""

    @property
    def eviction_rank(self) -> int | None:
        """0: idle; 1: incomplete head; None: in use."""

    @property
    def last_read_s(self) -> float:
        """Time of the last bytes from the peer."""

    def evict(self) -> None:
        """Close the connection at once."""


class Admission:
    """The open connections of one server, limited in total and per client address.

    A new connection replaces the one that was idle longest, then one with an incomplete head. A
    connection with an open request is never closed for it.
    """

    def __init__(self, config: WebConfig) -> None:
        self._most, self._per_address = config.connections_max, config.connections_per_address
        self._addresses: dict[Evictable, str] = {}
        self._counts: Counter[str] = Counter()

    def admit(self, connection: Evictable, host: str) -> HeadraceError | None:
        """Admit a connection, closing another if necessary; return the error if refused."""
        address = network_of(host)
        if self._counts[address] >= self._per_address and not self._make_room(address):
            return Overloaded(
                f"{address} has {self._per_address} connections in use, the maximum per address"
                " (web.connections_per_address): close some",
                retry_after_s=1,
            )
        if len(self._addresses) >= self._most and not self._make_room(None):
            return Overloaded(
                "the server is at its maximum of connections: try again", retry_after_s=1
            )
        self._addresses[connection] = address
        self._counts[address] += 1
        return None

    def forget(self, connection: Evictable) -> None:
        """Release the place of a closed connection."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _make_room(self, address: str | None) -> bool:
        """Close the first connection in eviction order, of one address or of all."""
        ranked = [
            (rank, one.last_read_s, number, one)
            for number, (one, found) in enumerate(self._addresses.items())
            if address in (None, found) and (rank := one.eviction_rank) is not None
        ]
        if not ranked:
            return False
        victim = min(ranked)[3]
        self.forget(victim)
        victim.evict()
        return True


def network_of(host: str) -> str:
    """The address that connections are counted by: an IPv4 address or an IPv6 /64."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if found.version == 4:
        return host
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))


CHARGE: Final = "headrace.web.charge"
"""Key in an ASGI scope: the request's `Charge`."""
CALLERS_MAX: Final = 10_000
_WINDOW_S: Final = 1.0
_Pairs = tuple[tuple[bytes, bytes], ...]


class _Use(msgspec.Struct, gc=False):
    """Usage of one token: when its token bucket is full again, and its open requests."""

    full_at_s: float = 0.0
    open: int = 0


class Charge(msgspec.Struct, frozen=True, gc=False):
    """The quota charge of one request, with its RateLimit headers."""

    headers: _Pairs
    use: _Use | None = None
    """The usage that counts the request as open; None for a refused request."""

    def end(self) -> None:
        """Stop counting the request as open."""
        if self.use is not None:
            self.use.open -= 1


class Quotas:
    """Request limits of every token in this process: a rate and a number of open requests.

    The rate is a token bucket of one second (GCRA: one number per token). Each response carries
    RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers); over the limit it is 429
    with Retry-After. All visitors of a site share the separate limit of a publishable key.
    """

    def __init__(self, config: WebConfig, now_s: Callable[[], float] = monotonic) -> None:
        self._open_max = config.requests_open_per_token
        self._rates = {False: config.requests_per_token, True: config.requests_per_key}
        self._policies = {
            kind: (b"ratelimit-policy", b'"second";q=%d;w=%d' % (rate, _WINDOW_S))
            for kind, rate in self._rates.items()
        }
        self._now_s = now_s
        self._uses: OrderedDict[int, _Use] = OrderedDict()

    def charge(self, caller: Caller, scope: Any) -> None:
        """Count one request of `caller`, unless `scope` holds its charge.

        Raises: RateLimited, TooManyRequestsOpen.
        """
        if CHARGE in scope:
            return
        kind, now_s = caller.is_publishable, self._now_s()
        rate, policy, use = self._rates[kind], self._policies[kind], self._use_of(caller.token_id)
        wait_s = max(use.full_at_s, now_s) + 1 / rate - now_s
        if wait_s > _WINDOW_S + 1e-9:
            retry_s = wait_s - _WINDOW_S
            scope[CHARGE] = Charge((policy, _left(0, retry_s)))
            raise RateLimited(
                f"token {caller.name!r} may send {rate} requests per second to each API process:"
                " wait, then spread or batch the requests",
                retry_after_s=retry_s,
            )
        if use.open >= self._open_max:
            scope[CHARGE] = Charge((policy, _left(0, _WINDOW_S)))
            raise TooManyRequestsOpen(
                f"token {caller.name!r} has {use.open} open requests at this API process, its"
                " maximum: wait for some to end",
                retry_after_s=_WINDOW_S,
            )
        use.full_at_s = now_s + wait_s
        use.open += 1
        left = int((_WINDOW_S - wait_s) * rate + 1e-6)
        scope[CHARGE] = Charge((policy, _left(left, wait_s)), use)

    def _use_of(self, token_id: int) -> _Use:
        use = self._uses.get(token_id)
        if use is None:
            use = self._uses[token_id] = _Use()
            if len(self._uses) > CALLERS_MAX:
                self._uses.popitem(last=False)
        return use


def _left(requests: int, full_in_s: float) -> tuple[bytes, bytes]:
    return b"ratelimit", b'"second";r=%d;t=%d' % (requests, math.ceil(full_in_s))


def headers_of_charge(scope: Any) -> _Pairs:
    """The RateLimit headers of a response; none for an unauthenticated request."""
    charge: Charge | None = scope.get(CHARGE)
    return () if charge is None else charge.headers


def end_charge(scope: Any) -> None:
    """Stop counting the request of `scope` as open."""
    charge: Charge | None = scope.get(CHARGE)
    if charge is not None:
        charge.end()
