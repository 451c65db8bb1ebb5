"""The flusher: carries the hits of its shards from Valkey to PostgreSQL, a few times a second.

Any number may run. The shards are divided among those that are alive (`lease_shards`, a row each); one that dies leaves
its shards to the others within `views.lease`. A lease is for the division of work alone: what keeps counts right is the
offset, so a flusher that was stopped and wakes up does no harm.

While PostgreSQL or Valkey is away it waits, with growing pauses, and goes on by itself.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Final

from penstock.engines import Engines
from penstock.jobs.leases import require_not_cancelled
from penstock.kernel.backoff import Backoff
from penstock.kernel.crash import crash_point
from penstock.kernel.errors import PenstockError, Unavailable
from penstock.kernel.logs import logger
from penstock.views import store
from penstock.views.errors import NotDurable, ShardsFixed
from penstock.views.fence import Fence, means_of
from penstock.views.flush import ShardFlush, Tally
from penstock.views.hot import Hot
from penstock.views.settings import ViewsConfig, flush_lag_s

RECONNECT: Final = Backoff(0.1, 3.0)
LEASES_PER_TERM: Final = 3
FENCE_S: Final = 1.0
SYNCED_AFTER_S: Final = 2.0
"""With `everysec`, what is older is in the file: a sync begins each second, and writes wait for one that takes longer."""
SWEEP_EVERY_S: Final = 1.0
UNIQUES_EVERY_S: Final = 30.0
UNIQUES_PER_STEP: Final = 1_000
TOMBSTONES_EVERY_S: Final = 3_600.0
UNFENCED_S: Final = 60.0
"""A fence that does not hold in time is left out for so long."""
_log: Final = logger(__name__)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC).date()


class Flusher:
    """All that one flusher process does."""

    def __init__(self, engines: Engines, config: ViewsConfig, *, name: str) -> None:
        self.name = f"{name}:{token_hex(4)}"
        self._postgres = engines.postgres
        self._config = config
        self._hot = Hot(engines.valkey, engines.multiplexer)
        self._valkey = engines.valkey
        self._fence: Fence | None = None
        self._fenced_by = 0
        self._settled_s = 0.0
        self._unfenced_until_s = float("-inf")
        self._shards: dict[int, ShardFlush] = {}
        self._leased_s = float("-inf")
        self._cursor = b"0"
        self._swept_s = self._uniques_s = self._tombstones_s = self._caught_up_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Flush until `stop`; then let others have the shards. Raises: ShardsFixed."""
        failures = 0
        while not stop.is_set():
            require_not_cancelled()
            try:
                rows = await self.run_once()
                failures = 0
                pause_s = 0.0 if rows and self.has_more else self._config.flush_every_s
            except Unavailable as error:
                failures += 1
                pause_s = RECONNECT.delay_s(failures)
                _log.warning("views_not_flushed", error=error.text, failures=failures)
                flush_lag_s.set(time.monotonic() - self._caught_up_s)
                self._forget()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)
        with suppress(PenstockError):
            await store.shards.leave_shards(self._postgres, self.name)

    @property
    def has_more(self) -> bool:
        """Whether a shard had more than one flush takes."""
        return any(shard.has_more for shard in self._shards.values())

    async def run_once(self) -> int:
        """One flush of each shard of ours; how many rows were written."""
        await self._lease()
        tallies = [
            (shard, tally)
            for shard in self._shards.values()
            if (tally := await shard.read(settled_s=self._settled_s)) is not None
        ]
        rows = 0
        if tallies:
            await self._pass_fence()
            crash_point("views.fenced")
            rows = sum(await asyncio.gather(*[shard.write(tally) for shard, tally in tallies]))
        await self._note_lag(tallies)
        self._caught_up_s = time.monotonic()
        await self._tend()
        return rows

    async def _lease(self) -> None:
        now_s = time.monotonic()
        if now_s - self._leased_s < self._config.lease_s / LEASES_PER_TERM:
            return
        await self._look_for_fences()
        shards = await store.shards.ensure_shards(self._postgres, self._config.shards)
        if shards != self._config.shards:
            raise ShardsFixed(self._config.shards, shards)
        corrections = {shard: await self._hot.corrections(shard) for shard in range(shards)}
        leased = await store.shards.lease_shards(
            self._postgres, self.name, lease_s=self._config.lease_s
        )
        self._leased_s = now_s
        gone = self._shards.keys() - {state.shard for state in leased}
        for shard in gone:
            del self._shards[shard]
        for state in leased:
            known = self._shards.get(state.shard)
            # Another one flushed it, or PostgreSQL failed over to a copy that is behind: go on from there.
            if known is None or known.through != state.through:
                self._shards[state.shard] = ShardFlush(
                    self._postgres,
                    self._hot,
                    state,
                    shards=shards,
                    trim_after_s=self._config.trim_after_s,
                )
                _log.info("views_shard_taken", shard=state.shard, through=state.through)
            # Valkey is told after the commit: more there than PostgreSQL has now means that a commit was lost.
            if corrections[state.shard] > state.corrections:
                await self._take_back(state, corrections[state.shard])

    async def _take_back(self, state: store.shards.Shard, found: int) -> None:
        """PostgreSQL lost a move between classes: totals here are those after it."""
        if await self._hot.uncorrect(state.shard, found=found, stored=state.corrections):
            dropped = await self._hot.drop_totals([state.shard])
            _log.warning("views_move_lost", shard=state.shard, totals_dropped=dropped)

    async def _pass_fence(self) -> None:
        """Let a replica have what PostgreSQL is about to count.

        Where none takes it in time the flush goes on, and what Valkey forgets is found later (`ShardFlush.read`).
        """
        if self._fence is None or time.monotonic() < self._unfenced_until_s:
            return
        try:
            await self._fence.passed()
        except NotDurable as error:
            self._unfenced_until_s = time.monotonic() + UNFENCED_S
            _log.warning("views_flushed_without_fence", reason=error.text)

    async def _look_for_fences(self) -> None:
        """How this Valkey keeps what it has."""
        policy, replicas = await means_of(self._valkey)
        self._settled_s = SYNCED_AFTER_S if policy == "everysec" else 0.0
        wanted = min(replicas, self._config.durable_replicas or 1)
        if wanted != self._fenced_by:
            self._fenced_by = wanted
            fence = Fence(self._valkey, replicas=wanted, timeout_s=FENCE_S)
            self._fence = fence if wanted else None

    def _forget(self) -> None:
        """After an error nothing is known of a commit under way: ask PostgreSQL for the offsets again."""
        self._shards.clear()
        self._leased_s = float("-inf")

    async def _note_lag(self, tallies: list[tuple[ShardFlush, Tally]]) -> None:
        """How old the oldest hit was that is flushed now."""
        first_ms = min((tally.first_ms for _, tally in tallies), default=0)
        now_s = await self._hot.now_s() if first_ms else 0.0
        flush_lag_s.set(max(0.0, now_s - first_ms / 1000) if first_ms else 0.0)

    async def _tend(self) -> None:
        """Now and then: totals nobody asks for, numbers of viewers, tombstones that are over.

        Totals go after a flush that left nothing, so none is dropped whose hits are in Valkey alone.
        """
        now_s = time.monotonic()
        if now_s - self._swept_s >= SWEEP_EVERY_S and not self.has_more:
            self._swept_s = now_s
            idle_s = int(self._config.cache_for_s)
            self._cursor = await self._hot.sweep(self._cursor, list(self._shards), idle_s=idle_s)
        if now_s - self._uniques_s >= UNIQUES_EVERY_S:
            self._uniques_s = now_s
            await self.write_uniques()
        if now_s - self._tombstones_s >= TOMBSTONES_EVERY_S:
            self._tombstones_s = now_s
            await store.shards.drop_tombstones(self._postgres)

    async def write_uniques(self) -> int:
        """Write down the numbers of viewers that changed; how many."""
        written = 0
        for shard in self._shards:
            done: list[str] = []
            while found := await self._hot.uniques(shard, done, rows_max=UNIQUES_PER_STEP):
                rows = []
                for name, viewers in found:
                    day, _, entity = name.partition(":")
                    rows.append((entity, _EPOCH + timedelta(days=int(day)), viewers))
                await store.shards.write_uniques(self._postgres, rows)
                done = [name for name, _ in found]
                written += len(found)
        return written
