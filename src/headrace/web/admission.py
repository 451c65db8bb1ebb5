"""Which connections one API process holds: bounded in all and for each address, idle ones closed first.

A connection that waits for its next request, or never sent one, gives way to a new one, the longest idle first. After
those, heads that are not complete give way. A connection that is being answered or sends a body stays.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Protocol

from headrace.kernel.errors import HeadraceError
from headrace.web.model import Overloaded, WebConfig


class Evictable(Protocol):
    """A connection as admission sees it."""

    @property
    def eviction_rank(self) -> int | None:
        """0: idle; 1: in an incomplete head; None: in use."""

    @property
    def heard_s(self) -> float:
        """When it last sent something."""

    def evict(self) -> None:
        """Close it now."""


class Admission:
    """The connections of one server, each with the address that it came from."""

    def __init__(self, config: WebConfig) -> None:
        self._most, self._per_address = config.connections_max, config.connections_per_address
        self._addresses: dict[Evictable, str] = {}
        self._counts: Counter[str] = Counter()

    def admit(self, connection: Evictable, host: str) -> HeadraceError | None:
        """Take a connection in, in the place of another where that is needed; else why it is refused."""
        address = network_of(host)
        if self._counts[address] >= self._per_address and not self._make_room(address):
            return Overloaded(
                f"{address} has {self._per_address} connections in use here, as many as one address may"
                " have (web.connections_per_address): close some",
                retry_after_s=1,
            )
        if len(self._addresses) >= self._most and not self._make_room(None):
            return Overloaded(
                "the server has as many connections open as it may: try again", retry_after_s=1
            )
        self._addresses[connection] = address
        self._counts[address] += 1
        return None

    def forget(self, connection: Evictable) -> None:
        """A connection is closed."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _make_room(self, address: str | None) -> bool:
        """Close the best to be closed, of one address or of all."""
        ranked = [
            (rank, one.heard_s, number, one)
            for number, (one, place) in enumerate(self._addresses.items())
            if address in (None, place) and (rank := one.eviction_rank) is not None
        ]
        if not ranked:
            return False
        victim = min(ranked)[3]
        self.forget(victim)
        victim.evict()
        return True


def network_of(host: str) -> str:
    """An address as it is counted: of IPv6 the /64, which one host may have as a whole."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if found.version == 4:
        return host
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
