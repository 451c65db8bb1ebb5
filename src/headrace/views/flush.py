"""The flush of a shard: count the hits of its stream in PostgreSQL, each exactly once.

    read synced entries after the offset -> aggregate
        -> ONE transaction: move the offset if unchanged, add to totals and hours
        -> record the offset in Valkey -> trim entries flushed ten minutes ago

The offset is the id of the last counted entry, and it moves in the transaction that counts. After
any crash the next flush starts at the offset, so there is no list of work in progress and nothing
to repair. Two flushers of one shard read the same entries, and one of them finds the offset moved.
That one must not trim, because the entries it read may not be counted. A set-up of the stream makes
running flushes fail in the same way: Valkey may have lost the entries that they read.

**Synced entries only.** PostgreSQL must not count an entry that Valkey can still lose. With
`appendfsync everysec` an entry is counted 2.2 s after this process first saw it. With replicas it
is counted once one of them has it (`durability_wait.py`). Valkey may still lose data: its files
deleted, an old copy restored, a lagging replica promoted. Then the anchor is missing: the entry at
the offset, which trimming always keeps. New ids are then raised above the offset, and the cached
totals, which may be too low, are dropped and refilled from PostgreSQL. The first caller after a
start of Valkey raises the ids, because its clock may be behind; the flusher drops the totals.

**Trim.** Entries stay for ten minutes after their flush. If PostgreSQL fails over to a standby
without the last commits, the flush starts again at the standby's older offset.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.kernel.ids import USER_ID
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point
from headrace.views import store
from headrace.views.model import START, Count, id_key, parse_line
from headrace.views.settings import (
    dropped_views,
    flush_races,
    flushed_rows,
    flushed_views,
    streams_broken,
    unreadable_hits,
)
from headrace.views.valkey_store import Pending, ValkeyStore

ENTRIES_PER_READ: Final = 2_000
ROWS_PER_FLUSH: Final = 20_000
"""Small enough for the statement timeout on a slow disk, with all shards at once."""
HOUR_MS: Final = 3_600_000
_log: Final = logger(__name__)


@dataclass(slots=True)
class FlushBatch:
    """Aggregated hits, written in one transaction."""

    through: str
    """Id of the last entry in the batch."""
    hits: dict[int, Counter[str]] = field(default_factory=dict)
    """Occurrences of each line, by hour since 1970."""
    first_ms: int = 0
    """Milliseconds of the oldest hit."""

    @property
    def rows(self) -> int:
        """Approximate number of rows in PostgreSQL."""
        return sum(map(len, self.hits.values()))

    def add(self, rows: Iterable[tuple[str, str]]) -> None:
        """Add stream entries. An entry's id dates its hits, the same on every repetition."""
        for entry_id, hits in rows:
            self.through = entry_id
            if hits:
                ms = int(entry_id.partition("-")[0])
                self.first_ms = self.first_ms or ms
                hour = ms // HOUR_MS
                found = self.hits.get(hour)
                if found is None:
                    found = self.hits[hour] = Counter()
                found.update(hits.split(","))

    def counts(self) -> list[Count]:
        """One count per entity, class, hour and counter."""
        found = self._marked_counts()
        plain: list[Count] = []
        for hour, lines in self.hits.items():
            for line, times in lines.items():
                if not _is_marked(line):
                    if USER_ID.fullmatch(line) is None:
                        _skip(line, times)
                    elif (line, 0, hour, "") in found:
                        found[line, 0, hour, ""] += times
                    else:
                        plain.append(Count(line, 0, hour, times))
        return plain + [
            Count(entity, traffic, hour, views, counter)
            for (entity, traffic, hour, counter), views in found.items()
        ]

    def _marked_counts(self) -> Counter[tuple[str, int, int, str]]:
        """Views by entity, class, hour and counter, of lines with more than an id."""
        found: Counter[tuple[str, int, int, str]] = Counter()
        for hour, lines in self.hits.items():
            for line, times in lines.items():
                if _is_marked(line):
                    parsed = parse_line(line)
                    if parsed is None:
                        _skip(line, times)
                        continue
                    entity, traffic, views, counters = parsed
                    if views:
                        found[entity, traffic, hour, ""] += views * times
                    for counter in counters:
                        found[entity, traffic, hour, counter] += times
        return found


def _is_marked(line: str) -> bool:
    return "*" in line or "/" in line or "+" in line


def _skip(line: str, times: int) -> None:
    """Skip a hit that another program wrote, so that it does not block the other hits."""
    unreadable_hits.inc(times)
    _log.error("views_unreadable_hit", hit=line[:200], times=times)


