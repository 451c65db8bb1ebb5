"""Make the index equal to PostgreSQL: build it, verify it, recover it after a server restart.

**Build.** Each viewer and author is put as a snapshot with its version, while changes are applied
as usual; a change without an indexed version applies a snapshot. Once every entity was put, the
index is marked ready. If it was lost or its server restarted during the build, the build starts
over. Until then pages come from PostgreSQL. A ready index stays ready while it is rebuilt.

**Recovery.** A restarted Valkey, or an old copy of its data, lacks the last changes; a killed one
lacks what it had not written to its file. Pages from it would show deleted posts and unfollowed or
blocked authors. So the page function compares the recorded run id with the server's, and on a
mismatch pages come from PostgreSQL. After SETTLE_S any process marks the changes that may be lost
as unswept, sweeps them, and records the new run id. No flusher is required.

**What is swept again.** `swept` in the key `m` is a change up to which all were present when it
was written. The file is written in order, so what remains of it has all of them. Changes get their
id before they commit, so the sweep starts LATE_S before that one. If `swept` is older than the
outbox, the index is an old copy and is built from scratch.

**Lost commits.** After a crash or failover of PostgreSQL its epoch differs from the one in the key
`m` (`apply.py`). The index may have changes that PostgreSQL lost, so it is rebuilt while it is
read. Viewers and authors that PostgreSQL does not have are put as empty.

**Why SETTLE_S.** A writer that is reconnecting commits without reaching the index. Reconnecting
takes at most 2 s (`engines/multiplex`), so after SETTLE_S every writer is connected, and the sweep
finds its earlier commits. In a cluster a shard whose hash slot moved to another primary recovers
the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.model import (
    FINE_FOR_MS,
    FINE_MS,
    TICKS,
    Change,
    ChangeKind,
    FeedDifference,
    FeedVerified,
)
from headrace.feed.settings import changes_repaired
from headrace.feed.valkey_store import ShardStatus, ValkeyStore
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

ENTITIES_PER_STEP: Final = 200
ITEMS_PER_STEP: Final = 100_000
"""Approximate number of posts or follows per read, 15 MB; one author may have more."""
ITEMS_AT_ONCE: Final = 5_000
"""Posts or follows sent at once; Valkey serves no other client while it applies them."""
TRIES: Final = 5
BEFORE_ALL: Final = -(2**63)
BEHIND_S_MAX: Final = 3.0
"""How long a change may be in progress before `verify` reports it as missing."""
RETRY_S_MAX: Final = 15.0
"""How long a build retries a Valkey that does not answer."""
RETRY: Final = Backoff(0.02, 0.5)
SETTLE_S: Final = 2.5
LATE_S: Final = 60.0
"""Maximum time between the creation of a change's id and its commit."""
Progress = Callable[[float, str], None]
_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class Marks:
    """Lower limits of an index as scores, both at the beginning of a level 2 bucket."""

    floor: int
    fine: int


def marks_at(now_ms: int, *, index_for_s: float) -> Marks:
    """The limits of an index with posts of the last `index_for_s`."""
    floor_ms = max(0, now_ms - int(index_for_s * 1000)) // FINE_MS * FINE_MS
    fine_ms = max(0, now_ms - FINE_FOR_MS) // FINE_MS * FINE_MS
    return Marks(floor_ms * TICKS, max(floor_ms, fine_ms) * TICKS)


