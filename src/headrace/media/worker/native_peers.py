"""The peers from which the native data plane requests blocks, and how they are numbered.

A peer is given to the plane with the address of a connection that succeeded here. So names are
resolved in Python only, and a node that nobody has reached yet is not requested natively. A number
is used once: descriptions with the number of a dropped peer lead to Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from headrace.media.cluster.peers import Peer

Endpoint = tuple[str, int]
_INT32_MAX: Final = 2**31 - 1


class PlanePeers:
    """The peers of one plane."""

    def __init__(self, library: Any, plane: Any) -> None:
        self._library = library
        self._plane = plane
        self._peers: dict[int, tuple[Peer, Endpoint]] = {}
        self._count = 0

    def number(self, peer: Peer) -> int:
        """The number of a peer for descriptions; 0: it has not been connected to yet."""
        endpoint = peer.endpoint
        if endpoint is None:
            return 0
        for number, known in self._peers.items():
            if known == (peer, endpoint):
                return number
        self._count += 1
        self._peers[self._count] = peer, endpoint
        self._put(self._count, peer, endpoint)
        return self._count

    def drop_unused(self, is_used: Callable[[Peer], bool]) -> bool:
        """Request nothing more from peers that are not used any more, or have moved.

        Return whether there was one.
        """
        gone = [
            number
            for number, (peer, endpoint) in self._peers.items()
            if not is_used(peer) or peer.endpoint != endpoint
        ]
        for number in gone:
            del self._peers[number]
            self._library.plane_drop_peer(self._plane, number)
        return bool(gone)

    def report_slow(self, number: int) -> None:
        """Record that a request waits for long; a dropped peer is ignored."""
        if number in self._peers:
            self._peers[number][0].report_slow()

    def _put(self, number: int, peer: Peer, endpoint: Endpoint) -> None:
        timeout_ms = min(_INT32_MAX, int(peer.timeout_s * 1000))
        name, address, ip = (
            text.encode("ascii") for text in (peer.name, peer.address, endpoint[0])
        )
        self._library.plane_put_peer(
            self._plane, number, name, address, ip, endpoint[1], timeout_ms
        )
