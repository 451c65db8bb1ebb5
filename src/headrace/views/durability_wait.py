"""Wait until writes to Valkey survive a failure: a killed process, or a power cut or failover.

**Killed process** (`FileWriteWait`). Valkey loses what it has not written to its append-only file.
With `appendfsync everysec` it delays writes for up to 2 s while a background sync runs, and answers
commands meanwhile. The reply to a hit reports that (`lua/views_v1.lua`). Only then `FileWriteWait`
polls INFO until the hit is written.

**Power cut or failover** (`DurabilityWait`). WAIT and WAITAOF block their connection and confirm
its last write. So the wait writes a key of its own, later than all writes to confirm. While one
confirmation is pending, all later callers share the next. A cluster has one wait per shard, on the
shard's current primary.

Without replicas `appendfsync always` is required: with `everysec` Valkey 9.1 confirms WAITAOF
before any fdatasync. So the setting is checked first.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.engines.multiplex import ValkeyLost
from headrace.engines.valkey import Node, Session, Valkey, ValkeyDown, ValkeyMoved
from headrace.kernel.batching import Batcher
from headrace.views.errors import NotDurable
from headrace.views.valkey_store import FileState, ValkeyStore

ONE_SERVER: Final = 0
"""The shard whose key is used for all shards of a single server."""

POLL_S: Final = 0.005
WRITTEN_S: Final = 5.0
"""Wait limit; Valkey writes within 2 s unless the disk rejects the write."""


@dataclass(slots=True)
class _Unwritten:
    """A caller whose hits are not in the file yet."""

    run: str
    done: asyncio.Future[None]
    until_s: float
    seen: FileState | None = None
    """First state of the file after the hits were counted."""

    def update(self, state: FileState, now_s: float) -> None:
        """End the wait if `state`, read after the reply, decides it."""
        if self.done.done():
            return
        if state.run != self.run:
            self.fail(_lost("another server has the shard, or its server was restarted"))
        elif not state.is_syncing or self._is_written(state):
            self.done.set_result(None)
        elif now_s > self.until_s:
            self.fail(_lost(f"not written to its append-only file in {WRITTEN_S:g} s"))
        elif self.seen is None or state.rewrites != self.seen.rewrites:
            self.seen = state

    def fail(self, error: Exception) -> None:
        """End the wait with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def _is_written(self, state: FileState) -> bool:
        seen = self.seen
        return seen is not None and state.rewrites == seen.rewrites and state.written >= seen.end


def _lost(reason: str) -> ValkeyLost:
    return ValkeyLost(
        f"Valkey counted the hits and may have lost them ({reason}), so their state is unknown:"
        " repeat only hits with an event id",
        retry_after_s=2,
    )


class FileWriteWait:
    """Wait until a server has written earlier replies to its append-only file."""

    def __init__(self, valkey: ValkeyStore) -> None:
        self._valkey = valkey
        self._waiting: dict[int, list[_Unwritten]] = {}
        self._polling: dict[int, asyncio.Task[None]] = {}

    async def wait(self, shard: int, run: str) -> None:
        """Wait for the write of server `run`. Raises: ValkeyLost if the hits may be lost."""
        loop = asyncio.get_running_loop()
        mine = _Unwritten(run, loop.create_future(), loop.time() + WRITTEN_S)
        self._waiting.setdefault(shard, []).append(mine)
        polling = self._polling.get(shard)
        if polling is None or polling.done():
            self._polling[shard] = asyncio.create_task(self._poll(self._waiting[shard], shard))
        await mine.done

    async def _poll(self, waiting: list[_Unwritten], shard: int) -> None:
        while waiting:
            callers = list(waiting)
            try:
                state = await self._valkey.file_state(shard)
            except ValkeyDown as error:
                for one in callers:
                    one.fail(_lost(error.text))
            except Exception as error:  # noqa: BLE001 - passed on to every caller
                for one in callers:
                    one.fail(error)
            else:
                for one in callers:
                    one.update(state, asyncio.get_running_loop().time())
            waiting[:] = [one for one in waiting if not one.done.done()]
            if waiting:
                await asyncio.sleep(POLL_S)


