"""Apply committed changes to the index: in order of versions, each once, by any process.

    transaction: data, version + 1, outbox row --commit--> the index accepts only version + 1
                                                 ok    it was the next version
                                                 old   already applied
                                                 gap   an earlier version is missing: replay the
                                                       outbox, or if purged apply a snapshot

Two processes that commit a follow and an unfollow may arrive in reverse order. The first finds a
gap and applies both changes, the second finds its change applied. If a process dies after the
commit, its outbox row remains, and the sweep (`worker.py`) applies it within seconds. Applying a
change twice has no effect.

A call that fails may have committed its change, such as when the commit's reply is lost. If the
caller repeats it, the repeated call finds nothing to change, and applies what the first committed.

A process that could not apply a committed change to a shard defers it. Until it succeeds, the
process reads no page from that shard, and it retries in the background.

**Lost commits.** PostgreSQL may lose commits that the index has: at a failover to a standby that
lacked them, or with old data. It would use their versions again, and the index would take the new
changes for applied ones. So after a crash, a failover or a restore of files, versions begin with a
new epoch, a number above all earlier ones. The first change of an entity in an epoch is a gap,
whose snapshot replaces what was lost, and a delayed change of the lost history is old. The index is
then rebuilt for the other entities (`index_recovery.py`). If the index has a higher version than
PostgreSQL within an epoch, the sweep begins a new one. A snapshot of such an entity first raises
the version in PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.feed import store
from headrace.feed.model import Change, ChangeKind
from headrace.feed.settings import changes_made
from headrace.feed.valkey_store import ValkeyStore
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import crash_point

TRIES: Final = 8
CHANGES_PER_STEP: Final = 500
RAISED_BY: Final = 2**20
"""More than an entity's changes that were lost and may still be sent to the index."""
_log: Final = logger(__name__)
_APPLIED: Final = changes_made.labels(outcome="applied")
_REPLAYED: Final = changes_made.labels(outcome="replayed")
_DEFERRED: Final = changes_made.labels(outcome="deferred")


class Applied(NamedTuple):
    """Result of applying a change to a shard."""

    missing: int
    """1 if the shard lacked the change, else 0."""
    version: int
    """The entity's version in the shard before."""


class Swept(NamedTuple):
    """Result of a sweep."""

    missing: int
    """Changes that the index lacked."""
    last: int
    """Id of the last swept change; 0: none."""


