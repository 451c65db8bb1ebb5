"""The index as a whole: begun where it is missing, built by a job, brought back, proved, shown."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.errors import FeedShardsFixed
from headrace.feed.hot import Hot
from headrace.feed.model import (
    Differs,
    FeedVerified,
    Kind,
    ShardState,
    moment_of,
)
from headrace.feed.names import Names
from headrace.feed.rebuild import Progress, Rebuild
from headrace.feed.returning import Returning
from headrace.feed.settings import FeedConfig
from headrace.jobs import Jobs, NewJob, Registry, Task
from headrace.jobs.inhand import current_job
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import Backoff

REBUILD_QUEUE: Final = "feed.rebuild"
RETAIN_QUEUE: Final = "feed.retain"
SMALL: Final = 1_000
"""So many viewers and authors are put by whoever finds the index missing: it takes less than a second."""
BUILD_EVERY_S: Final = 2.0
LOOK_EVERY_S: Final = 0.25
"""So often one that came back is looked at until it is ready."""
AGAIN_S: Final = 0.5
"""An attempt that ended is not made again sooner."""
GIVE_UP_S: Final = 60.0
"""After so long the next page or write begins anew."""
RECONNECT: Final = Backoff(0.05, 1.0)
REST_S: Final = 2.0
"""So long an engine that did not answer is left alone, so that pages from the other one do not wait for it."""
AUTHORS_PER_STEP: Final = 500
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the job that builds the index."""

    clean: bool = False


class Index:
    """Looks after the index; opens nothing before `open`."""

    def __init__(
        self,
        postgres: Postgres,
        hot: Hot,
        jobs: Jobs,
        names: Names,
        *,
        applier: Applier,
        rebuild: Rebuild,
        config: FeedConfig,
    ) -> None:
        self.is_ready = False
        self._applier = applier
        self._returning = Returning(postgres, hot, applier)
        self._postgres = postgres
        self._hot = hot
        self._jobs = jobs
        self._names = names
        self._rebuild = rebuild
        self._config = config
        self._built_s = self._rested_s = self._tried_s = float("-inf")
        self._making: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    def register(self, registry: Registry) -> None:
        """Add the room's tasks for the index."""
        registry.add(Task(queue=REBUILD_QUEUE, handler=self._build_job, retries=20, timeout="12h"))
        registry.cron("41 3 * * *", name=RETAIN_QUEUE, timeout="12h")(self.retain)

    async def open(self) -> None:
        """Check the number of shards, and begin an index where there is none. Raises: FeedShardsFixed.

        Where an engine is away nothing is checked yet: pages may still come from the other one.
        """
        async with self._opening:
            if self.is_ready or time.monotonic() - self._rested_s < REST_S:
                return
            try:
                stored = await store.follows.ensure_shards(self._postgres, self._config.shards)
                if stored != self._config.shards:
                    raise FeedShardsFixed(self._config.shards, stored)
                for shard in range(self._hot.shards):
                    if (await self._hot.look(shard)).state is None:
                        if not await self._build_if_small():
                            self.want_ready()
                        break
            except Unavailable as error:
                self._rested_s = time.monotonic()
                _often.warning("feed_not_opened", error=error.text)
                return
            self.is_ready = True

    def want_ready(self) -> None:
        """Have the index made ready, by one task of this process."""
        if self._making is not None and not self._making.done():
            return
        if self._applier.has_left or time.monotonic() - self._tried_s >= AGAIN_S:
            self._making = asyncio.create_task(self._make_ready())

    async def build(self, *, clean: bool = False, on_progress: Progress | None = None) -> int:
        """Build it here; how many viewers and authors it has."""
        count = await self._rebuild.build(clean=clean, on_progress=on_progress)
        _log.info("feed_index_built", entities=count)
        return count

    async def enqueue_build(self, *, clean: bool = False) -> int:
        """Have a job build it; the job's id, the one under way if there is one."""
        job = NewJob(queue=REBUILD_QUEUE, payload=Build(clean=clean), unique="build")
        return await self._jobs.enqueue(job)

    async def verify(
        self, *, sample: int | None = None, on_progress: Progress | None = None
    ) -> FeedVerified:
        """Compare it with the truth."""
        proof, differences = await self._rebuild.verify(sample=sample, on_progress=on_progress)
        told = await self._names.told([each.entity for each in differences])
        return FeedVerified(
            viewers=proof.viewers,
            authors=proof.authors,
            posts=proof.posts,
            follows=proof.follows,
            differences=[
                Differs(
                    kind=each.kind.name.lower(),
                    entity=told[each.entity],
                    missing=each.missing,
                    extra=each.extra,
                )
                for each in differences
            ],
        )

    async def shards(self) -> list[ShardState]:
        """How each shard stands."""
        found = []
        for shard in range(self._hot.shards):
            look = await self._hot.look(shard)
            found.append(
                ShardState(
                    shard=shard,
                    state="returning" if look.came_back else look.state or "missing",
                    floor_at=moment_of(look.floor) if look.floor else None,
                    newest_at=moment_of(look.newest) if look.newest else None,
                )
            )
        return found

    async def retain(self) -> None:
        """Remove posts that are older than `feed.keep_for`, which are in no index any more."""
        kept_s = max(self._config.keep_for_s, self._config.index_for_s + 86_400)
        oldest_ms = await store.changes.now_ms(self._postgres) - int(kept_s * 1000)
        after, removed = -(2**63), 0
        while oldest_ms > 0 and (
            authors := await store.changes.entities_after(
                self._postgres, Kind.POSTS, after=after, rows_max=AUTHORS_PER_STEP
            )
        ):
            for author in authors:
                removed += await store.posts.drop_posts(
                    self._postgres, author, score=oldest_ms * 2048
                )
            after = authors[-1]
        _log.info("feed_retained", removed=removed)

    async def _build_job(self, wanted: Build) -> None:
        await self.build(clean=wanted.clean, on_progress=current_job().progress)

    async def _make_ready(self) -> None:
        """Until nothing is left to be done here; what was left by this process is tried for as long as an engine is away."""
        ends_s, failures = time.monotonic() + GIVE_UP_S, 0
        while time.monotonic() < ends_s:
            pause_s = LOOK_EVERY_S
            try:
                if await self._is_made_ready():
                    break
                failures = 0
            except Unavailable as error:
                if not self._applier.has_left:
                    _often.warning("feed_index_not_ready", error=error.text)
                    break
                failures += 1
                pause_s = RECONNECT.delay_s(failures)
            except HeadraceError as error:
                _often.warning("feed_index_not_ready", error=error.text)
                break
            await asyncio.sleep(pause_s)
        self._tried_s = time.monotonic()

    async def _is_made_ready(self) -> bool:
        """One step: built, brought back, or left to a job; whether nothing more is to be done here."""
        standing = await self._returning.run_once()
        if standing.is_old or standing.is_missing:
            await self._build_somehow(clean=standing.is_old)
        if self._applier.has_left:
            await self._applier.bring_left()
        return not (standing.is_waiting or self._applier.has_left)

    async def _build_somehow(self, *, clean: bool) -> None:
        now_s = time.monotonic()
        if now_s - self._built_s >= BUILD_EVERY_S:
            self._built_s = now_s
            if not await self._build_if_small(clean=clean):
                await self.enqueue_build(clean=clean)

    async def _build_if_small(self, *, clean: bool = False) -> bool:
        if await store.changes.has_entities(self._postgres, rows=SMALL):
            return False
        await self.build(clean=clean)
        return True
