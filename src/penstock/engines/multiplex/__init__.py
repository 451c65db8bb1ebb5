"""One connection to Valkey for all callers of a process: what the counters' hot path stands on.

A client that takes a connection for each command costs 117 us of CPU more a request than one that writes whatever came
up in a tick of the loop at once and hands replies out in order (research of 2026-11-21, 2 cores: 20,000 reads a second
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

link.py      one connection: places, parser, watchdog
line.py      the connection of one event loop, made anew with growing waits
address.py   where it leads, out of the same URLs as the stock client's
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from libvalkey import pack_command

from penstock.engines.endpoints import server_of
from penstock.engines.multiplex.address import address_of
from penstock.engines.multiplex.errors import (
    ValkeyBusy,
    ValkeyLost,
    ValkeyNotReady,
    ValkeyRefused,
)
from penstock.engines.multiplex.line import Line
from penstock.engines.multiplex.link import Bounds
from penstock.engines.valkey import ValkeyConfig

__all__ = ["Multiplexer", "ValkeyBusy", "ValkeyLost", "ValkeyNotReady", "ValkeyRefused"]
# fmt: off
FORBIDDEN: Final = frozenset({
    "AUTH", "BLMOVE", "BLMPOP", "BLPOP", "BRPOP", "BRPOPLPUSH", "BZMPOP", "BZPOPMAX", "BZPOPMIN",
    "CLIENT", "DISCARD", "EXEC", "HELLO", "MONITOR", "MULTI", "PSUBSCRIBE", "PSYNC", "QUIT",
    "RESET", "SELECT", "SSUBSCRIBE", "SUBSCRIBE", "SYNC", "UNWATCH", "WAIT", "WAITAOF", "WATCH",
})
# fmt: on
"""They block the connection, or change how it answers."""


class Multiplexer:
    """Commands of any number of callers over one connection a loop; replies are bytes, ints and lists.

    It connects on first use, and again by itself.
    """

    def __init__(self, url: str, config: ValkeyConfig, bounds: Bounds | None = None) -> None:
        self.prefix = config.prefix
        self._address = address_of(url)
        self._server = server_of(url, port=6379, socket="valkey.sock")
        self._bounds = bounds or Bounds(timeout_s=config.timeout_s)
        self._lines: dict[asyncio.AbstractEventLoop, Line] = {}

    async def open(self) -> None:
        """Check that it answers. Raises: ValkeyDown."""
        await self.command("PING")

    async def close(self) -> None:
        """Cut this loop's connection; callers that wait get `ValkeyLost`."""
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.close()

    async def command(self, name: str, *words: str | bytes | float) -> Any:
        """Send one command. Raises: ValkeyDown; of its kinds only ValkeyLost and ValkeyRefused may have been run."""
        assert name.upper() not in FORBIDDEN, f"{name} needs a connection of its own"
        return await self._send(pack_command((name, *words)))

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
        return await self._send(pack_command((verb, function, len(keys), *keys, *arguments)))

    async def _send(self, packed: bytes) -> Any:
        line = self._lines.get(asyncio.get_running_loop()) or self._open_line()
        link = line.link
        if link is None:
            link = await line.wait_up()
        return await link.send(packed)

    def _open_line(self) -> Line:
        for closed in [loop for loop in self._lines if loop.is_closed()]:
            del self._lines[closed]
        line = Line(self._address, self._server, self._bounds)
        self._lines[asyncio.get_running_loop()] = line
        return line
