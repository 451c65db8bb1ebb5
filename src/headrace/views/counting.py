"""Counting hits: shards are set up, hits sent in batches, and missing totals filled.

The hits of one event-loop tick go to each shard as one call, and every caller receives its totals.
A call costs Valkey more than a hit, so a batch saves work under load, and it costs a single hit
nothing. A call without a reply is never repeated; callers that need that use an event id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Final
from zoneinfo import ZoneInfo

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.single_flight import SingleFlight
from headrace.views import store
from headrace.views.durability_wait import DurabilityWait, FileWriteWait
from headrace.views.errors import NotCounting, ShardsFixed
from headrace.views.model import (
    HITS_PER_CALL_MAX,
    IDS_PER_READ_MAX,
    Hit,
    Total,
    id_key,
    require_hits,
    shard_of,
)
from headrace.views.settings import hits_counted, totals_unavailable
from headrace.views.valkey_store import CircuitBreaker, Counted, ValkeyStore

SET_UP_S: Final = 2.0
"""Wait limit for PostgreSQL when a shard is set up and hits wait."""
FILL_S: Final = 1.0
"""Wait limit for PostgreSQL when totals are filled; the hit is already counted."""
FILL_TRIES: Final = 3
ZONE_EVERY_S: Final = 60.0
SHARDS_CACHED_MAX: Final = 100_000
"""Ids with a cached shard, about 15 MB; then the cache is cleared."""
NOT_CACHED: Final = "-"
DELETED: Final = "x"
_COUNTED: Final = hits_counted.labels(outcome="counted")
_REFUSED: Final = hits_counted.labels(outcome="refused")


class Shards:
    """The number of shards, and the lowest id that the next entry of each may have.

    Stream ids follow the server's clock and never decrease on one server. A server that lost the
    end of a stream and whose clock is behind would create ids that PostgreSQL has already counted.
    So every call sends the latest time known for the shard, and the new entry gets a later id.
    """

    def __init__(
        self, postgres: Postgres, valkey: ValkeyStore, shards: int, breaker: CircuitBreaker
    ) -> None:
        self.count = shards
        self.floors_ms = ["0"] * shards
        self.is_ready = False
        self._postgres = postgres
        self._valkey = valkey
        self._breaker = breaker
        self._opening: SingleFlight[None, None] = SingleFlight()
        self._set_ups: SingleFlight[int, None] = SingleFlight()

    async def ready(self) -> None:
        """Check the configured number of shards once, before the first use.

        Raises: ShardsFixed; PostgresDown if neither engine has the number.
        """
        if not self.is_ready:
            await self._opening.call(None, self._open)

    async def ready_for_read(self) -> None:
        """Check the number of shards if an engine has it; otherwise use the configured one."""
        if not self.is_ready:
            with suppress(Unavailable):
                await self.ready()

    async def set_up(self, shard: int) -> None:
        """Set up a shard at its offset in a Valkey that started or is empty.

        Concurrent callers share one set-up, because each one may interrupt a flush. Raises:
        NotCounting.
        """
        await self._set_ups.call(shard, lambda: self._set_up(shard))

    def note_entry(self, shard: int, entry_id: str) -> None:
        """Record the id of a new entry."""
        ms = entry_id.partition("-")[0]
        self.floors_ms[shard] = max(self.floors_ms[shard], ms)

    async def _set_up(self, shard: int) -> None:
        start = await self._valkey.start(shard)
        try:
            state = await self._breaker.call(
                lambda: store.begin_set_up(self._postgres, shard), wait_s=SET_UP_S
            )
        except Unavailable as error:
            raise NotCounting from error
        await self._valkey.init(
            shard,
            start=start,
            through=state.through,
            corrections=state.corrections,
            shards=self.count,
        )
        self._raise_floor(shard, state.through)

    async def _open(self) -> None:
        try:
            stored = await self._breaker.call(
                lambda: store.ensure_shards(self._postgres, self.count), wait_s=SET_UP_S
            )
        except Unavailable as error:
            await self._open_without_postgres(error)
            return
        if stored != self.count:
            raise ShardsFixed(self.count, stored)
        for state in await store.all_shards(self._postgres):
            self._raise_floor(state.shard, state.through)
        await self._valkey.note_shards(self.count)
        self.is_ready = True

    async def _open_without_postgres(self, error: HeadraceError) -> None:
        """Check the number recorded in Valkey, to count hits while PostgreSQL is down."""
        stored = await self._valkey.stored_shards()
        if stored is None:
            raise error
        if stored != self.count:
            raise ShardsFixed(self.count, stored)
        self.is_ready = True

    def _raise_floor(self, shard: int, through: str) -> None:
        ms = id_key(through)[0]
        if ms > int(self.floors_ms[shard]):
            self.floors_ms[shard] = str(ms)


class CacheFiller:
    """Fill missing totals from PostgreSQL, exact in spite of concurrent hits.

    Total and offset are read in one snapshot, and the Valkey function adds the hits after that
    offset in one step. It finds them in its notes, rarely by a search of the stream. Any number of
    callers may fill one entity: the first total stays and grows with every hit. Concurrent callers
    share a statement.
    """

    def __init__(
        self, postgres: Postgres, valkey: ValkeyStore, shards: Shards, breaker: CircuitBreaker
    ) -> None:
        self._postgres = postgres
        self._breaker = breaker
        self._valkey = valkey
        self._shards = shards
        self._fills: Batcher[Sequence[str], dict[str, Total]] = Batcher(self._fill_all, wait_s=0)

    async def fill(self, ids: Sequence[str]) -> dict[str, Total]:
        """Cache and return totals; None in those unavailable while PostgreSQL is down."""
        return await self._fills.submit(ids)

    async def _fill_all(self, calls: list[Sequence[str]]) -> list[dict[str, Total]]:
        """The totals of all calls, for each of them."""
        names = list(dict.fromkeys(chain.from_iterable(calls)))
        found: dict[str, Total] = {}
        for first in range(0, len(names), IDS_PER_READ_MAX):
            found |= await self._fill(names[first : first + IDS_PER_READ_MAX])
        return [found] * len(calls)

    async def _fill(self, ids: list[str]) -> dict[str, Total]:
        found: dict[str, Total] = {}
        left = ids
        for _ in range(FILL_TRIES):
            snapshots = await self._read(left)
            if snapshots is None:
                break
            by_shard: dict[int, list[store.Snapshot]] = {}
            for snapshot in snapshots:
                by_shard.setdefault(snapshot.shard, []).append(snapshot)
            for part in by_shard.values():
                found.update(await self._fill_shard(part))
            # Too old a snapshot, or PostgreSQL lost the shards until a flusher creates them.
            left = [entity for entity in left if entity not in found]
            if not left:
                return found
        else:
            totals_unavailable.labels(reason="behind").inc(len(left))
        return found | {
            entity: Total(id=entity, total=None, stale=True)
            for entity in ids
            if entity not in found
        }

    async def _read(self, ids: list[str]) -> list[store.Snapshot] | None:
        """Snapshots of totals; None if PostgreSQL does not answer."""
        shards = [shard_of(entity, self._shards.count) for entity in ids]
        try:
            return await self._breaker.call(
                lambda: store.totals_to_fill(self._postgres, ids, shards), wait_s=FILL_S
            )
        except Unavailable:
            totals_unavailable.labels(reason="postgres").inc(len(ids))
            return None

    async def _fill_shard(self, snapshots: list[store.Snapshot]) -> dict[str, Total]:
        """Totals of one shard, without those whose snapshot was too old."""
        shard = snapshots[0].shard
        dead = [snapshot.id for snapshot in snapshots if snapshot.is_deleted]
        if dead:
            await self._valkey.mark_deleted(shard, dead)
        found = {entity: Total(id=entity, total=0) for entity in dead}
        alive = [snapshot for snapshot in snapshots if not snapshot.is_deleted]
        if not alive:
            return found
        try:
            totals = await self._valkey.fill(
                shard,
                through=alive[0].through,
                corrections=alive[0].corrections,
                totals=[(snapshot.id, snapshot.total) for snapshot in alive],
            )
        except ValkeyDown:
            # The hit is counted. PostgreSQL's total is returned as stale.
            totals = [NOT_CACHED] * len(alive)
        if totals is None:
            return found
        for snapshot, text in zip(alive, totals, strict=True):
            if text == NOT_CACHED:
                totals_unavailable.labels(reason="behind").inc()
                found[snapshot.id] = Total(id=snapshot.id, total=snapshot.total, stale=True)
            else:
                total = 0 if text == DELETED else int(text)
                found[snapshot.id] = Total(id=snapshot.id, total=total)
        return found


class _Call:
    """One caller's hits, and the totals received so far."""

    __slots__ = ("done", "left", "totals")

    def __init__(self, hits: int, loop: asyncio.AbstractEventLoop) -> None:
        self.totals: list[str] = [""] * hits
        self.left = hits
        self.done: asyncio.Future[None] = loop.create_future()


