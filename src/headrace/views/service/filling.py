"""Totals that Valkey does not have: read from PostgreSQL and put there exact, whatever is counted meanwhile.

Total and offset come from one snapshot, and the function adds what the stream has after that offset, in one step. Any
number of callers may do that for one entity: the first one's total stays, and grows with every hit. Callers of one tick
share a statement. A PostgreSQL that does not answer is not asked again for a moment (`patience`), so that hits do not
wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.kernel.errors import Unavailable
from headrace.views import store
from headrace.views.hot import Hot
from headrace.views.model import IDS_PER_READ_MAX, Total, shard_of
from headrace.views.service.patience import Patience
from headrace.views.service.shards import Shards
from headrace.views.settings import totals_untold
from headrace.views.store.totals import Snapshot

TRIES: Final = 3
ANSWER_S: Final = 1.0
"""Longest wait for PostgreSQL; a hit is counted by then."""


class Filling:
    """Fills what callers miss."""

    def __init__(self, postgres: Postgres, hot: Hot, shards: Shards, patience: Patience) -> None:
        self._postgres = postgres
        self._patience = patience
        self._hot = hot
        self._shards = shards
        self._asked: dict[str, asyncio.Future[Total]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def fill(self, ids: Sequence[str]) -> dict[str, Total]:
        """The total of each, cached from now on; None in those that PostgreSQL cannot tell now."""
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._start)
        futures = {}
        for entity in ids:
            future = self._asked.get(entity)
            if future is None:
                future = self._asked[entity] = asyncio.get_running_loop().create_future()
            futures[entity] = future
        return {entity: await asyncio.shield(future) for entity, future in futures.items()}

    def _start(self) -> None:
        asked, self._asked = self._asked, {}
        names = list(asked)
        for first in range(0, len(names), IDS_PER_READ_MAX):
            part = {name: asked[name] for name in names[first : first + IDS_PER_READ_MAX]}
            task = asyncio.create_task(self._answer(part))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _answer(self, asked: dict[str, asyncio.Future[Total]]) -> None:
        try:
            found = await self._fill(list(asked))
        except BaseException as error:
            for future in asked.values():
                future.set_exception(error)
                future.exception()
            if not isinstance(error, Exception):
                raise
            return
        for entity, future in asked.items():
            future.set_result(found[entity])

    async def _fill(self, ids: list[str]) -> dict[str, Total]:
        found: dict[str, Total] = {}
        left = ids
        for _ in range(TRIES):
            snapshots = await self._read(left)
            if snapshots is None:
                break
            left = []
            by_shard: dict[int, list[Snapshot]] = {}
            for snapshot in snapshots:
                by_shard.setdefault(snapshot.shard, []).append(snapshot)
            for part in by_shard.values():
                told = await self._fill_shard(part)
                left += [snapshot.id for snapshot in part if snapshot.id not in told]
                found.update(told)
            if not left:
                return found
        if left and left != ids:
            totals_untold.labels(reason="behind").inc(len(left))
        return found | {
            entity: Total(id=entity, total=None, stale=True)
            for entity in ids
            if entity not in found
        }

    async def _read(self, ids: list[str]) -> list[Snapshot] | None:
        """None where PostgreSQL does not answer."""
        shards = [shard_of(entity, self._shards.count) for entity in ids]
        try:
            return await self._patience.ask(
                lambda: store.totals.totals_to_fill(self._postgres, ids, shards), wait_s=ANSWER_S
            )
        except Unavailable:
            totals_untold.labels(reason="postgres").inc(len(ids))
            return None

    async def _fill_shard(self, snapshots: list[Snapshot]) -> dict[str, Total]:
        """The totals that could be told; without those whose snapshot was too old."""
        shard = snapshots[0].shard
        dead = [snapshot.id for snapshot in snapshots if snapshot.is_deleted]
        if dead:
            await self._hot.bury(shard, dead)
        found = {entity: Total(id=entity, total=0) for entity in dead}
        alive = [snapshot for snapshot in snapshots if not snapshot.is_deleted]
        if not alive:
            return found
        try:
            state, totals = await self._hot.fill(
                shard,
                through=alive[0].through,
                corrections=alive[0].corrections,
                totals=[(snapshot.id, snapshot.total) for snapshot in alive],
            )
        except ValkeyDown:
            # The hit is counted; PostgreSQL's total is what can be told of it.
            state, totals = "behind", []
        if state == "ok":
            for snapshot, told in zip(alive, totals, strict=True):
                total = 0 if told == "x" else int(told)
                found[snapshot.id] = Total(id=snapshot.id, total=total)
        elif state == "behind":
            totals_untold.labels(reason="behind").inc(len(alive))
            for snapshot in alive:
                found[snapshot.id] = Total(id=snapshot.id, total=snapshot.total, stale=True)
        return found
