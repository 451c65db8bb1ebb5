"""Waiting until Valkey's writes survive a failure: one confirmation for all who wait, on a connection of its own.

WAIT and WAITAOF hold a connection up, and speak of what that connection wrote last. So a fence writes a key of its own,
later than everything that was answered before, and waits for that: while one wait is under way, all who come share the
next.

Without replicas only `appendfsync always` will do: with `everysec` Valkey 9.1.2 confirms WAITAOF before any fdatasync (seen
with strace; with a replica it waits as it should). So the setting is asked, and nothing else believed.
"""

from __future__ import annotations

import asyncio

from penstock.engines.valkey import Valkey, ValkeyDown
from penstock.views.errors import NotDurable


class Fence:
    """`await fence.passed()`: what Valkey answered before is synced to its file, or on `replicas` replicas."""

    def __init__(self, valkey: Valkey, *, replicas: int, timeout_s: float) -> None:
        self._valkey = valkey
        self._replicas = replicas
        self._timeout_ms = max(1, int(timeout_s * 1000))
        self._next: asyncio.Future[int] | None = None
        self._running: asyncio.Task[None] | None = None
        self._key = f"{valkey.prefix}:{{v:0}}:f"

    async def passed(self) -> None:
        """Wait for the next confirmation. Raises: NotDurable, ValkeyDown."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        mine = self._next
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        confirmed = await asyncio.shield(mine)
        wanted = self._replicas or 1
        if confirmed < wanted:
            raise NotDurable(confirmed, wanted)

    async def _run(self) -> None:
        while (asked := self._next) is not None:
            self._next = None
            try:
                confirmed = await self._confirm()
            except ValkeyDown as error:
                asked.set_exception(error)
                asked.exception()  # a caller may be gone; then nobody else looks
            else:
                asked.set_result(confirmed)

    async def _confirm(self) -> int:
        async with self._valkey.session() as session:
            await session.command("INCR", self._key)
            if self._replicas:
                return int(await session.command("WAIT", self._replicas, self._timeout_ms))
            if await _sync_policy(self._valkey) != "always":
                return 0
            synced = await session.command("WAITAOF", 1, 0, self._timeout_ms)
            return int(synced[0])


async def means_of(valkey: Valkey) -> tuple[str, int]:
    """What a fence can stand on: how writes are synced (`always`, `everysec`, `no`) and how many replicas there are."""
    persistence = await valkey.command("INFO", "persistence")
    replication = await valkey.command("INFO", "replication")
    has_file = int(persistence.get("aof_enabled", 0)) == 1
    policy = await _sync_policy(valkey) if has_file else "no"
    return policy, int(replication.get("connected_slaves", 0))


async def _sync_policy(valkey: Valkey) -> str:
    """The setting; where nobody may ask, that it is synced at all."""
    try:
        found = await valkey.command("CONFIG", "GET", "appendfsync")
    except ValkeyDown:
        return "everysec"
    value = found.get("appendfsync") if isinstance(found, dict) else found[1]
    return value.decode() if isinstance(value, bytes) else str(value)
