"""The connections of one event loop where the address may lead to a cluster: a line to each primary, and the map.

    first command --- CLUSTER SLOTS refused: a single server, whose line is used from then on without any of this
                  \\- a map: each command goes to the primary of its key
    every second, and after MOVED or a primary that is away: the map of the node with the highest epoch

A command that is answered `MOVED` or `ASK` was not run and is sent again, to where it says. Nothing else is sent again. A
primary that does not answer fails the keys of its own hash slots alone; after a failover the map has another one. Lines to all
primaries are kept up without any traffic, so a process that writes seldom is connected to a promoted one within some two
seconds, as it would be to a single server that was started again.

One address of the URL is needed to find the others; while a primary answers it is not asked any more.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from libvalkey import pack_command

from headrace.engines.multiplex.errors import ValkeyRefused
from headrace.engines.multiplex.line import Line
from headrace.engines.multiplex.link import Bounds, Link, down
from headrace.engines.slots import NOBODY, SlotMap, place_of, read_map, slot_of
from headrace.engines.valkey import ValkeyDown, ValkeyMoved, no_cluster
from headrace.kernel.logs import logger

REFRESH_S: Final = 1.0
GAP_S: Final = 0.05
"""However many doubts there are, the map is asked for no more often."""
ANSWER_S: Final = 0.5
"""Nodes that take longer to tell the map are not waited for."""
REDIRECTS_MAX: Final = 16
PATIENT_REDIRECTS: Final = 3
"""After so many, nodes do not agree yet: a pause lets them."""
PAUSE_S: Final = 0.02
_SLOTS: Final = pack_command(("CLUSTER", "SLOTS"))
_INFO: Final = pack_command(("CLUSTER", "INFO"))
_ASKING: Final = pack_command(("ASKING",))
_log: Final = logger(__name__)


class Cluster:
    """Finds out what the first address leads to, and where each key is."""

    link: Final = None
    """There is no one connection for all; `Line` has it."""

    def __init__(self, first: Line, server: str, bounds: Bounds) -> None:
        self.first = first
        self.is_single = False
        self._server, self._bounds = server, bounds
        self._map: SlotMap | None = None
        self._lines: dict[str, Line] = {}
        self._doubt = asyncio.Event()
        self._asking: asyncio.Task[ValkeyDown | None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def wait_known(self) -> None:
        """Know whether it is a single server or a cluster. Raises: ValkeyDown, ValkeyBusy."""
        if self.is_single or self._map is not None:
            return
        link = await self.first.wait_up()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._find_out(link))
        failure = await asyncio.shield(self._asking)
        if failure is not None:
            raise down(self._server, failure.text)

    def ready_link(self, near: str | bytes | float) -> Link | None:
        """The connection to the primary of the key `near`, if it is there."""
        if self._map is None:
            return None
        line = self._lines.get(self._map.owners[slot_of(near)])
        return line.link if line is not None else None

    async def wait_link(self, near: str | bytes | float) -> Link:
        """The connection to the primary of the key `near`, or to any for none. Raises: ValkeyDown, ValkeyBusy."""
        await self.wait_known()
        if self.is_single:
            return self.first.link or await self.first.wait_up()
        line = self._line_of(near)
        if line.link is not None:
            return line.link
        try:
            return await line.wait_up()
        except ValkeyDown:
            self._doubt.set()
            self._ensure_keeper()
            raise

    async def wait_owner(self, near: str) -> str:
        """The address of the primary that has the key `near`, as it says itself. Raises: ValkeyDown."""
        link, packed = await self.wait_link(near), pack_command(("EXISTS", near))
        try:
            await link.send(packed)
        except ValkeyMoved as moved:
            await self.follow(moved, packed)
        assert self._map is not None
        return self._map.owners[slot_of(near)]

    async def follow(self, moved: ValkeyMoved, packed: bytes) -> Any:
        """Send a command again to where its answer leads. Raises: as `Multiplexer.command`."""
        for redirects in range(REDIRECTS_MAX):
            await self.wait_known()
            if self._map is None:
                break
            if redirects >= PATIENT_REDIRECTS:
                await asyncio.sleep(PAUSE_S)
            host, port = place_of(moved.address, host=self.first.address.host)
            line = self._line_at(f"{host}:{port}")
            if not moved.is_ask:
                self._map.owners[moved.slot] = f"{host}:{port}"
                self._doubt.set()
            link = line.link or await line.wait_up()
            try:
                if moved.is_ask:
                    # Both are in one write, so that no command of another caller comes between them.
                    allowed, reply = link.send(_ASKING), link.send(packed)
                    await asyncio.gather(allowed, reply)
                    return reply.result()
                return await link.send(packed)
            except ValkeyMoved as again:
                moved = again
        raise moved

    async def close(self) -> None:
        """Cut all connections."""
        for task in (self._keeper, self._asking):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        for line in (self.first, *self._lines.values()):
            await line.close()

    def _line_of(self, near: str | bytes | float) -> Line:
        assert self._map is not None
        if not near:
            live = [line for line in self._lines.values() if line.link is not None]
            return live[0] if live else self.first
        slot = slot_of(near)
        owner = self._map.owners[slot]
        if owner == NOBODY:
            self._doubt.set()
            raise down(self._server, f"no primary of the cluster has hash slot {slot}")
        return self._line_at(owner)

    def _line_at(self, address: str) -> Line:
        line = self._lines.get(address)
        if line is None:
            host, port = place_of(address, host=self.first.address.host)
            node = replace(self.first.address, host=host, port=port, path=None)
            line = self._lines[address] = Line((node,), address, self._bounds)
        return line

    async def _find_out(self, link: Link) -> ValkeyDown | None:
        """Ask the first address; what kept it from answering."""
        try:
            found = await self._ask(link)
        except ValkeyRefused:
            if len(self.first.seeds) > 1:
                return no_cluster(self._server)
            self.is_single = True
            return None
        except ValkeyDown as error:
            return error
        await self._take(found)
        self._ensure_keeper()
        _log.info("valkey_cluster_found", primaries=found.primaries)
        return None

    async def _ask(self, link: Link) -> SlotMap:
        slots = await link.send(_SLOTS)
        info = await link.send(_INFO)
        try:
            return read_map(slots, info, host=self.first.address.host)
        except (IndexError, TypeError, ValueError) as error:
            raise ValkeyRefused("CLUSTER SLOTS was answered with no map", str(slots)) from error

    def _ensure_keeper(self) -> None:
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            # Not `wait_for`, which on Python 3.11 swallows a cancellation that comes with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._doubt.wait()
            self._doubt.clear()
            await self._refresh()
            await asyncio.sleep(GAP_S)

    async def _refresh(self) -> None:
        live = [line.link for line in self._lines.values() if line.link is not None]
        maps = await self._ask_all(live)
        if not maps and self.first.link is not None:
            maps = await self._ask_all([self.first.link])
        if maps:
            await self._take(max(maps, key=lambda one: one.epoch))

    async def _ask_all(self, links: list[Link]) -> list[SlotMap]:
        """The maps of those that answer soon."""
        if not links:
            return []
        answers = await asyncio.gather(
            *(self._ask_within(link, ANSWER_S) for link in links), return_exceptions=True
        )
        return [answer for answer in answers if isinstance(answer, SlotMap)]

    async def _ask_within(self, link: Link, wait_s: float) -> SlotMap:
        async with asyncio.timeout(wait_s):
            return await self._ask(link)

    async def _take(self, found: SlotMap) -> None:
        """Use a map: a line to each of its primaries, and none to others once nobody waits there."""
        self._map = found
        primaries = found.primaries
        for address in primaries:
            self._line_at(address)
        for address in self._lines.keys() - set(primaries):
            link = self._lines[address].link
            if link is None or link.is_idle:
                await self._lines.pop(address).close()
