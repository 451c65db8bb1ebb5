"""The life of the index: open, build, recover, verify, report, retain."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.errors import FeedShardsFixed
from headrace.feed.id_map import IdMap
from headrace.feed.index_recovery import Progress, Rebuild, Recovery
from headrace.feed.model import (
    TICKS,
    ChangeKind,
    FeedVerified,
    ShardState,
    moment_of,
    require_limit,
)
from headrace.feed.settings import FeedConfig
from headrace.feed.valkey_store import ShardStatus, ValkeyStore
from headrace.jobs import Jobs, NewJob, Registry, Task
from headrace.jobs.job_context import current_job
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import Backoff

REBUILD_QUEUE: Final = "feed.rebuild"
RETAIN_QUEUE: Final = "feed.retain"
SMALL: Final = 1_000
"""Up to so many viewers and authors are built in the process itself, in less than a second."""
SAMPLE_MAX: Final = 1_000_000
BUILD_EVERY_S: Final = 2.0
CHECK_EVERY_S: Final = 0.25
"""How often a recovering index is checked until it is ready."""
REPEAT_S: Final = 0.5
"""Minimum time between two attempts to make the index ready."""
GIVE_UP_S: Final = 60.0
"""Time limit of an attempt; the next page or write starts another."""
RECONNECT: Final = Backoff(0.05, 1.0)
REST_S: Final = 2.0
"""How long an engine that did not answer is left out, so that pages from the other do not wait."""
AUTHORS_PER_STEP: Final = 500
_log: Final = logger(__name__)


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the job that builds the index."""

    clean: bool = False