class Rebuild:
    """Build and verify the index."""

    def __init__(
        self, postgres: Postgres, valkey: ValkeyStore, applier: Applier, *, index_for_s: float
    ) -> None:
        self._postgres = postgres
        self._valkey = valkey
        self._applier = applier
        self._index_for_s = index_for_s

    async def build(self, *, clean: bool = False, on_progress: Progress | None = None) -> int:
        """Put every viewer and author. Return their number. `clean` drops the index first.

        Raises: ValkeyDown, PostgresDown.
        """
        if clean:
            await self._valkey.drop()
        for _ in range(TRIES):
            count = await self._build_once(on_progress or (lambda _ratio, _text: None))
            if count is not None:
                return count
            _log.warning("feed_index_lost_while_built")
        raise ValkeyDown(
            f"the feed's index was lost during {TRIES} builds: check that Valkey runs and has"
            " enough memory, then try again",
            retry_after_s=5,
        )

    async def _build_once(self, report: Progress) -> int | None:
        """Build once. Return None if the index was lost during the build."""
        marks = marks_at(await store.now_ms(self._postgres), index_for_s=self._index_for_s)
        swept = await store.last_purged(self._postgres)
        epoch = await store.epoch(self._postgres)
        fresh, tokens = token_hex(8), []
        for shard in range(self._valkey.shards):
            _, token = await self._valkey.begin(
                shard, fresh, floor=marks.floor, fine=marks.fine, swept=swept, epoch=epoch
            )
            tokens.append(token)
        floor = min(
            [(await self._valkey.status(shard)).floor for shard in range(self._valkey.shards)]
        )
        total, done = await store.count_entities(self._postgres), 0
        for kind in ChangeKind:
            async for snapshots in self._snapshots(kind, floor=floor):
                for part in _portions(snapshots):
                    if not all(await asyncio.gather(*[self._put(snapshot) for snapshot in part])):
                        return None
                done += len(snapshots)
                report(min(1.0, done / max(1, total)), f"{done} of {total}")
            async for lost in self._unknown(kind):
                if not await self._put(lost):
                    return None
        for shard in range(self._valkey.shards):
            await self._valkey.split_all(shard)
        finished = [
            await self._valkey.finish(shard, token, epoch=epoch)
            for shard, token in enumerate(tokens)
        ]
        return done if all(finished) else None

    async def _put(self, snapshot: Change) -> bool:
        """Put a snapshot. Return False if the index was lost.

        Retries while Valkey does not answer: repeating has no effect, and another build takes
        minutes.
        """
        ends_s, attempts = time.monotonic() + RETRY_S_MAX, 0
        while True:
            try:
                return await self._put_once(snapshot)
            except ValkeyDown:
                if time.monotonic() > ends_s:
                    raise
            attempts += 1
            await asyncio.sleep(RETRY.delay_s(attempts))

    async def _put_once(self, snapshot: Change) -> bool:
        for shard in self._valkey.shards_of(snapshot.kind, snapshot.entity):
            state, _ = await self._valkey.put(shard, snapshot)
            if state == "unready" or (state == "old" and not await self._applier.put(snapshot)):
                return False
        return True

    async def _unknown(self, kind: ChangeKind) -> AsyncIterator[Change]:
        """Entities of the index that PostgreSQL lost, as empty snapshots of version 0."""
        async for entities in self._valkey.entities(kind):
            if entities:
                known = await store.versions_of(self._postgres, kind, entities)
                for entity in sorted(set(entities) - known.keys()):
                    yield Change(kind, entity, 0, [], [])

    async def verify(self, *, sample: int | None = None) -> FeedVerified:
        """Compare all viewers and authors, or a sample of each, with PostgreSQL.

        Differences have the numbers of their entities. Raises: ValkeyDown, PostgresDown.
        """
        entities, items = Counter[ChangeKind](), Counter[ChangeKind]()
        found = list[FeedDifference]()
        for kind in ChangeKind:
            if sample is None:
                lost = {each.entity: each async for each in self._unknown(kind)}
                results = await asyncio.gather(*[self._compare(each) for each in lost.values()])
                found += [difference for _, difference in results if difference]
            async for snapshots in self._snapshots(kind, floor=0, sample=sample):
                entities[kind] += len(snapshots)
                for part in _portions(snapshots):
                    results = await asyncio.gather(*[self._compare(each) for each in part])
                    items[kind] += sum(count for count, _ in results)
                    found += [difference for _, difference in results if difference]
        return FeedVerified(
            viewers=entities[ChangeKind.FOLLOWS],
            authors=entities[ChangeKind.POSTS],
            posts=items[ChangeKind.POSTS],
            follows=items[ChangeKind.FOLLOWS],
            differences=found,
        )

    async def _snapshots(
        self, kind: ChangeKind, *, floor: int, sample: int | None = None
    ) -> AsyncIterator[list[Change]]:
        """Snapshots of all or sampled entities, in steps adapted to the size of the last one."""
        chosen = None
        if sample is not None:
            chosen = await store.sample_entities(self._postgres, kind, rows_max=sample)
        after, step = BEFORE_ALL, 1
        while True:
            if chosen is None:
                entities = await store.entities_after(
                    self._postgres, kind, after=after, rows_max=step
                )
            else:
                entities, chosen = chosen[:step], chosen[step:]
            if not entities:
                return
            snapshots = await store.snapshots(self._postgres, kind, entities, floor=floor)
            items = max(1, sum(len(snapshot.items) for snapshot in snapshots))
            yield snapshots
            after = entities[-1]
            step = max(1, min(ENTITIES_PER_STEP, 2 * step, step * ITEMS_PER_STEP // items))

    async def _compare(self, snapshot: Change) -> tuple[int, FeedDifference | None]:
        """Compare one entity; repeat while a change of it is in progress. Return its items, too."""
        began_s, attempts = time.monotonic(), 0
        while True:
            versions, missing, extra, count = await self._read_index(snapshot)
            if versions == {snapshot.version} or time.monotonic() - began_s > BEHIND_S_MAX:
                break
            attempts += 1
            await asyncio.sleep(RETRY.delay_s(attempts))
            later = await store.snapshots(self._postgres, snapshot.kind, [snapshot.entity], floor=0)
            snapshot = later[0] if later else snapshot
        if versions == {snapshot.version} and not missing and not extra:
            return count, None
        kind = snapshot.kind.name.lower()
        return count, FeedDifference(
            kind=kind, entity=snapshot.entity, missing=missing, extra=extra
        )

    async def _read_index(self, snapshot: Change) -> tuple[set[int], int, int, int]:
        """Indexed versions, and the numbers of missing, extra and expected items."""
        if snapshot.kind is ChangeKind.FOLLOWS:
            version, authors = await self._valkey.follows(snapshot.entity)
            expected = set(snapshot.items)
            return {version}, len(expected - authors), len(authors - expected), len(expected)
        versions, missing, extra, count = set[int](), 0, 0, 0
        for shard in range(self._valkey.shards):
            floor = (await self._valkey.status(shard)).floor
            version, unhinted, have = await self._valkey.posts(shard, snapshot.entity)
            pairs = zip(snapshot.items, snapshot.scores, strict=True)
            want = {(item, score) for item, score in pairs if score >= floor}
            got = set(have.items())
            versions.add(version)
            missing += len(want - got) + unhinted
            extra += len(got - want)
            count = max(count, len(want))
        return versions, missing, extra, count


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryState:
    """Result of one recovery step."""

    is_missing: bool = False
    """A shard is missing or not completely built."""
    is_outdated: bool = False
    """A shard is an old copy that no sweep can repair."""
    is_waiting: bool = False
    """A server was restarted less than the settle time ago."""
    is_ahead: bool = False
    """A shard was built in an earlier epoch: it may have changes that PostgreSQL lost."""
    repaired: int = 0
    """Lost changes that were applied again."""

    @property
    def needs_build(self) -> bool:
        """Whether the index must be built, or built again."""
        return self.is_missing or self.is_outdated or self.is_ahead


class Recovery:
    """Recover shards after a server restart. Any number of processes may do so."""

    def __init__(self, postgres: Postgres, valkey: ValkeyStore, applier: Applier) -> None:
        self._postgres = postgres
        self._valkey = valkey
        self._applier = applier
        self._seen_s: dict[str, float] = {}
        """When this process first saw each run id of a server."""

    async def run_once(self, *, settle_s: float = SETTLE_S) -> RecoveryState:
        """Recover the shards restarted `settle_s` ago. Raises: ValkeyDown, PostgresDown."""
        statuses = [await self._valkey.status(shard) for shard in range(self._valkey.shards)]
        is_missing = any(status.state != "ready" for status in statuses)
        restarted = {n: status for n, status in enumerate(statuses) if status.is_recovering}
        if not self._is_settled(restarted, settle_s):
            return RecoveryState(is_missing=is_missing, is_waiting=True)
        if not restarted:
            epoch = await store.epoch(self._postgres)
            is_ahead = any(status.epoch != epoch for status in statuses if status.state == "ready")
            return RecoveryState(is_missing=is_missing, is_ahead=is_ahead)
        purged = await store.last_purged(self._postgres)
        if any(status.swept < purged for status in restarted.values()):
            _log.warning("feed_index_outdated", shards=list(restarted), purged=purged)
            return RecoveryState(is_missing=is_missing, is_outdated=True)
        repaired = await self._recover(restarted, purged)
        return RecoveryState(is_missing=is_missing, repaired=repaired)

    def _is_settled(self, restarted: dict[int, ShardStatus], settle_s: float) -> bool:
        now_s = time.monotonic()
        runs = {status.server_run for status in restarted.values()}
        self._seen_s = {run: self._seen_s.get(run, now_s) for run in runs}
        return all(now_s - seen_s >= settle_s for seen_s in self._seen_s.values())

    async def _recover(self, restarted: dict[int, ShardStatus], purged: int) -> int:
        """Sweep the changes that shards may have lost. Return how many were lost."""
        unswept = [s.swept for s in restarted.values() if s.recovering != s.server_run]
        if unswept:
            marked = await store.mark_unswept(self._postgres, swept=min(unswept), late_s=LATE_S)
            _log.info("feed_index_recovering", shards=list(restarted), changes=marked)
            for shard, status in restarted.items():
                await self._valkey.note(
                    shard, "recovering", run=status.server_run, swept=status.swept
                )
        swept = await self._applier.sweep(older_s=0.0)
        changes_repaired.inc(swept.missing)
        for shard, status in restarted.items():
            through = max(status.swept, swept.last, purged)
            await self._valkey.note(shard, "run", run=status.server_run, swept=through)
        return swept.missing


def _portions(snapshots: Iterable[Change]) -> Iterator[list[Change]]:
    """Split into parts of about ITEMS_AT_ONCE items."""
    part, items = list[Change](), 0
    for snapshot in snapshots:
        part.append(snapshot)
        items += len(snapshot.items)
        if items >= ITEMS_AT_ONCE:
            yield part
            part, items = [], 0
    if part:
        yield part
