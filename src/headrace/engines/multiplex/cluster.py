"""Connections to the primaries of a Valkey Cluster, and the map of its hash slots."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from libvalkey import pack_command

from headrace.engines.multiplex.connection import Bounds, Connection, ValkeyRefused, down
from headrace.engines.multiplex.reconnecting_connection import ReconnectingConnection
from headrace.engines.valkey import (
    NO_OWNER,
    ClusterMap,
    ValkeyDown,
    ValkeyMoved,
    hash_slot,
    no_cluster,
    node_address,
    parse_cluster_map,
)
from headrace.kernel.logs import logger
from headrace.kernel.resilience import wait_event
from headrace.kernel.single_flight import SingleFlight

REFRESH_S: Final = 1.0
GAP_S: Final = 0.05
"""Shortest time between two refreshes of the map."""
MAP_TIMEOUT_S: Final = 0.5
"""Longest wait for a node's map."""
REDIRECTS_MAX: Final = 16
REDIRECTS_BEFORE_PAUSE: Final = 3
"""After this many redirects a pause gives the nodes time to agree."""
PAUSE_S: Final = 0.02
_SLOTS: Final = pack_command(("CLUSTER", "SLOTS"))
_INFO: Final = pack_command(("CLUSTER", "INFO"))
_ASKING: Final = pack_command(("ASKING",))
_log: Final = logger(__name__)


