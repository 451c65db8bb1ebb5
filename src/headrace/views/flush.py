"""The flush of a shard: hits go from its stream into PostgreSQL, each exactly once.

    read after the offset, what is synced -> add up -> ONE transaction: offset moves if it is where it was, totals, hours
        -> tell Valkey the offset -> trim what was flushed ten minutes ago

The offset is the id of the last entry that is counted, and moves with the counts. So whatever dies where, the next flush
goes on from the offset: there is no list of work under way, and nothing to repair. Two flushers of a shard read the same
and one of them finds the offset moved; it must then not trim, for what it read last may not be counted (an early
prototype lost 400 of 5,000 hits so).

**Synced first.** PostgreSQL must not learn of an entry that Valkey can still forget. With `appendfsync everysec` an entry is
counted 2.2 s after it was first seen, by this process's own clock; with replicas, once one of them has it
(`fence.py`). WAITAOF is no help there: Valkey 9.1.2 without a replica confirms at once, before any fdatasync (seen with
strace). Where Valkey forgets after all (its data deleted, an old copy restored, a replica promoted that had less), the
offset's own entry, the anchor, which trimming always keeps, is missing. Then ids are raised above the offset, and the
cached totals, which may be too low, are dropped; they come back exact from PostgreSQL.

**Trim.** Entries stay for ten minutes after their flush, by this process's own clock. A PostgreSQL that fails over to a
standby without the last commits finds its older offset, and the flush starts there.
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
from headrace.views.hot import Hot, Pending
from headrace.views.model import START, Count, id_key, parse_line
from headrace.views.settings import (
    dropped_views,
    flush_races,
    flushed_rows,
    flushed_views,
    streams_broken,
    unreadable_hits,
)

ENTRIES_PER_READ: Final = 2_000
ROWS_PER_FLUSH: Final = 20_000
"""Of all shards together well within the time of one statement, also on a slow disk."""
HOUR_MS: Final = 3_600_000
_log: Final = logger(__name__)


@dataclass(slots=True)
class Tally:
    """Hits added up, to be written at once."""

    through: str
    """The last entry that is in it."""
    hits: dict[int, Counter[str]] = field(default_factory=dict)
    """Of each hour since 1970: how often each line came."""

    first_ms: int = 0
    """When its oldest hit came."""

    @property
    def rows(self) -> int:
        """About how many rows it makes in PostgreSQL."""
        return sum(map(len, self.hits.values()))

    def add(self, rows: Iterable[tuple[str, str]]) -> None:
        """Add entries of the stream. The moment of a hit is that of its entry's id: the same at every repetition."""
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
        """One for each entity, class and hour."""
        found: Counter[tuple[str, int, int]] = Counter()
        plain: list[Count] = []
        marked: set[tuple[str, int, int]] = set()
        for hour, lines in self.hits.items():
            for line, times in lines.items():
                if "*" in line or "/" in line:
                    parsed = parse_line(line)
                    if parsed is None:
                        _leave_out(line, times)
                        continue
                    entity, traffic, views = parsed
                    found[entity, traffic, hour] += views * times
                    marked.add((entity, traffic, hour))
        for hour, lines in self.hits.items():
            for line, times in lines.items():
                if "*" not in line and "/" not in line:
                    if USER_ID.fullmatch(line) is None:
                        _leave_out(line, times)
                    elif (line, 0, hour) in marked:
                        found[line, 0, hour] += times
                    else:
                        plain.append(Count(line, 0, hour, times))
        return plain + [Count(*key, views) for key, views in found.items()]


def _leave_out(line: str, times: int) -> None:
    """The function adds nothing that cannot be read, and what else is in a stream must not stop the others' hits."""
    unreadable_hits.inc(times)
    _log.error("views_unreadable_hit", hit=line[:200], times=times)