class DurabilityWait:
    """Wait until earlier writes of a shard are synced to the file or on `replicas` replicas."""

    def __init__(self, valkey: Valkey, *, replicas: int, timeout_s: float) -> None:
        self._valkey = valkey
        self._replicas = replicas
        self._timeout_ms = max(1, int(timeout_s * 1000))
        self._batchers: dict[int, Batcher[None, int]] = {}

    async def wait(self, shard: int) -> None:
        """Wait for the next confirmation. Raises: NotDurable; ValkeyLost without a reply."""
        try:
            confirmed = await self._next_confirmation(shard)
        except ValkeyDown as error:
            # The caller's hits are counted, so it must not send them again as after ValkeyDown.
            raise _lost(error.text) from error
        required = self._replicas or 1
        if confirmed < required:
            raise NotDurable(confirmed, required)

    async def _next_confirmation(self, shard: int) -> int:
        which = shard if await self._valkey.is_cluster() else ONE_SERVER
        batcher = self._batchers.get(which)
        if batcher is None:
            confirm = partial(self._confirm_for_all, which)
            batcher = self._batchers[which] = Batcher(confirm, wait_s=0, runs_at_once=1)
        return await batcher.submit(None)

    async def _confirm_for_all(self, shard: int, callers: list[None]) -> list[int]:
        return [await self._confirm(shard)] * len(callers)

    async def _confirm(self, shard: int) -> int:
        key = f"{self._valkey.prefix}:{{v:{shard}}}:f"
        try:
            async with self._valkey.session(key) as session:
                return await self._confirm_on(session, key)
        except ValkeyMoved:
            async with self._valkey.session(key) as session:
                return await self._confirm_on(session, key)

    async def _confirm_on(self, session: Session, key: str) -> int:
        await session.command("INCR", key)
        if self._replicas:
            return int(await session.command("WAIT", self._replicas, self._timeout_ms))
        if await _sync_policy(session) != "always":
            return 0
        synced = await session.command("WAITAOF", 1, 0, self._timeout_ms)
        return int(synced[0])


async def durability_of(valkey: Valkey) -> tuple[str, int]:
    """The sync policy of writes (`always`, `everysec`, `no`), and the number of replicas.

    For a cluster: the lowest of its primaries; an unreachable one is taken as `everysec`. Raises:
    ValkeyDown if no primary answers.
    """
    nodes = await valkey.primaries()
    replies = await asyncio.gather(
        *[_durability_of(node) for node in nodes], return_exceptions=True
    )
    found, failures = list[tuple[str, int]](), list[BaseException]()
    for one in replies:
        if isinstance(one, BaseException):
            failures.append(one)
        else:
            found.append(one)
    if not found:
        raise failures[0]
    policies = {policy for policy, _ in found} | ({"everysec"} if failures else set())
    least = next(policy for policy in ("no", "everysec", "always") if policy in policies)
    return least, min(replicas for _, replicas in found)


async def _durability_of(node: Node) -> tuple[str, int]:
    persistence = await node.command("INFO", "persistence")
    replication = await node.command("INFO", "replication")
    has_file = int(persistence.get("aof_enabled", 0)) == 1
    policy = await _sync_policy(node) if has_file else "no"
    return policy, int(replication.get("connected_slaves", 0))


async def _sync_policy(server: Node | Session) -> str:
    """The setting `appendfsync`; `everysec` if CONFIG is not permitted."""
    try:
        found = await server.command("CONFIG", "GET", "appendfsync")
    except ValkeyDown:
        return "everysec"
    value = found.get("appendfsync") if isinstance(found, dict) else found[1]
    return value.decode() if isinstance(value, bytes) else str(value)