class Applier:
    """Apply changes to the index. `on_deferred` is called after a failure."""

    def __init__(
        self,
        postgres: Postgres,
        valkey: ValkeyStore,
        on_deferred: Callable[[], None] = lambda: None,
    ) -> None:
        self._postgres = postgres
        self._valkey = valkey
        self._on_deferred = on_deferred
        self._deferred = Counter[int]()
        """Number of calls that failed, by shard."""
        self._sparse_log = SparseLogger(_log)

    @property
    def has_deferred(self) -> bool:
        """Whether a shard may lack a change committed by this process."""
        return bool(self._deferred)

    def lacks_changes(self, shard: int) -> bool:
        """Whether this shard may lack a change committed by this process."""
        return shard in self._deferred

    async def apply_or_defer(self, changes: Sequence[Change]) -> bool:
        """Apply committed changes. Return False if an engine is down and they were deferred."""
        crash_point("feed.committed")
        parts = self._parts(changes)
        waiting = {shard for shard, _ in parts}
        try:
            failed = await self._apply_parts(parts)
            waiting = set(failed)
        finally:
            # Cancelled half-way: the next read in this process must include the change.
            self._deferred.update(waiting)
        if not failed:
            return True
        _DEFERRED.inc(len(changes))
        error = next(iter(failed.values()))
        self._sparse_log.warning("feed_change_deferred", error=error.text, changes=len(changes))
        self._on_deferred()
        return False

    async def retry_deferred(self) -> None:
        """Apply deferred and other unswept changes. Raises: ValkeyDown, PostgresDown."""
        while deferred := self._deferred.copy():
            await self.sweep(older_s=0.0)
            for shard, failures in deferred.items():
                if self._deferred[shard] == failures:
                    del self._deferred[shard]

    async def sweep(self, *, older_s: float) -> Swept:
        """Apply unswept changes older than `older_s` again. Raises: ValkeyDown, PostgresDown."""
        missing = last = 0
        is_full = True
        while is_full:
            changes = await store.unswept(
                self._postgres, older_s=older_s, rows_max=CHANGES_PER_STEP
            )
            if changes:
                parts = self._parts(changes)
                applied = await self._apply_all(parts)
                missing += sum(part.missing for part in applied)
                await self._put_lost(parts, applied)
                await store.mark_swept(self._postgres, [change.id for change in changes])
                last = max(last, changes[-1].id)
            is_full = len(changes) == CHANGES_PER_STEP
        return Swept(missing, last)

    async def apply(self, changes: Sequence[Change]) -> int:
        """Apply changes. Return how many were missing. Raises: ValkeyDown, PostgresDown."""
        return sum(part.missing for part in await self._apply_all(self._parts(changes)))

    async def put(self, snapshot: Change) -> bool:
        """Replace an entity by its current snapshot. Return False without an index.

        Raises: ValkeyDown, PostgresDown.
        """
        for shard in self._valkey.shards_of(snapshot.kind, snapshot.entity):
            if not await self._put_part(shard, snapshot):
                return False
        return True

    async def _apply_all(self, parts: Sequence[tuple[int, Change]]) -> list[Applied]:
        if len(parts) == 1:
            return [await self._apply_part(*parts[0])]
        return await asyncio.gather(*[self._apply_part(*part) for part in parts])

    async def _put_lost(
        self, parts: Sequence[tuple[int, Change]], applied: Sequence[Applied]
    ) -> None:
        """Put each entity whose version in the index is higher than in PostgreSQL.

        The version in PostgreSQL is read later, so its history lost changes. A new epoch begins.
        """
        ahead: dict[ChangeKind, dict[int, int]] = {kind: {} for kind in ChangeKind}
        for (_, change), part in zip(parts, applied, strict=True):
            if part.version > change.version:
                found = ahead[change.kind]
                found[change.entity] = max(part.version, found.get(change.entity, 0))
        for kind, found in ahead.items():
            if not found:
                continue
            stored = await store.versions_of(self._postgres, kind, list(found))
            lost = [entity for entity in found if found[entity] > stored.get(entity, 0)]
            if lost:
                await store.epoch(self._postgres, is_new=True)
            for entity in lost:
                await self.put(Change(kind, entity, 0, [], []))

    def _parts(self, changes: Sequence[Change]) -> list[tuple[int, Change]]:
        """Each change with each shard that needs it."""
        return [
            (shard, change)
            for change in changes
            for shard in self._valkey.shards_of(change.kind, change.entity)
        ]

    async def _apply_parts(self, parts: Sequence[tuple[int, Change]]) -> dict[int, Unavailable]:
        """Apply changes to shards. Return the shards that failed."""

        async def apply_part(shard: int, change: Change) -> None:
            try:
                await self._apply_part(shard, change)
            except Unavailable as error:
                failed[shard] = error

        failed: dict[int, Unavailable] = {}
        if len(parts) == 1:
            await apply_part(*parts[0])
        else:
            await asyncio.gather(*[apply_part(*part) for part in parts])
        return failed

    async def _apply_part(self, shard: int, change: Change) -> Applied:
        state, version = await self._valkey.apply(shard, change)
        if state == "ok":
            _APPLIED.inc()
            return Applied(1, version)
        if state != "gap":
            return Applied(0, version)
        _REPLAYED.inc()
        if not await self._replay(shard, change, version):
            await self._put_part(shard, change)
        return Applied(1, version)

    async def _replay(self, shard: int, change: Change, version: int) -> bool:
        """Replay the outbox after `version`. Return False if changes were purged."""
        missing = await store.changes_after(
            self._postgres, change.kind, change.entity, version=version
        )
        for earlier in missing:
            if (await self._valkey.apply(shard, earlier))[0] == "gap":
                return False
        return bool(missing)

    async def _put_part(self, shard: int, change: Change) -> bool:
        """Replace an entity in a shard by a snapshot; repeat after a concurrent later version.

        If PostgreSQL lost the version of the index, raise it and replace the entity in all shards.
        """
        kind, entity, version = change.kind, change.entity, 0
        for _ in range(TRIES):
            floor = (await self._valkey.status(shard)).floor
            found = await store.snapshots(self._postgres, kind, [entity], floor=floor)
            if not found or found[0].version < version:
                await self._raise(kind, entity, max(version, change.version))
                return await self.put(change)
            state, version = await self._valkey.put(shard, found[0])
            if state != "old":
                return state == "ok"
        raise ValkeyDown(
            f"{kind.name.lower()} of {entity} changed during {TRIES} attempts to read"
            " them: try again",
            retry_after_s=1,
        )

    async def _raise(self, kind: ChangeKind, entity: int, version: int) -> None:
        """Raise the version of an entity above a lost one."""
        self._sparse_log.warning(
            "feed_history_lost",
            kind=kind.name.lower(),
            entity=entity,
            version=version,
            text="PostgreSQL lost a version that the index has; the index gets its present state",
        )
        await store.raise_version(self._postgres, kind, entity, version=version + RAISED_BY)
