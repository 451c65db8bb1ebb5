"""One connection to Valkey for all callers of a process: what the counters' hot path stands on.

A client that takes a connection for each command costs 117 us of CPU more a request than one that writes whatever came
up in a tick of the loop at once and hands replies out in order (prototypes of 2026-11-21, 2 cores: 20,000 reads a second
of 20 counters a process instead of 6,000). The price is that a reply must never reach another caller. Hence:

1. A reply belongs to the caller that has waited longest; nobody is looked for, nothing is taken out of the middle. A
   caller that went away leaves its place behind, which swallows its reply.
2. A reply nobody waits for, or bytes that are none: the connection is cut, never set right again.
3. A connection that ends takes its callers and its parser with it (`link.py`: they are one object). What was sent is
   `ValkeyLost`, its outcome unknown; what was still held is `ValkeyDown`, never sent. Nothing is sent again by itself.
4. Without a connection callers are told so at once; so they are when too many wait (`ValkeyBusy`).
5. No reply at all for `valkey.timeout`: the connection is cut. A slow server that goes on answering keeps it: callers
   that waited so long get `ValkeyLost` and leave their places behind.
6. A connection is used once AUTH, SELECT and PING were answered well, so never while the server loads its data.
7. Nothing that blocks, opens a transaction or changes how the server answers may be sent here.
8. In a cluster there is one such connection to each primary, and a command goes to the one that has its first key. One that
   was answered `MOVED` or `ASK` was not run, and is sent to where that leads; nothing else is.

link.py      one connection: places, parser, watchdog
line.py      the connection of one event loop to one server, made anew with growing waits
cluster.py   whether there is a cluster behind the address; the lines to its primaries, and which of them has a key
scanning.py  steps through all keys, of a cluster hash slot by hash slot
address.py   where it leads, out of the same URLs as the stock client's
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from libvalkey import pack_command

from headrace.engines.endpoints import seeds_of, server_of
from headrace.engines.multiplex.address import address_of
from headrace.engines.multiplex.cluster import Cluster
from headrace.engines.multiplex.errors import (
    ValkeyBusy,
    ValkeyLost,
    ValkeyNotReady,
    ValkeyPartlyDown,
    ValkeyRefused,
)
from headrace.engines.multiplex.line import Line
from headrace.engines.multiplex.link import Bounds, Link
from headrace.engines.slots import slot_of
from headrace.engines.valkey import ValkeyConfig, ValkeyDown, ValkeyMoved

__all__ = [
    "Multiplexer",
    "ValkeyBusy",
    "ValkeyLost",
    "ValkeyNotReady",
    "ValkeyPartlyDown",
    "ValkeyRefused",
]
# fmt: off
FORBIDDEN: Final = frozenset({
    "AUTH", "BLMOVE", "BLMPOP", "BLPOP", "BRPOP", "BRPOPLPUSH", "BZMPOP", "BZPOPMAX", "BZPOPMIN",
    "CLIENT", "DISCARD", "EXEC", "HELLO", "MONITOR", "MULTI", "PSUBSCRIBE", "PSYNC", "QUIT",
    "RESET", "SELECT", "SSUBSCRIBE", "SUBSCRIBE", "SYNC", "UNWATCH", "WAIT", "WAITAOF", "WATCH",
})
# fmt: on
"""They block the connection, or change how it answers."""


class Multiplexer:
    """Commands of any number of callers over one connection a loop, or one a primary; replies are bytes, ints and lists.

    It connects on first use, and again by itself.
    """

    def __init__(self, url: str, config: ValkeyConfig, bounds: Bounds | None = None) -> None:
        self.prefix = config.prefix
        self._seeds = tuple(address_of(seed) for seed in seeds_of(url))
        self._server = server_of(url, port=6379, socket="valkey.sock")
        self._bounds = bounds or Bounds(timeout_s=config.timeout_s)
        self._lines: dict[asyncio.AbstractEventLoop, Line | Cluster] = {}

    async def open(self) -> None:
        """Check that it answers. Raises: ValkeyDown."""
        await self.command("PING")

    async def close(self) -> None:
        """Cut this loop's connection; callers that wait get `ValkeyLost`."""
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.close()

    async def command(
        self, name: str, *words: str | bytes | float, near: str | bytes | None = None
    ) -> Any:
        """Send one command. In a cluster it goes to the primary of the key `near`: the first word, if it is left out.

        Raises: ValkeyDown; of its kinds only ValkeyLost and ValkeyRefused may have been run.
        """
        assert name.upper() not in FORBIDDEN, f"{name} needs a connection of its own"
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
        """Call one function of a library that `functions` loaded; a read-only one may be asked again.

        Raises: ValkeyDown; of its kinds only ValkeyLost and ValkeyRefused may have been run.
        """
        verb = "FCALL_RO" if read_only else "FCALL"
        return await self._send(
            pack_command((verb, function, len(keys), *keys, *arguments)), keys[0]
        )

    async def values(self, keys: Sequence[str]) -> list[Any]:
        """What keys of any hash slots hold: one command, or one for each hash slot in a cluster.

        Raises: ValkeyDown; ValkeyPartlyDown where some primaries answer.
        """
        if type(self._lines.get(asyncio.get_running_loop())) is Line or not await self.is_cluster():
            found: list[Any] = await self._send(pack_command(("MGET", *keys)), "")
            return found
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(slot_of(key), []).append(place)
        parts = list(places.values())
        told = await asyncio.gather(
            *[self.command("MGET", *[keys[place] for place in part]) for part in parts],
            return_exceptions=True,
        )
        return _joined(len(keys), parts, told)

    async def is_cluster(self) -> bool:
        """Whether there is a cluster behind the address. Raises: ValkeyDown while that is not known."""
        line = self._lines.get(asyncio.get_running_loop()) or self._open_line()
        if isinstance(line, Line):
            return False
        await line.wait_known()
        return not line.is_single

    async def owner(self, key: str) -> str:
        """The address of the primary that has a key; nothing where there is no cluster. Raises: ValkeyDown."""
        line = self._lines.get(asyncio.get_running_loop()) or self._open_line()
        if isinstance(line, Line) or not await self.is_cluster():
            return ""
        return await line.wait_owner(key)

    async def _send(self, packed: bytes, near: str | bytes | float) -> Any:
        line = self._lines.get(asyncio.get_running_loop()) or self._open_line()
        link = line.link
        if link is None:
            link = await self._wait_link(line, near)
        try:
            return await link.send(packed)
        except ValkeyMoved as moved:
            return await self._known_cluster().follow(moved, packed)

    async def _wait_link(self, line: Line | Cluster, near: str | bytes | float) -> Link:
        if isinstance(line, Line):
            return await line.wait_up()
        link = line.ready_link(near) if near else None
        if link is not None:
            return link
        link = await line.wait_link(near)
        if line.is_single:
            # From here on nothing is between a caller and the connection.
            self._lines[asyncio.get_running_loop()] = line.first
        return link

    def _known_cluster(self) -> Cluster:
        """Also where a single server was there before."""
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop) or self._open_line()
        if isinstance(line, Line):
            line = self._lines[loop] = Cluster(line, self._server, self._bounds)
        return line

    def _open_line(self) -> Cluster:
        for closed in [loop for loop in self._lines if loop.is_closed()]:
            del self._lines[closed]
        first = Line(self._seeds, self._server, self._bounds)
        line = Cluster(first, self._server, self._bounds)
        self._lines[asyncio.get_running_loop()] = line
        return line


def _joined(count: int, parts: list[list[int]], told: list[Any]) -> list[Any]:
    """Values in order out of the answers for parts. Raises: ValkeyDown, ValkeyPartlyDown."""
    found: list[Any] = [None] * count
    lost: set[int] = set()
    failure: ValkeyDown | None = None
    for part, answer in zip(parts, told, strict=True):
        if isinstance(answer, ValkeyDown):
            lost.update(part)
            failure = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            for place, value in zip(part, answer, strict=True):
                found[place] = value
    if failure is None:
        return found
    raise failure if len(lost) == count else ValkeyPartlyDown(found, lost, failure.text)