class _Batch:
    """Hits sent to one shard in one call."""

    __slots__ = ("calls", "lines", "places", "shard")

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.lines: list[str] = []
        self.calls: list[_Call] = []
        self.places: list[int] = []


class HitBatcher:
    """Send concurrent hits in batches, one per shard and tick.

    `durability`: a wait before each answer, if hits must be durable.
    """

    def __init__(
        self,
        valkey: ValkeyStore,
        shards: Shards,
        filler: CacheFiller,
        *,
        time_zone: str,
        counters: Collection[str] = (),
        durability: DurabilityWait | None = None,
    ) -> None:
        self._durability = durability
        self._valkey = valkey
        self._file_wait = FileWriteWait(valkey)
        self._shards = shards
        self._filler = filler
        self._zone = ZoneInfo(time_zone)
        self._counters = counters
        self._zone_s = float("-inf")
        self._offset_s = 0
        self._cached_shards: dict[str, int] = {}
        self._batches: dict[int, _Batch] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def hits(self, hits: Iterable[Hit | str]) -> list[Total]:
        """Count all or none of each shard's hits. Return the new totals, in order.

        Raises: InvalidHit, TooManyHits, ValkeyDown, NotCounting, NotDurable.
        """
        names, lines, shards = self._parse(hits)
        if not lines:
            return []
        if not self._shards.is_ready:
            await self._shards.ready()
        call = _Call(len(lines), asyncio.get_running_loop())
        self._add(lines, shards, call)
        await call.done
        totals, filled = call.totals, dict[str, Total]()
        if NOT_CACHED in totals:
            pairs = zip(names, totals, strict=True)
            filled = await self._filler.fill(
                list({name for name, total in pairs if total == NOT_CACHED})
            )
        return [
            filled[name]
            if total == NOT_CACHED
            else Total(id=name, total=0 if total == DELETED else int(total))
            for name, total in zip(names, totals, strict=True)
        ]

    def _parse(self, hits: Iterable[Hit | str]) -> tuple[list[str], list[str], list[int]]:
        """Entities, lines and shards. The first use of an id validates it and caches its shard."""
        cached = self._cached_shards
        if type(hits) is list and len(hits) <= HITS_PER_CALL_MAX:
            # A copy, because the caller may change its list meanwhile.
            names = list(hits)
            with suppress(KeyError, TypeError):
                return names, names, [cached[name] for name in names]
        pairs = require_hits(hits, self._counters)
        names, lines = [name for name, _ in pairs], [line for _, line in pairs]
        shards = [shard_of(name, self._shards.count) for name in names]
        if len(cached) > SHARDS_CACHED_MAX:
            cached.clear()
        cached.update(
            [
                (name, shard)
                for name, line, shard in zip(names, lines, shards, strict=True)
                if line is name
            ]
        )
        return names, lines, shards

    def _add(self, lines: list[str], shards: list[int], call: _Call) -> None:
        batches = self._batches
        if not batches:
            asyncio.get_running_loop().call_soon(self._send_all)
        for place, shard in enumerate(shards):
            batch = batches.get(shard)
            if batch is None:
                batch = batches[shard] = _Batch(shard)
            elif len(batch.lines) >= HITS_PER_CALL_MAX:
                self._start(batch)
                batch = batches[shard] = _Batch(shard)
            batch.lines.append(lines[place])
            batch.calls.append(call)
            batch.places.append(place)

    def _send_all(self) -> None:
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            self._start(batch)

    def _start(self, batch: _Batch) -> None:
        task = asyncio.create_task(self._send(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _send(self, batch: _Batch) -> None:
        try:
            counted = await self._count(batch)
            if counted.unwritten_on:
                await self._file_wait.wait(batch.shard, counted.unwritten_on)
            if self._durability is not None:
                await self._durability.wait(batch.shard)
        except BaseException as error:
            _REFUSED.inc(len(batch.lines))
            for call in batch.calls:
                if not call.done.done():
                    call.done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        _COUNTED.inc(len(batch.lines))
        for call, place, total in zip(batch.calls, batch.places, counted.totals, strict=True):
            call.totals[place] = total
            call.left -= 1
            if not call.left and not call.done.done():
                call.done.set_result(None)

    async def _count(self, batch: _Batch) -> Counted:
        for _ in range(2):
            counted = await self._valkey.hit(
                batch.shard,
                batch.lines,
                floor_ms=self._shards.floors_ms[batch.shard],
                offset_s=self._zone_offset_s(),
            )
            if counted.entry is not None:
                if counted.entry:
                    self._shards.note_entry(batch.shard, counted.entry)
                return counted
            await self._shards.set_up(batch.shard)
        raise NotCounting

    def _zone_offset_s(self) -> int:
        """Seconds by which the configured time zone is ahead of UTC now."""
        now_s = time.monotonic()
        if now_s - self._zone_s > ZONE_EVERY_S:
            self._zone_s = now_s
            offset = datetime.now(self._zone).utcoffset()
            assert offset is not None
            self._offset_s = int(offset.total_seconds())
        return self._offset_s