class ShardFlush:
    """Flushes one shard from where PostgreSQL is."""

    def __init__(
        self,
        postgres: Postgres,
        hot: Hot,
        state: store.shards.Shard,
        *,
        shards: int,
        trim_after_s: float,
    ) -> None:
        self.shard = state.shard
        self._shards = shards
        self.through = state.through
        self._corrections = state.corrections
        self._postgres = postgres
        self._hot = hot
        self._trim_after_s = trim_after_s
        self._flushed: deque[tuple[float, str]] = deque()
        """When which offset was reached, within the time before trimming."""
        self._seen: deque[tuple[float, str]] = deque()
        """When which entry was the last one, within the time before they are synced."""
        self._bound = state.through
        self._goes_on_after = ""
        """The offset whose entry is missing while later ones are there; the next flush brings another."""
        self._has_more = False

    @property
    def has_more(self) -> bool:
        """Whether the last read did not reach the end."""
        return self._has_more

    async def read(self, *, settled_s: float = 0.0) -> Tally | None:
        """What there is to flush, up to a bound; None: nothing. A broken stream is set right first.

        Nothing younger than `settled_s` is in it.
        """
        upto = self._settled(settled_s)
        tally = Tally(self.through)
        pending = await self._read_part(self.through, upto)
        if not pending.has_anchor and not (self._goes_on_after == self.through and pending.last):
            self._seen.clear()
            await self._mend()
            upto = self._settled(settled_s)
            pending = await self._read_part(self.through, upto)
        self._seen.append((time.monotonic(), pending.last))
        tally.add(pending.rows)
        while pending.is_cut and tally.rows < ROWS_PER_FLUSH:
            pending = await self._read_part(tally.through, upto)
            tally.add(pending.rows)
        self._has_more = pending.is_cut
        crash_point("views.read")
        return tally if tally.through != self.through else None

    async def write(self, tally: Tally) -> int:
        """Count it, once; how many rows it was. After a race: none, and the next read goes on from where the other is."""
        counts = tally.counts()
        crash_point("views.tallied")
        dead = await store.shards.flush(
            self._postgres, self.shard, from_id=self.through, to_id=tally.through, counts=counts
        )
        crash_point("views.committed")
        if dead is None:
            flush_races.inc()
            await self.reload()
            return 0
        self.through = tally.through
        now_s = time.monotonic()
        self._flushed.append((now_s, self.through))
        await self._tell(now_s)
        if dead:
            await self._drop(set(dead), counts)
        flushed_views.inc(sum(count.views for count in counts))
        flushed_rows.inc(len(counts))
        return len(counts)

    async def reload(self) -> None:
        """Go on from where PostgreSQL is: another flusher moved it, or it is another PostgreSQL."""
        state = await store.shards.find_shard(self._postgres, self.shard)
        if state.through != self.through:
            self._flushed.clear()
        self.through, self._corrections = state.through, state.corrections

    def _settled(self, settled_s: float) -> str:
        """The last entry that was there so long ago."""
        if not settled_s:
            self._seen.clear()
            return "+"
        until_s, found = time.monotonic() - settled_s, self.through
        while self._seen and self._seen[0][0] <= until_s:
            found = self._seen.popleft()[1]
        self._bound = max(self._bound, found or self._bound, self.through, key=id_key)
        return self._bound

    async def _read_part(self, through: str, upto: str) -> Pending:
        return await self._hot.pending(
            self.shard, through=through, upto=upto, entries_max=ENTRIES_PER_READ
        )

    async def _tell(self, now_s: float) -> None:
        trim_to = None
        while self._flushed and now_s - self._flushed[0][0] >= self._trim_after_s:
            trim_to = self._flushed.popleft()[1]
        await self._hot.note_flushed(self.shard, through=self.through, trim_to=trim_to)
        crash_point("views.told")

    async def _mend(self) -> None:
        """The stream is without the offset's entry. Ask PostgreSQL again where it is, then set the stream right."""
        await self.reload()
        state = await self._hot.init(
            self.shard,
            through=self.through,
            corrections=self._corrections,
            shards=self._shards,
        )
        self._goes_on_after = self.through if state == "gap" else ""
        if state == "ok" or self.through == START:
            return
        dropped = await self._hot.drop_totals([self.shard])
        streams_broken.inc()
        _log.warning(
            "views_stream_broken",
            shard=self.shard,
            through=self.through,
            found=state,
            totals_dropped=dropped,
            text="Valkey is new or lost the end of this stream, or PostgreSQL is a copy from before it was trimmed;"
            " hits that were lost with it cannot be known, totals are PostgreSQL's from here on",
        )

    async def _drop(self, dead: set[str], counts: list[Count]) -> None:
        """Hits of deleted entities came: a tombstone may be missing in Valkey."""
        dropped_views.inc(sum(count.views for count in counts if count.id in dead))
        await self._hot.bury(self.shard, sorted(dead))