class Index:
    """The index as a whole; creation opens no connection. `applier` brings changes into it."""

    def __init__(
        self, postgres: Postgres, valkey: ValkeyStore, jobs: Jobs, ids: IdMap, *, config: FeedConfig
    ) -> None:
        self.is_open = False
        self.applier = Applier(postgres, valkey, self.require_ready)
        self._recovery = Recovery(postgres, valkey, self.applier)
        self._rebuild = Rebuild(postgres, valkey, self.applier, index_for_s=config.index_for_s)
        self._postgres = postgres
        self._valkey = valkey
        self._jobs = jobs
        self._ids = ids
        self._config = config
        self._sparse_log = SparseLogger(_log)
        self._built_s = self._rested_s = self._tried_s = float("-inf")
        self._making: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    def register(self, registry: Registry) -> None:
        """Add the tasks of the index."""
        registry.add(Task(queue=REBUILD_QUEUE, handler=self._build_job, retries=20, timeout="12h"))
        registry.cron("41 3 * * *", name=RETAIN_QUEUE, timeout="12h")(self.retain)

    async def ready(self) -> None:
        """Open the index before the first use. Raises: FeedShardsFixed."""
        if not self.is_open:
            await self.open()

    async def open(self) -> None:
        """Check the number of shards, and start an index if there is none. Raises: FeedShardsFixed.

        While an engine is down nothing is checked, because pages may come from the other one.
        """
        async with self._opening:
            if self.is_open or time.monotonic() - self._rested_s < REST_S:
                return
            try:
                stored = await store.ensure_shards(self._postgres, self._config.shards)
                if stored != self._config.shards:
                    raise FeedShardsFixed(self._config.shards, stored)
                for shard in range(self._valkey.shards):
                    if (await self._valkey.status(shard)).state is None:
                        if not await self._build_if_small():
                            self.require_ready()
                        break
            except Unavailable as error:
                self._rested_s = time.monotonic()
                self._sparse_log.warning("feed_not_opened", error=error.text)
                return
            self.is_open = True

    def require_ready(self) -> None:
        """Start to build or recover the index in the background, or enqueue a build."""
        if self._making is not None and not self._making.done():
            return
        if self.applier.has_deferred or time.monotonic() - self._tried_s >= REPEAT_S:
            self._making = asyncio.create_task(self._make_ready())

    async def rebuild(self, *, clean: bool = False) -> int:
        """Enqueue the job that builds the index unless one is pending. Return its id.

        `clean` drops the index first. Raises: PostgresDown.
        """
        job = NewJob(queue=REBUILD_QUEUE, payload=Build(clean=clean), unique="build")
        return await self._jobs.enqueue(job)

    async def rebuild_now(self, *, clean: bool = False) -> int:
        """Build the index in this process. Return the number of viewers and authors.

        `clean` drops the index first, so pages are slow until it is built. Raises: PostgresDown,
        ValkeyDown.
        """
        await self.ready()
        return await self._build(clean=clean)

    async def verify(self, *, sample: int | None = None) -> FeedVerified:
        """Compare the index with PostgreSQL, for all or `sample` viewers and authors.

        Raises: InvalidLimit, PostgresDown, ValkeyDown.
        """
        if sample is not None:
            require_limit(sample, SAMPLE_MAX, what="sample")
        await self.ready()
        found = await self._rebuild.verify(sample=sample)
        ids = await self._ids.external_ids([int(each.entity) for each in found.differences])
        differences = [
            msgspec.structs.replace(each, entity=ids[int(each.entity)])
            for each in found.differences
        ]
        return msgspec.structs.replace(found, differences=differences)

    async def stats(self) -> list[ShardState]:
        """State of each shard; without PostgreSQL, `ahead` is not found. Raises: ValkeyDown."""
        found, epoch = [], None
        with suppress(Unavailable):
            epoch = await store.find_epoch(self._postgres)
        for shard in range(self._valkey.shards):
            status = await self._valkey.status(shard)
            found.append(
                ShardState(
                    shard=shard,
                    state=_state_of(status, epoch),
                    floor_at=moment_of(status.floor) if status.floor else None,
                    newest_at=moment_of(status.newest) if status.newest else None,
                )
            )
        return found

    async def retain(self) -> None:
        """Delete posts older than `feed.keep_for`, which no index holds."""
        kept_s = max(self._config.keep_for_s, self._config.index_for_s + 86_400)
        oldest_ms = await store.now_ms(self._postgres) - int(kept_s * 1000)
        after, removed = -(2**63), 0
        while oldest_ms > 0 and (
            authors := await store.entities_after(
                self._postgres, ChangeKind.POSTS, after=after, rows_max=AUTHORS_PER_STEP
            )
        ):
            for author in authors:
                removed += await store.drop_posts(self._postgres, author, score=oldest_ms * TICKS)
            after = authors[-1]
        _log.info("feed_retained", removed=removed)

    async def _build_job(self, request: Build) -> None:
        await self._build(clean=request.clean, on_progress=current_job().progress)

    async def _build(self, *, clean: bool = False, on_progress: Progress | None = None) -> int:
        count = await self._rebuild.build(clean=clean, on_progress=on_progress)
        _log.info("feed_index_built", entities=count)
        return count

    async def _make_ready(self) -> None:
        """Repeat until nothing is left to do; during an outage only for deferred changes."""
        ends_s, failures = time.monotonic() + GIVE_UP_S, 0
        while time.monotonic() < ends_s:
            pause_s = CHECK_EVERY_S
            try:
                if await self._make_ready_once():
                    break
                failures = 0
            except Unavailable as error:
                if not self.applier.has_deferred:
                    self._sparse_log.warning("feed_index_not_ready", error=error.text)
                    break
                failures += 1
                pause_s = RECONNECT.delay_s(failures)
            except HeadraceError as error:
                self._sparse_log.warning("feed_index_not_ready", error=error.text)
                break
            await asyncio.sleep(pause_s)
        self._tried_s = time.monotonic()

    async def _make_ready_once(self) -> bool:
        """Build, recover or enqueue a build. Return whether nothing is left to do here."""
        state = await self._recovery.run_once()
        if state.needs_build:
            await self._build_or_enqueue(clean=state.is_outdated)
        if self.applier.has_deferred:
            await self.applier.retry_deferred()
        return not (state.is_waiting or self.applier.has_deferred)

    async def _build_or_enqueue(self, *, clean: bool) -> None:
        now_s = time.monotonic()
        if now_s - self._built_s >= BUILD_EVERY_S:
            self._built_s = now_s
            if not await self._build_if_small(clean=clean):
                await self.rebuild(clean=clean)

    async def _build_if_small(self, *, clean: bool = False) -> bool:
        if await store.has_entities(self._postgres, rows=SMALL):
            return False
        await self._build(clean=clean)
        return True


def _state_of(status: ShardStatus, epoch: int | None) -> str:
    if status.is_recovering:
        return "recovering"
    if status.state == "ready" and epoch is not None and status.epoch != epoch:
        return "ahead"
    return status.state or "missing"
