"""The flusher: move the hits of its shards from Valkey to PostgreSQL, several times a second.

Any number may run. The shards are divided among the live flushers (`lease_shards`), and the others
take over from a dead one within `views.lease`. A lease only divides the work. The offset keeps
counts right, so a flusher that resumes after a pause does no harm.

While PostgreSQL or Valkey is down the flusher retries with growing pauses. While one primary of a
cluster is down its shards are skipped and retried every second, and the other shards continue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from secrets import token_hex
from typing import Final, TypeVar

from headrace.engines import Engines
from headrace.engines.postgres_errors import PostgresBusy
from headrace.engines.valkey import ValkeyDown
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import Peak
from headrace.kernel.resilience import Backoff, crash_point, require_not_cancelled, wait_event
from headrace.views import store
from headrace.views.durability_wait import DurabilityWait, durability_of
from headrace.views.errors import NotDurable, ShardsFixed
from headrace.views.flush import FlushBatch, ShardFlush
from headrace.views.model import Correction, id_key
from headrace.views.settings import ViewsConfig, flush_lag_s
from headrace.views.valkey_store import IdleTotals, ValkeyStore

RECONNECT: Final = Backoff(0.1, 3.0)
LEASES_PER_TERM: Final = 3
CONFIRM_S: Final = 1.0
"""Wait limit for a replica to confirm the entries of a flush."""
SYNCED_AFTER_S: Final = 2.2
"""With `everysec` older entries are in the file: Valkey delays a write for at most 2 s."""
SWEEP_EVERY_S: Final = 1.0
UNIQUES_EVERY_S: Final = 30.0
UNIQUES_PER_STEP: Final = 250
"""Each with a sketch of up to 12 KiB."""
TOMBSTONES_EVERY_S: Final = 3_600.0
ROWS_DROPPED_MAX: Final = 20_000
"""Rows of viewers or corrections per statement; the next flush continues."""
CORRECTIONS_PER_STEP: Final = 500
CORRECTIONS_KEPT_S: Final = 86_400.0
"""Valkey that is restored from an older copy gets all its totals from PostgreSQL again."""
TIMELINE: Final = 1 << 40
"""From the numbers of one timeline of PostgreSQL to those of the next."""
HISTORY_EVERY_S: Final = 3_600.0
ROLL_UP_EVERY_S: Final = 1.0
ROLL_UP_IDS: Final = 2_000
"""Entities per step, each with up to 744 hours in four classes."""
CHANGES_EVERY_S: Final = 10.0
CHANGES_DROPPED_MAX: Final = 500
"""Changes of a shard dropped per step, each of up to 20,000 rows."""
UNCONFIRMED_S: Final = 60.0
"""How long flushes skip the confirmation after it timed out."""
UNREACHABLE_S: Final = 1.0
"""How often shards with an unreachable primary are retried."""
Answer = TypeVar("Answer")
_log: Final = logger(__name__)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC).date()


class Flusher:
    """One flusher process."""

    def __init__(self, engines: Engines, config: ViewsConfig, *, name: str) -> None:
        self.name = f"{name}:{token_hex(4)}"
        self._postgres = engines.postgres
        self._config = config
        # A lease must outlast the pauses between flushes, or flushers take shards from each other.
        self._lease_s = max(config.lease_s, LEASES_PER_TERM * config.flush_every_s)
        self._valkey = ValkeyStore(engines.valkey, engines.multiplexer)
        self._servers = engines.valkey
        self._sparse_log = SparseLogger(_log)
        self._durability: DurabilityWait | None = None
        self._replicas = 0
        self._min_age_s = 0.0
        self._lag = Peak(flush_lag_s)
        self._unconfirmed_until_s = float("-inf")
        self._shards: dict[int, ShardFlush] = {}
        self._unreachable: dict[int, float] = {}
        """Own shards with an unreachable primary of a cluster, and since when."""
        self._leased_s = float("-inf")
        self._cursor = b"0"
        self._idle: list[IdleTotals] = []
        """Unused totals to delete once the hits before are flushed."""
        self._history_at_s = self._changes_at_s = float("-inf")
        self._swept_s = self._uniques_s = self._tombstones_s = self._caught_up_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Flush until `stop`, then release the shards. Raises: ShardsFixed."""
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
                self._sparse_log.warning("views_not_flushed", error=error.text, failures=failures)
                self._lag.note(time.monotonic() - self._caught_up_s)
                self._reset()
            await wait_event(stop, pause_s)
        with suppress(HeadraceError):
            await store.leave_shards(self._postgres, self.name)

    @property
    def has_more(self) -> bool:
        """Whether a shard has more entries than one flush writes."""
        return any(shard.has_more for shard in self._shards.values())

    async def run_once(self) -> int:
        """Flush each owned shard once. Return the rows written."""
        await self._lease()
        batches = []
        for shard in list(self._shards.values()):
            read = shard.read(min_age_s=self._min_age_s)
            batch = await self._if_reachable(shard.shard, read)
            if batch is not None:
                batches.append((shard, batch))
        rows = 0
        if batches:
            batches = await self._confirmed(batches)
            crash_point("views.confirmed")
            writes = [
                self._if_reachable(shard.shard, shard.write(batch)) for shard, batch in batches
            ]
            rows = sum([written or 0 for written in await asyncio.gather(*writes)])
        await self._note_lag(batches)
        self._caught_up_s = time.monotonic()
        await self._maintain()
        return rows

    async def _lease(self) -> None:
        now_s = time.monotonic()
        lasts_s = UNREACHABLE_S if self._unreachable else self._lease_s / LEASES_PER_TERM
        if now_s - self._leased_s < lasts_s:
            return
        await self._update_durability()
        shards = await store.ensure_shards(self._postgres, self._config.shards)
        if shards != self._config.shards:
            raise ShardsFixed(self._config.shards, shards)
        corrections = {
            shard: await self._if_reachable(shard, self._valkey.corrections(shard))
            for shard in range(shards)
        }
        leased = await store.lease_shards(self._postgres, self.name, lease_s=self._lease_s)
        self._leased_s = now_s
        unread = {state.shard for state in leased if corrections[state.shard] is None}
        self._unreachable = {
            shard: at_s for shard, at_s in self._unreachable.items() if shard in unread
        }
        leased = [state for state in leased if state.shard not in unread]
        gone = self._shards.keys() - {state.shard for state in leased}
        for shard in gone:
            del self._shards[shard]
        for state in leased:
            known = self._shards.get(state.shard)
            # Another flusher moved the offset, or PostgreSQL failed over: start at the new offset.
            if known is None or known.through != state.through:
                self._shards[state.shard] = ShardFlush(
                    self._postgres,
                    self._valkey,
                    state,
                    shards=shards,
                    trim_after_s=self._config.trim_after_s,
                )
                _log.info("views_shard_taken", shard=state.shard, through=state.through)
            highest, applied = corrections[state.shard] or (0, 0)
            await self._if_reachable(state.shard, self._correct(state, highest, applied))

    async def _correct(self, state: store.Shard, highest: int, applied: int) -> None:
        """Apply deletions and moves that Valkey did not receive, or lost.

        Valkey is updated after the commit, and was read before `state`. So a number there that
        PostgreSQL does not have is that of a lost commit: then all cached totals are dropped.
        """
        shard = state.shard
        while applied < state.corrections >= highest:
            found = await store.corrections(
                self._postgres, shard, since=applied, rows_max=CORRECTIONS_PER_STEP
            )
            found = unapplied(found, applied=applied, highest=highest)
            if not found:
                break
            await self._valkey.correct(shard, found, after=applied)
            applied = found[-1].number
            _log.info("views_corrections_repeated", shard=shard, count=len(found))
        if applied < state.corrections or highest > state.corrections:
            dropped = await self._valkey.drop_totals([shard])
            await self._valkey.reset_corrections(shard, found=highest, stored=state.corrections)
            _log.warning("views_corrections_lost", shard=shard, totals_dropped=dropped)

    async def _if_reachable(self, shard: int, step: Awaitable[Answer]) -> Answer | None:
        """The result of `step`; None if the shard's primary is down but other primaries answer.

        The state of a running commit is unknown then, so the shard is loaded again. Raises:
        ValkeyDown if no primary answers.
        """
        try:
            return await step
        except ValkeyDown as error:
            if not await self._servers.is_cluster():
                raise
            await self._servers.open()
            if shard not in self._unreachable:
                self._unreachable[shard] = time.monotonic()
                _log.warning("views_shard_unreachable", shard=shard, error=error.text)
            self._shards.pop(shard, None)
            return None

    async def _confirmed(
        self, batches: list[tuple[ShardFlush, FlushBatch]]
    ) -> list[tuple[ShardFlush, FlushBatch]]:
        """Wait until a replica has the entries of each batch. Return the batches to write.

        After a timeout the flush continues; `ShardFlush.read` detects entries that Valkey loses.
        """
        if self._durability is None or time.monotonic() < self._unconfirmed_until_s:
            return batches
        waits = [
            self._if_reachable(shard.shard, self._confirm(self._durability, shard.shard))
            for shard, _ in batches
        ]
        results = await asyncio.gather(*waits)
        return [pair for pair, is_done in zip(batches, results, strict=True) if is_done]

    async def _confirm(self, durability: DurabilityWait, shard: int) -> bool:
        try:
            await durability.wait(shard)
        except NotDurable as error:
            self._unconfirmed_until_s = time.monotonic() + UNCONFIRMED_S
            _log.warning("views_flush_unconfirmed", shard=shard, reason=error.text)
        return True

    async def _update_durability(self) -> None:
        """Adapt to Valkey's sync policy and number of replicas."""
        policy, replicas = await durability_of(self._servers)
        self._min_age_s = SYNCED_AFTER_S if policy == "everysec" else 0.0
        required = min(replicas, self._config.durable_replicas or 1)
        if required != self._replicas:
            self._replicas = required
            wait = DurabilityWait(self._servers, replicas=required, timeout_s=CONFIRM_S)
            self._durability = wait if required else None

    def _reset(self) -> None:
        """Load all offsets again after an error: the state of a running commit is unknown."""
        self._shards.clear()
        self._unreachable.clear()
        self._leased_s = float("-inf")

    async def _note_lag(self, batches: list[tuple[ShardFlush, FlushBatch]]) -> None:
        """Record the age of the oldest hit flushed now."""
        now_s = time.monotonic()
        lags_s = [now_s - since_s for since_s in self._unreachable.values()]
        firsts = [(batch.first_ms, shard.shard) for shard, batch in batches if batch.first_ms]
        if firsts:
            first_ms, shard = min(firsts)
            now_s = await self._if_reachable(shard, self._valkey.now_s(shard)) or 0.0
            lags_s.append(now_s - first_ms / 1000)
        self._lag.note(max([0.0, *lags_s]))

    async def _maintain(self) -> None:
        """Sweep unused totals, store viewer counts, delete old ones and expired tombstones."""
        now_s = time.monotonic()
        if now_s - self._swept_s >= SWEEP_EVERY_S and not self.has_more:
            self._swept_s = now_s
            await self._sweep()
        if now_s >= self._history_at_s:
            has_more = await self.roll_up()
            self._history_at_s = now_s + (ROLL_UP_EVERY_S if has_more else HISTORY_EVERY_S)
        if now_s >= self._changes_at_s:
            self._changes_at_s = now_s + CHANGES_EVERY_S
            await self.keep_changes()
        if now_s - self._uniques_s >= UNIQUES_EVERY_S:
            self._uniques_s = now_s
            await self.write_uniques()
        if now_s - self._tombstones_s >= TOMBSTONES_EVERY_S:
            await store.drop_tombstones(self._postgres)
            dropped = [await self.drop_old_viewers(), await self.drop_old_corrections()]
            if max(dropped) < ROWS_DROPPED_MAX:
                self._tombstones_s = now_s

    async def _sweep(self) -> None:
        """Find unused totals among some keys, and delete those whose hits are flushed.

        A read returns PostgreSQL's total then, which must not be lower. Valkey's clock does not
        prove that: after a step of the clock a total seems unused that was hit just now.
        """
        found, self._idle = self._idle, []
        for idle in found:
            own = self._shards.get(idle.shard)
            if own is not None and id_key(own.through) < id_key(idle.last):
                self._idle.append(idle)
            elif own is not None:
                await self._if_reachable(idle.shard, self._valkey.sweep(idle))
        if not self._idle:
            await self._find_idle()

    async def _find_idle(self) -> None:
        """Take a step through the keys. An unreachable primary of a cluster restarts the pass."""
        idle_s = int(self._config.cache_for_s)
        shards, cursor = sorted(self._shards), self._cursor
        self._cursor = b"0"
        try:
            self._cursor, self._idle = await self._valkey.find_idle(cursor, shards, idle_s=idle_s)
        except ValkeyDown:
            if not await self._servers.is_cluster():
                raise

    async def roll_up(self) -> bool:
        """Create partitions ahead, and take one step to replace old hours by days.

        Return whether there may be another step. A lock that is not free ends the step, so that
        the drop of a month never makes reads and flushes wait.
        """
        before = datetime.now(UTC) - timedelta(seconds=self._config.hours_kept_s)
        zone = self._config.time_zone
        try:
            await store.ensure_months(self._postgres)
            has_more = await store.roll_up(
                self._postgres, before=before, time_zone=zone, ids_max=ROLL_UP_IDS
            )
        except PostgresBusy:
            return True
        crash_point("views.rolled")
        return has_more

    async def keep_changes(self) -> int:
        """Turn the feed of changes on or off, and drop old changes. Return how many."""
        kept_s = self._config.changes_kept_s
        return await store.keep_changes(self._postgres, kept_s=kept_s, rows_max=CHANGES_DROPPED_MAX)

    async def drop_old_viewers(self) -> int:
        """Delete some viewer counts older than `views.viewers_kept`. Return their number."""
        before = (datetime.now(UTC) - timedelta(seconds=self._config.viewers_kept_s)).date()
        return await store.drop_uniques(self._postgres, before=before, rows_max=ROWS_DROPPED_MAX)

    async def drop_old_corrections(self) -> int:
        """Delete some numbers of deletions and moves of over a day ago. Return how many."""
        return await store.drop_corrections(
            self._postgres, kept_s=CORRECTIONS_KEPT_S, rows_max=ROWS_DROPPED_MAX
        )

    async def write_uniques(self) -> int:
        """Store the viewer counts that changed. Return their number."""
        written = [
            await self._if_reachable(shard, self._write_uniques(shard))
            for shard in list(self._shards)
        ]
        return sum(count or 0 for count in written)

    async def _write_uniques(self, shard: int) -> int:
        done: list[str] = []
        written = 0
        while found := await self._valkey.uniques(shard, done, rows_max=UNIQUES_PER_STEP):
            rows = []
            for name, viewers, sketch in found:
                day, _, entity = name.partition(":")
                rows.append((entity, _EPOCH + timedelta(days=int(day)), viewers, sketch))
            await store.write_uniques(self._postgres, rows)
            done = [name for name, _, _ in found]
            written += len(found)
        return written


def unapplied(found: list[Correction], *, applied: int, highest: int) -> list[Correction]:
    """The corrections after `applied`, to which Valkey applied all; it received `highest` too.

    `found` are those from `applied` on. None if PostgreSQL lost `applied` or `highest`, or deleted
    one that follows.
    """
    left = [each for each in found if each.number > applied]
    numbers = [each.number for each in left]
    is_kept = applied == 0 or len(left) < len(found)
    for before, number in pairwise([applied, *numbers]):
        is_first = number % TIMELINE == 1 and (before > applied or is_kept)
        if number != before + 1 and not is_first:
            return []
    if numbers and applied < highest <= numbers[-1] and highest not in numbers:
        return []
    return left
