"""Waits until Valkey's writes survive a failure: `FileWait` for a killed process, `Fence` for a power cut or failover.

**A killed process** loses what Valkey has not written to its append-only file. With `appendfsync everysec` Valkey postpones
its writes for up to 2 s while a background sync runs, and answers commands meanwhile. Each answer to a hit reports whether
that is so (`lua/views_v1.lua`); only then `FileWait` polls INFO until the hit is written. On a fast disk a sync takes some
milliseconds of each second.

**A power cut or failover.** WAIT and WAITAOF block their connection, and confirm what that connection wrote last. So a fence
writes a key of its own, later than everything that was answered before, and waits for that: while one wait runs, all later
callers share the next. In a cluster each shard has a fence of its own, on its current primary.

Without replicas only `appendfsync always` will do: with `everysec` Valkey 9.1.2 confirms WAITAOF before any fdatasync (seen
with strace; with a replica it waits as it should). So the setting is asked, and nothing else believed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from headrace.engines.multiplex import ValkeyLost
from headrace.engines.valkey import Node, Session, Valkey, ValkeyDown, ValkeyMoved
from headrace.views.errors import NotDurable
from headrace.views.hot import FileState, Hot

ALL: Final = 0
"""The shard whose key stands for all of them where there is one server."""

POLL_S: Final = 0.005
WRITTEN_S: Final = 5.0
"""Valkey writes after 2 s at the latest, unless its disk refuses the write."""


@dataclass(slots=True)
class _Unwritten:
    """One answer that is held back until its hits are in the file."""

    run: str
    done: asyncio.Future[None]
    until_s: float
    seen: FileState | None = None
    """The file as it was first seen after the hits were counted."""

    def judge(self, state: FileState, now_s: float) -> None:
        """End the wait if `state`, which is later than the answer, decides it."""
        if self.done.done():
            return
        if state.run != self.run:
            self.fail(_lost("another server, or the same one started again, has the shard"))
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
        f"Valkey counted the hits and may have lost them ({reason}): it is not known whether they are counted;"
        " repeat only hits with an event id",
        retry_after_s=2,
    )


class FileWait:
    """`await wait.passed(shard, run)`: the server `run` has written what it answered before to its append-only file."""

    def __init__(self, hot: Hot) -> None:
        self._hot = hot
        self._waiting: dict[int, list[_Unwritten]] = {}
        self._polling: dict[int, asyncio.Task[None]] = {}

    async def passed(self, shard: int, run: str) -> None:
        """Wait for the write. Raises: ValkeyLost, where the hits may be lost with the server."""
        loop = asyncio.get_running_loop()
        mine = _Unwritten(run, loop.create_future(), loop.time() + WRITTEN_S)
        self._waiting.setdefault(shard, []).append(mine)
        polling = self._polling.get(shard)
        if polling is None or polling.done():
            self._polling[shard] = asyncio.create_task(self._poll(self._waiting[shard], shard))
        await mine.done

    async def _poll(self, waiting: list[_Unwritten], shard: int) -> None:
        while waiting:
            asked = list(waiting)
            try:
                state = await self._hot.file_state(shard)
            except ValkeyDown as error:
                for one in asked:
                    one.fail(_lost(error.text))
            except Exception as error:  # noqa: BLE001 - every caller gets it, and nobody waits without end
                for one in asked:
                    one.fail(error)
            else:
                for one in asked:
                    one.judge(state, asyncio.get_running_loop().time())
            waiting[:] = [one for one in waiting if not one.done.done()]
            if waiting:
                await asyncio.sleep(POLL_S)


@dataclass(slots=True)
class _Queue:
    """Those who wait for the same confirmation, and the one under way."""

    next: asyncio.Future[int] | None = None
    running: asyncio.Task[None] | None = None


class Fence:
    """`await fence.passed(shard)`: what Valkey answered of it before is synced to its file, or on `replicas` replicas."""

    def __init__(self, valkey: Valkey, *, replicas: int, timeout_s: float) -> None:
        self._valkey = valkey
        self._replicas = replicas
        self._timeout_ms = max(1, int(timeout_s * 1000))
        self._queues: dict[int, _Queue] = {}

    async def passed(self, shard: int) -> None:
        """Wait for the next confirmation. Raises: NotDurable, ValkeyDown."""
        which = shard if await self._valkey.is_cluster() else ALL
        queue = self._queues.setdefault(which, _Queue())
        if queue.next is None:
            queue.next = asyncio.get_running_loop().create_future()
        mine = queue.next
        if queue.running is None or queue.running.done():
            queue.running = asyncio.create_task(self._run(which, queue))
        confirmed = await asyncio.shield(mine)
        wanted = self._replicas or 1
        if confirmed < wanted:
            raise NotDurable(confirmed, wanted)

    async def _run(self, shard: int, queue: _Queue) -> None:
        while (asked := queue.next) is not None:
            queue.next = None
            try:
                confirmed = await self._confirm(shard)
            except ValkeyDown as error:
                asked.set_exception(error)
                asked.exception()  # a caller may be gone; then nobody else looks
            else:
                asked.set_result(confirmed)

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


async def means_of(valkey: Valkey) -> tuple[str, int]:
    """What a fence can stand on: how writes are synced (`always`, `everysec`, `no`) and how many replicas there are.

    Of a cluster the least of its primaries; one that is away may sync every second. Raises: ValkeyDown where none answers.
    """
    nodes = await valkey.primaries()
    told = await asyncio.gather(*[_means_of(node) for node in nodes], return_exceptions=True)
    found, failures = list[tuple[str, int]](), list[BaseException]()
    for one in told:
        if isinstance(one, BaseException):
            failures.append(one)
        else:
            found.append(one)
    if not found:
        raise failures[0]
    policies = {policy for policy, _ in found} | ({"everysec"} if failures else set())
    least = next(policy for policy in ("no", "everysec", "always") if policy in policies)
    return least, min(replicas for _, replicas in found)


async def _means_of(node: Node) -> tuple[str, int]:
    persistence = await node.command("INFO", "persistence")
    replication = await node.command("INFO", "replication")
    has_file = int(persistence.get("aof_enabled", 0)) == 1
    policy = await _sync_policy(node) if has_file else "no"
    return policy, int(replication.get("connected_slaves", 0))


async def _sync_policy(server: Node | Session) -> str:
    """The setting; where nobody may ask, that it is synced at all."""
    try:
        found = await server.command("CONFIG", "GET", "appendfsync")
    except ValkeyDown:
        return "everysec"
    value = found.get("appendfsync") if isinstance(found, dict) else found[1]
    return value.decode() if isinstance(value, bytes) else str(value)