class ClusterConnections:
    """The connections of one event loop if the address may lead to a cluster.

    The first command sends CLUSTER SLOTS. An error reply means a single server, whose connection
    is used directly from then on. A map means one connection per primary, and each command goes to
    the primary of its key. The map is refreshed every second, after MOVED, and after a connection
    failure; the map of the node with the highest epoch wins.

    A command that got MOVED or ASK was not run and is sent to the new address. Nothing else is sent
    twice. A primary that is down fails only the keys of its hash slots. Connections to all
    primaries stay open without traffic, so that a process notices a promoted primary in about two
    seconds.
    """

    connection: Final = None
    """No single connection; see `ReconnectingConnection.connection`."""

    def __init__(self, first: ReconnectingConnection, server: str, bounds: Bounds) -> None:
        self.first = first
        self.is_single = False
        self._server, self._bounds = server, bounds
        self._map: ClusterMap | None = None
        self._primaries: dict[str, ReconnectingConnection] = {}
        self._is_refresh_due = asyncio.Event()
        self._discovery: SingleFlight[None, ValkeyDown | None] = SingleFlight()
        self._refresher: asyncio.Task[None] | None = None

    async def wait_known(self) -> None:
        """Wait until the kind of server is known. Raises: ValkeyDown, ValkeyBusy."""
        if self.is_single or self._map is not None:
            return
        connection = await self.first.wait_connected()
        failure = await self._discovery.call(None, lambda: self._discover(connection))
        if failure is not None:
            raise down(self._server, failure.text)

    def ready_connection(self, near: str | bytes | float) -> Connection | None:
        """The open connection to the primary of the key `near`, or None."""
        if self._map is None:
            return None
        node = self._primaries.get(self._map.owners[hash_slot(near)])
        return node.connection if node is not None else None

    async def wait_connection(self, near: str | bytes | float) -> Connection:
        """The connection to the primary of the key `near`, or to any node for an empty key.

        Raises: ValkeyDown, ValkeyBusy.
        """
        await self.wait_known()
        if self.is_single:
            return self.first.connection or await self.first.wait_connected()
        node = self._connection_for_key(near)
        if node.connection is not None:
            return node.connection
        try:
            return await node.wait_connected()
        except ValkeyDown:
            self._is_refresh_due.set()
            self._ensure_refresher()
            raise

    async def wait_owner(self, near: str) -> str:
        """The address of the primary that accepts commands for `near`. Raises: ValkeyDown."""
        connection, packed = await self.wait_connection(near), pack_command(("EXISTS", near))
        try:
            await connection.send(packed)
        except ValkeyMoved as moved:
            await self.follow(moved, packed)
        assert self._map is not None
        return self._map.owners[hash_slot(near)]

    async def follow(self, moved: ValkeyMoved, packed: bytes) -> Any:
        """Send a redirected command to its new node. Raises: as `Multiplexer.command`."""
        for redirects in range(REDIRECTS_MAX):
            await self.wait_known()
            if self._map is None:
                break
            if redirects >= REDIRECTS_BEFORE_PAUSE:
                await asyncio.sleep(PAUSE_S)
            host, port = node_address(moved.address, host=self.first.address.host)
            node = self._connection_to(f"{host}:{port}")
            if not moved.is_ask:
                self._map.owners[moved.slot] = f"{host}:{port}"
                self._is_refresh_due.set()
            connection = node.connection or await node.wait_connected()
            try:
                if moved.is_ask:
                    # One write: no command of another caller may come between them.
                    allowed, reply = connection.send(_ASKING), connection.send(packed)
                    await asyncio.gather(allowed, reply)
                    return reply.result()
                return await connection.send(packed)
            except ValkeyMoved as again:
                moved = again
        raise moved

    async def close(self) -> None:
        """Close all connections."""
        await self._discovery.cancel()
        if self._refresher is not None:
            self._refresher.cancel()
            with suppress(asyncio.CancelledError):
                await self._refresher
        for node in (self.first, *self._primaries.values()):
            await node.close()

    def _connection_for_key(self, near: str | bytes | float) -> ReconnectingConnection:
        assert self._map is not None
        if not near:
            live = [node for node in self._primaries.values() if node.connection is not None]
            return live[0] if live else self.first
        slot = hash_slot(near)
        owner = self._map.owners[slot]
        if owner == NO_OWNER:
            self._is_refresh_due.set()
            raise down(self._server, f"no primary of the cluster has hash slot {slot}")
        return self._connection_to(owner)

    def _connection_to(self, address: str) -> ReconnectingConnection:
        node = self._primaries.get(address)
        if node is None:
            host, port = node_address(address, host=self.first.address.host)
            target = replace(self.first.address, host=host, port=port, path=None)
            node = self._primaries[address] = ReconnectingConnection(
                (target,), address, self._bounds
            )
        return node

    async def _discover(self, connection: Connection) -> ValkeyDown | None:
        """Request the map from the first address; return the error if that fails."""
        try:
            found = await self._request_map(connection)
        except ValkeyRefused:
            if len(self.first.seeds) > 1:
                return no_cluster(self._server)
            self.is_single = True
            return None
        except ValkeyDown as error:
            return error
        await self._use_map(found)
        self._ensure_refresher()
        _log.info("valkey_cluster_found", primaries=found.primaries)
        return None

    async def _request_map(self, connection: Connection) -> ClusterMap:
        slots = await connection.send(_SLOTS)
        info = await connection.send(_INFO)
        try:
            return parse_cluster_map(slots, info, host=self.first.address.host)
        except (IndexError, TypeError, ValueError) as error:
            raise ValkeyRefused("the reply to CLUSTER SLOTS is not a map", str(slots)) from error

    def _ensure_refresher(self) -> None:
        if self._refresher is None or self._refresher.done():
            self._refresher = asyncio.get_running_loop().create_task(self._refresh_forever())

    async def _refresh_forever(self) -> None:
        while True:
            await wait_event(self._is_refresh_due, REFRESH_S)
            self._is_refresh_due.clear()
            await self._refresh()
            await asyncio.sleep(GAP_S)

    async def _refresh(self) -> None:
        live = [node.connection for node in self._primaries.values() if node.connection is not None]
        maps = await self._request_maps(live)
        if not maps and self.first.connection is not None:
            maps = await self._request_maps([self.first.connection])
        if maps:
            await self._use_map(max(maps, key=lambda one: one.epoch))

    async def _request_maps(self, connections: list[Connection]) -> list[ClusterMap]:
        """The maps of the nodes that respond in time."""
        if not connections:
            return []
        answers = await asyncio.gather(
            *(self._request_map_within(connection, MAP_TIMEOUT_S) for connection in connections),
            return_exceptions=True,
        )
        return [answer for answer in answers if isinstance(answer, ClusterMap)]

    async def _request_map_within(self, connection: Connection, wait_s: float) -> ClusterMap:
        async with asyncio.timeout(wait_s):
            return await self._request_map(connection)

    async def _use_map(self, found: ClusterMap) -> None:
        """Use a map: connect to all its primaries and close other connections once idle."""
        self._map = found
        primaries = found.primaries
        for address in primaries:
            self._connection_to(address)
        for address in self._primaries.keys() - set(primaries):
            connection = self._primaries[address].connection
            if connection is None or connection.is_idle:
                await self._primaries.pop(address).close()
