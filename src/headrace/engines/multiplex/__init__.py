"""One pipelined connection to Valkey for all callers of a process, for hot paths.

Commands of one tick of the event loop go out in one write, and replies are delivered in order. That
takes a third of the CPU of a client that reserves a connection per command. A reply must never
reach another caller, which these rules ensure:

1. A reply belongs to the caller that has waited longest. A cancelled caller stays in the queue and
   absorbs its reply.
2. After an unexpected reply or bytes that are not a reply the connection is closed.
3. A connection ends together with its waiters and its parser. A sent command then raises
   `ValkeyLost`, with an unknown outcome, an unsent one `ValkeyDown`. No command is sent twice.
4. Without a connection a call fails at once; so does one over the limit of waiters (`ValkeyBusy`).
5. Without any reply for `valkey.timeout` the connection is closed. A slow server that still replies
   keeps its connection, and callers that waited that long get `ValkeyLost`.
6. A connection is used only after AUTH, SELECT and PING succeeded, so never while data loads.
7. Commands that block, open a transaction or change how the server replies are forbidden.
8. A cluster has one such connection per primary, and a command goes to the primary of its first
   key. A command that got `MOVED` or `ASK` was not run and follows the redirect.

connection               one connection and its errors
reconnecting_connection  one server: the address, and a connection that reopens itself
cluster                  connections to all primaries, and the map of hash slots
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from libvalkey import pack_command

from headrace.engines.endpoints import seeds_of, server_of, split_sentinels
from headrace.engines.multiplex.cluster import ClusterConnections
from headrace.engines.multiplex.connection import (
    Bounds,
    Connection,
    ValkeyBusy,
    ValkeyLost,
    ValkeyNotReady,
    ValkeyPartlyDown,
    ValkeyRefused,
)
from headrace.engines.multiplex.reconnecting_connection import ReconnectingConnection, address_of
from headrace.engines.valkey import ValkeyConfig, ValkeyDown, ValkeyMoved, hash_slot

__all__ = [
    "Multiplexer",
    "ValkeyBusy",
    "ValkeyLost",
    "ValkeyNotReady",
    "ValkeyPartlyDown",
    "ValkeyRefused",
]
_FORBIDDEN: Final = """
AUTH BLMOVE BLMPOP BLPOP BRPOP BRPOPLPUSH BZMPOP BZPOPMAX BZPOPMIN CLIENT DISCARD EXEC HELLO MONITOR
MULTI PSUBSCRIBE PSYNC QUIT RESET SELECT SSUBSCRIBE SUBSCRIBE SYNC UNWATCH WAIT WAITAOF WATCH
"""
FORBIDDEN: Final = frozenset(_FORBIDDEN.split())
"""Commands that block the connection or change how the server replies."""


class Multiplexer:
    """Commands of many callers over one connection per event loop, or one per primary.

    Replies are bytes, ints and lists. It connects on first use and reconnects by itself.
    """

    def __init__(self, url: str, config: ValkeyConfig, bounds: Bounds | None = None) -> None:
        self.prefix = config.prefix
        rest, self._sentinels = split_sentinels(url)
        self._seeds = tuple(address_of(seed) for seed in seeds_of(rest))
        self._server = server_of(rest, port=6379, socket="valkey.sock")
        if self._sentinels is not None:
            self._seeds, self._server = self._seeds[:1], self._sentinels.server
        self._bounds = bounds or Bounds(timeout_s=config.timeout_s)
        self._by_loop: dict[
            asyncio.AbstractEventLoop, ReconnectingConnection | ClusterConnections
        ] = {}

    async def open(self) -> None:
        """Check that the server responds. Raises: ValkeyDown."""
        await self.command("PING")

    async def close(self) -> None:
        """Close this loop's connection; waiting callers get `ValkeyLost`."""
        server = self._by_loop.pop(asyncio.get_running_loop(), None)
        if server is not None:
            await server.close()

    async def command(
        self, name: str, *words: str | bytes | float, near: str | bytes | None = None
    ) -> Any:
        """Send one command; in a cluster to the primary of `near`, by default the first word.

        Raises: ValkeyDown; only after ValkeyLost or ValkeyRefused the command may have been run.
        """
        assert name.upper() not in FORBIDDEN, f"{name} requires a separate connection"
        key = near if near is not None else words[0] if words else ""
        return await self._send(pack_command((name, *words)), key)

    async def call(
        self,
        function: str,
        keys: list[str],
        arguments: list[str | bytes | float],
        *,
        read_only: bool = False,
    ) -> Any:
        """Call one function of a loaded library.

        Raises: ValkeyDown; only after ValkeyLost or ValkeyRefused the function may have been run.
        """
        verb = "FCALL_RO" if read_only else "FCALL"
        return await self._send(
            pack_command((verb, function, len(keys), *keys, *arguments)), keys[0]
        )

    async def values(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys in any hash slots: one command, or one per hash slot in a cluster.

        Raises: ValkeyDown; ValkeyPartlyDown if only some primaries respond.
        """
        if (
            type(self._by_loop.get(asyncio.get_running_loop())) is ReconnectingConnection
            or not await self.is_cluster()
        ):
            found: list[Any] = await self._send(pack_command(("MGET", *keys)), "")
            return found
        indexes: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            indexes.setdefault(hash_slot(key), []).append(index)
        parts = list(indexes.values())
        replies = await asyncio.gather(
            *[self.command("MGET", *[keys[index] for index in part]) for part in parts],
            return_exceptions=True,
        )
        return _joined(len(keys), parts, replies)

    async def is_cluster(self) -> bool:
        """Whether the address leads to a cluster. Raises: ValkeyDown while this is unknown."""
        server = self._by_loop.get(asyncio.get_running_loop()) or self._connect()
        if isinstance(server, ReconnectingConnection):
            return False
        await server.wait_known()
        return not server.is_single

    async def owner(self, key: str) -> str:
        """The address of the primary of a key; empty without a cluster. Raises: ValkeyDown."""
        server = self._by_loop.get(asyncio.get_running_loop()) or self._connect()
        if isinstance(server, ReconnectingConnection) or not await self.is_cluster():
            return ""
        return await server.wait_owner(key)

    async def _send(self, packed: bytes, near: str | bytes | float) -> Any:
        server = self._by_loop.get(asyncio.get_running_loop()) or self._connect()
        connection = server.connection
        if connection is None:
            connection = await self._wait_connection(server, near)
        try:
            return await connection.send(packed)
        except ValkeyMoved as moved:
            return await self._known_cluster().follow(moved, packed)

    async def _wait_connection(
        self, server: ReconnectingConnection | ClusterConnections, near: str | bytes | float
    ) -> Connection:
        if isinstance(server, ReconnectingConnection):
            return await server.wait_connected()
        connection = server.ready_connection(near) if near else None
        if connection is not None:
            return connection
        connection = await server.wait_connection(near)
        if server.is_single:
            # A single server: later calls use its connection directly.
            self._by_loop[asyncio.get_running_loop()] = server.first
        return connection

    def _known_cluster(self) -> ClusterConnections:
        """The cluster connections, also if the address led to a single server before."""
        loop = asyncio.get_running_loop()
        server = self._by_loop.get(loop) or self._connect()
        if isinstance(server, ReconnectingConnection):
            server = self._by_loop[loop] = ClusterConnections(server, self._server, self._bounds)
        return server

    def _connect(self) -> ClusterConnections:
        for closed in [loop for loop in self._by_loop if loop.is_closed()]:
            del self._by_loop[closed]
        first = ReconnectingConnection(self._seeds, self._server, self._bounds, self._sentinels)
        server = ClusterConnections(first, self._server, self._bounds)
        self._by_loop[asyncio.get_running_loop()] = server
        return server


def _joined(count: int, parts: list[list[int]], replies: list[Any]) -> list[Any]:
    """Values in order, from the replies for parts. Raises: ValkeyDown, ValkeyPartlyDown."""
    found: list[Any] = [None] * count
    lost: set[int] = set()
    failure: ValkeyDown | None = None
    for part, answer in zip(parts, replies, strict=True):
        if isinstance(answer, ValkeyDown):
            lost.update(part)
            failure = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            for index, value in zip(part, answer, strict=True):
                found[index] = value
    if failure is None:
        return found
    raise failure if len(lost) == count else ValkeyPartlyDown(found, lost, failure.text)


BEGIN: Final = b"0"
"""The cursor at the start of a scan, and after its end."""
STEP: Final = 1_000


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that begin with one of `starts`, each with its own hash tag; `pattern` matches all."""

    pattern: str
    starts: Sequence[str]


async def scan(multiplexer: Multiplexer, keys: Keys, cursor: bytes) -> tuple[bytes, list[str]]:
    """One step of a scan: the next cursor and some keys. Raises: ValkeyDown.

    In a cluster a pattern with a hash tag makes SCAN walk only that hash slot, so each of
    `keys.starts` is scanned at its primary. A cursor there is `<cursor>@<index of the start>`.
    """
    if not await multiplexer.is_cluster():
        cursor, found = await multiplexer.command(
            "SCAN", cursor, "MATCH", keys.pattern, "COUNT", STEP
        )
        return bytes(cursor), [key.decode() for key in found]
    at, _, number = cursor.partition(b"@")
    part = int(number or 0)
    if part >= len(keys.starts):
        return BEGIN, []
    start = keys.starts[part]
    at, found = await multiplexer.command(
        "SCAN", at, "MATCH", f"{start}*", "COUNT", STEP, near=start
    )
    if at == BEGIN:
        part += 1
    is_over = at == BEGIN and part == len(keys.starts)
    return BEGIN if is_over else b"%s@%d" % (at, part), [key.decode() for key in found]


async def scan_all(multiplexer: Multiplexer, keys: Keys) -> AsyncIterator[list[str]]:
    """All keys that exist during the whole scan, possibly repeated. Raises: ValkeyDown."""
    owners, cursor = await _owners(multiplexer, keys), BEGIN
    while True:
        cursor, found = await scan(multiplexer, keys, cursor)
        yield found
        if cursor == BEGIN:
            before, owners = owners, await _owners(multiplexer, keys)
            # Repeat if a hash slot moved during the scan.
            if owners == before:
                return


async def _owners(multiplexer: Multiplexer, keys: Keys) -> list[str]:
    return (
        [await multiplexer.owner(start) for start in keys.starts]
        if await multiplexer.is_cluster()
        else []
    )