class ShardFlush:
    """Flush one shard, starting at the offset in PostgreSQL."""

    def __init__(
        self,
        postgres: Postgres,
        valkey: ValkeyStore,
        state: store.Shard,
        *,
        shards: int,
        trim_after_s: float,
    ) -> None:
        self.shard = state.shard
        self._shards = shards
        self.through = state.through
        self.setups = state.setups
        self._corrections = state.corrections
        self._postgres = postgres
        self._valkey = valkey
        self._trim_after_s = trim_after_s
        self._flushed: deque[tuple[float, str]] = deque()
        """Time and offset of each flush that is not trimmed yet."""
        self._seen: deque[tuple[float, str]] = deque()
        """Time and last entry of each read, until that entry is synced."""
        self._bound = state.through
        self._numbers: dict[str, int] = {}
        """Numbers of counters."""
        self._gap_after = ""
        """An offset without its entry but with later entries; the next flush replaces it."""
        self.has_more = False
        """Whether the last read ended before the end of the stream."""

    async def read(self, *, min_age_s: float = 0.0) -> FlushBatch | None:
        """The next batch of entries older than `min_age_s`; None: nothing to flush.

        A stream without its anchor is repaired first.
        """
        upto = self._synced_through(min_age_s)
        pending = await self._read_part(self.through, upto)
        if not pending.has_anchor and not (self._gap_after == self.through and pending.last):
            await self._repair()
            upto = self._synced_through(min_age_s)
            pending = await self._read_part(self.through, upto)
        self._seen.append((time.monotonic(), pending.last))
        # After the repair, which may load an offset that another flusher moved.
        batch = FlushBatch(self.through)
        batch.add(pending.rows)
        while pending.is_cut and batch.rows < ROWS_PER_FLUSH:
            pending = await self._read_part(batch.through, upto)
            batch.add(pending.rows)
        self.has_more = pending.is_cut
        crash_point("views.read")
        return batch if batch.through != self.through else None

    async def write(self, batch: FlushBatch) -> int:
        """Count a batch once. Return its rows; 0 if another flusher or a set-up was first."""
        counts = await self._with_numbers(batch.counts())
        crash_point("views.aggregated")
        dead = await store.flush(
            self._postgres,
            self.shard,
            setups=self.setups,
            from_id=self.through,
            to_id=batch.through,
            counts=counts,
            numbers=self._numbers,
        )
        crash_point("views.committed")
        if dead is None:
            flush_races.inc()
            await self.reload()
            return 0
        self.through = batch.through
        now_s = time.monotonic()
        self._flushed.append((now_s, self.through))
        await self._record_offset(now_s)
        if dead:
            await self._restore_tombstones(set(dead), counts)
        gone = set(dead)
        flushed_views.inc(
            sum(one.views for one in counts if not one.counter and one.id not in gone)
        )
        flushed_rows.inc(len(counts))
        return len(counts)

    async def _with_numbers(self, counts: list[Count]) -> list[Count]:
        """Counts without those of counters that have no number, which are skipped.

        Numbers are read again after an error, with the shard: PostgreSQL may have lost them.
        """
        names = {count.counter for count in counts if count.counter} - self._numbers.keys()
        if not names:
            return counts
        self._numbers |= await store.counter_numbers(self._postgres, sorted(names))
        for count in counts:
            if count.counter and count.counter not in self._numbers:
                _skip(f"{count.id}+{count.counter}", count.views)
        return [one for one in counts if not one.counter or one.counter in self._numbers]

    async def reload(self) -> None:
        """Read the offset again: another flusher moved it, or PostgreSQL failed over."""
        self._load(await store.find_shard(self._postgres, self.shard))

    def _load(self, state: store.Shard) -> None:
        if state.through != self.through:
            self._flushed.clear()
        if state.setups != self.setups:
            # New entries may have the ids of lost ones, which were synced.
            self._seen.clear()
            self._bound = state.through
        self.through, self.setups = state.through, state.setups
        self._corrections = state.corrections

    def _synced_through(self, min_age_s: float) -> str:
        """The last entry that existed `min_age_s` ago."""
        if not min_age_s:
            self._seen.clear()
            return "+"
        until_s, found = time.monotonic() - min_age_s, self.through
        while self._seen and self._seen[0][0] <= until_s:
            found = self._seen.popleft()[1]
        self._bound = max(self._bound, found or self._bound, self.through, key=id_key)
        return self._bound

    async def _read_part(self, through: str, upto: str) -> Pending:
        return await self._valkey.pending(
            self.shard, through=through, upto=upto, entries_max=ENTRIES_PER_READ
        )

    async def _record_offset(self, now_s: float) -> None:
        trim_to = None
        while self._flushed and now_s - self._flushed[0][0] >= self._trim_after_s:
            trim_to = self._flushed.popleft()[1]
        await self._valkey.note_flushed(self.shard, through=self.through, trim_to=trim_to)
        crash_point("views.recorded")

    async def _repair(self) -> None:
        """Repair a stream without its anchor: reload the offset, then set the stream up again."""
        start = await self._valkey.start(self.shard)
        self._load(await store.begin_set_up(self._postgres, self.shard))
        state = await self._valkey.init(
            self.shard,
            start=start,
            through=self.through,
            corrections=self._corrections,
            shards=self._shards,
        )
        self._gap_after = self.through if state == "gap" else ""
        if state in ("ok", "restarted") or self.through == START:
            return
        dropped = await self._valkey.drop_totals([self.shard])
        await self._valkey.note_repaired(self.shard)
        streams_broken.inc()
        _log.warning(
            "views_stream_broken",
            shard=self.shard,
            through=self.through,
            found=state,
            totals_dropped=dropped,
            text="the last flushed entry is missing: Valkey is empty or lost data, or PostgreSQL"
            " is an old copy; lost hits cannot be recovered, and cached totals are read from"
            " PostgreSQL again",
        )

    async def _restore_tombstones(self, dead: set[str], counts: list[Count]) -> None:
        """Mark deleted entities in Valkey again: hits arrived, so a mark may be missing."""
        dropped_views.inc(sum(count.views for count in counts if count.id in dead))
        await self._valkey.mark_deleted(self.shard, sorted(dead))
