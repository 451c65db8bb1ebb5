"""The flusher: carries the hits of its shards from Valkey to PostgreSQL, a few times a second.

Any number may run. The shards are divided among those that are alive (`lease_shards`, a row each); one that dies leaves
its shards to the others within `views.lease`. A lease is for the division of work alone: what keeps counts right is the
offset, so a flusher that was stopped and wakes up does no harm.

While PostgreSQL or Valkey is away it waits, with growing pauses, and goes on by itself. Where a primary of a cluster is away
its shards are left out, and looked for again every second; the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Final, TypeVar

from headrace.engines import Engines
from headrace.engines.valkey import ValkeyDown
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import Backoff, crash_point, require_not_cancelled
from headrace.views import store
from headrace.views.errors import NotDurable, ShardsFixed
from headrace.views.fence import Fence, means_of
from headrace.views.flush import ShardFlush, Tally
from headrace.views.hot import Hot
from headrace.views.settings import ViewsConfig, flush_lag_s

RECONNECT: Final = Backoff(0.1, 3.0)
LEASES_PER_TERM: Final = 3
FENCE_S: Final = 1.0
SYNCED_AFTER_S: Final = 2.2
"""With `everysec` older entries are in the file: Valkey postpones a write for 2 s at most, and looks ten times a second."""
SWEEP_EVERY_S: Final = 1.0
UNIQUES_EVERY_S: Final = 30.0
UNIQUES_PER_STEP: Final = 1_000
TOMBSTONES_EVERY_S: Final = 3_600.0
VIEWERS_DROPPED_MAX: Final = 20_000
"""In one statement; more follow after the next flush."""
UNFENCED_S: Final = 60.0
"""A fence that does not hold in time is left out for so long."""
AWAY_S: Final = 1.0
"""So often shards whose primary is away are looked for."""
Answer = TypeVar("Answer")
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)
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
        self._away: dict[int, float] = {}
        """Since when the primary of a shard of ours is away, while others of the cluster answer."""
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
                _often.warning("views_not_flushed", error=error.text, failures=failures)
                flush_lag_s.set(time.monotonic() - self._caught_up_s)
                self._forget()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)
        with suppress(HeadraceError):
            await store.shards.leave_shards(self._postgres, self.name)

    @property
    def has_more(self) -> bool:
        """Whether a shard had more than one flush takes."""
        return any(shard.has_more for shard in self._shards.values())

    async def run_once(self) -> int:
        """One flush of each shard of ours; how many rows were written."""
        await self._lease()
        tallies = []
        for shard in list(self._shards.values()):
            tally = await self._unless_away(shard.shard, shard.read(settled_s=self._settled_s))
            if tally is not None:
                tallies.append((shard, tally))
        rows = 0
        if tallies:
            tallies = await self._pass_fence(tallies)
            crash_point("views.fenced")
            writes = [
                self._unless_away(shard.shard, shard.write(tally)) for shard, tally in tallies
            ]
            rows = sum([written or 0 for written in await asyncio.gather(*writes)])
        await self._note_lag(tallies)
        self._caught_up_s = time.monotonic()
        await self._tend()
        return rows

    async def _lease(self) -> None:
        now_s = time.monotonic()
        lasts_s = AWAY_S if self._away else self._config.lease_s / LEASES_PER_TERM
        if now_s - self._leased_s < lasts_s:
            return
        await self._look_for_fences()
        shards = await store.shards.ensure_shards(self._postgres, self._config.shards)
        if shards != self._config.shards:
            raise ShardsFixed(self._config.shards, shards)
        corrections = {
            shard: await self._unless_away(shard, self._hot.corrections(shard))
            for shard in range(shards)
        }
        leased = await store.shards.lease_shards(
            self._postgres, self.name, lease_s=self._config.lease_s
        )
        self._leased_s = now_s
        unread = {state.shard for state in leased if corrections[state.shard] is None}
        self._away = {shard: at_s for shard, at_s in self._away.items() if shard in unread}
        leased = [state for state in leased if state.shard not in unread]
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
            found = corrections[state.shard] or 0
            if found > state.corrections:
                await self._unless_away(state.shard, self._take_back(state, found))

    async def _take_back(self, state: store.shards.Shard, found: int) -> None:
        """PostgreSQL lost a move between classes: totals here are those after it."""
        if await self._hot.uncorrect(state.shard, found=found, stored=state.corrections):
            dropped = await self._hot.drop_totals([state.shard])
            _log.warning("views_move_lost", shard=state.shard, totals_dropped=dropped)

    async def _unless_away(self, shard: int, step: Awaitable[Answer]) -> Answer | None:
        """What a step of a shard gives; None where its primary is away while others of a cluster answer.

        Nothing is known of a commit under way then: the shard is taken anew. Raises: ValkeyDown where no primary answers.
        """
        try:
            return await step
        except ValkeyDown as error:
            if not await self._valkey.is_cluster():
                raise
            await self._valkey.open()
            if shard not in self._away:
                self._away[shard] = time.monotonic()
                _log.warning("views_shard_away", shard=shard, error=error.text)
            self._shards.pop(shard, None)
            return None

    async def _pass_fence(
        self, tallies: list[tuple[ShardFlush, Tally]]
    ) -> list[tuple[ShardFlush, Tally]]:
        """Let a replica have what PostgreSQL is about to count; what may be written now.

        Where none takes it in time the flush goes on, and what Valkey forgets is found later (`ShardFlush.read`).
        """
        if self._fence is None or time.monotonic() < self._unfenced_until_s:
            return tallies
        fences = [
            self._unless_away(shard.shard, self._confirm(self._fence, shard.shard))
            for shard, _ in tallies
        ]
        passed = await asyncio.gather(*fences)
        return [pair for pair, has_passed in zip(tallies, passed, strict=True) if has_passed]

    async def _confirm(self, fence: Fence, shard: int) -> bool:
        try:
            await fence.passed(shard)
        except NotDurable as error:
            self._unfenced_until_s = time.monotonic() + UNFENCED_S
            _log.warning("views_flushed_without_fence", shard=shard, reason=error.text)
        return True

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
        self._away.clear()
        self._leased_s = float("-inf")

    async def _note_lag(self, tallies: list[tuple[ShardFlush, Tally]]) -> None:
        """How old the oldest hit was that is flushed now."""
        now_s = time.monotonic()
        lags_s = [now_s - since_s for since_s in self._away.values()]
        firsts = [(tally.first_ms, shard.shard) for shard, tally in tallies if tally.first_ms]
        if firsts:
            first_ms, shard = min(firsts)
            now_s = await self._unless_away(shard, self._hot.now_s(shard)) or 0.0
            lags_s.append(now_s - first_ms / 1000)
        flush_lag_s.set(max([0.0, *lags_s]))

    async def _tend(self) -> None:
        """Sweep totals that nobody reads, write numbers of viewers, drop old ones and tombstones that are over.

        Totals go after a flush that left nothing, so none is dropped whose hits are in Valkey alone.
        """
        now_s = time.monotonic()
        if now_s - self._swept_s >= SWEEP_EVERY_S and not self.has_more:
            self._swept_s = now_s
            await self._sweep()
        if now_s - self._uniques_s >= UNIQUES_EVERY_S:
            self._uniques_s = now_s
            await self.write_uniques()
        if now_s - self._tombstones_s >= TOMBSTONES_EVERY_S:
            await store.shards.drop_tombstones(self._postgres)
            if await self.drop_old_viewers() < VIEWERS_DROPPED_MAX:
                self._tombstones_s = now_s

    async def _sweep(self) -> None:
        """One step; it begins anew where a primary of a cluster went away."""
        idle_s = int(self._config.cache_for_s)
        shards, cursor = sorted(self._shards), self._cursor
        self._cursor = b"0"
        try:
            self._cursor = await self._hot.sweep(cursor, shards, idle_s=idle_s)
        except ValkeyDown:
            if not await self._valkey.is_cluster():
                raise

    async def drop_old_viewers(self) -> int:
        """Remove numbers of viewers that are older than `views.viewers_kept`; how many, at most VIEWERS_DROPPED_MAX."""
        before = (datetime.now(UTC) - timedelta(seconds=self._config.viewers_kept_s)).date()
        return await store.shards.drop_uniques(
            self._postgres, before=before, rows_max=VIEWERS_DROPPED_MAX
        )

    async def write_uniques(self) -> int:
        """Write down the numbers of viewers that changed; how many."""
        written = [
            await self._unless_away(shard, self._write_uniques(shard))
            for shard in list(self._shards)
        ]
        return sum(count or 0 for count in written)

    async def _write_uniques(self, shard: int) -> int:
        done: list[str] = []
        written = 0
        while found := await self._hot.uniques(shard, done, rows_max=UNIQUES_PER_STEP):
            rows = []
            for name, viewers in found:
                day, _, entity = name.partition(":")
                rows.append((entity, _EPOCH + timedelta(days=int(day)), viewers))
            await store.shards.write_uniques(self._postgres, rows)
            done = [name for name, _ in found]
            written += len(found)
        return written
