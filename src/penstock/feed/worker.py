"""The sweep: brings what the index was not seen to have, and keeps it in bounds.

Every change was brought by its writer at once. A second later the sweep brings it once more, which tells it whether that
went well, and is how a change gets there whose writer died in between. Ten minutes later it is forgotten.

A Valkey that started anew may have lost its last second or two: then all that is not forgotten is swept again. One
that is further behind than that (an old copy) is built anew, in place.

Any number may run: bringing a change twice does no harm.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from penstock.engines.postgres import Postgres
from penstock.feed import store
from penstock.feed.apply import Applier
from penstock.feed.hot import Hot
from penstock.feed.rebuild import marks_at
from penstock.feed.service import Feed
from penstock.feed.settings import FeedConfig, changes_repaired, sweep_lag_s
from penstock.jobs.leases import require_not_cancelled
from penstock.kernel.backoff import Backoff
from penstock.kernel.errors import Unavailable
from penstock.kernel.logs import logger

RECONNECT: Final = Backoff(0.1, 3.0)
OLDER_S: Final = 1.0
"""Younger changes are left to their writers."""
KEPT_S: Final = 600.0
"""So long a change is kept after it was made; Valkey loses seconds at most."""
CHANGES_PER_STEP: Final = 500
DROPS_PER_STEP: Final = 5_000
TRIM_EVERY_S: Final = 600.0
BUCKETS_PER_STEP: Final = 2_000
_log: Final = logger(__name__)


class Sweeper:
    """All that one sweeping process does."""

    def __init__(self, postgres: Postgres, hot: Hot, feed: Feed, config: FeedConfig) -> None:
        self._postgres = postgres
        self._hot = hot
        self._feed = feed
        self._config = config
        self._applier = Applier(postgres, hot)
        self._trimmed_s = float("-inf")
        self._scan = b"0"
        self._swept = 0

    @classmethod
    def of(cls, feed: Feed) -> Sweeper:
        """The sweep of an app's feed."""
        return cls(feed.postgres, feed.hot, feed, feed.config)

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep until `stop`. Raises: FeedShardsFixed."""
        failures = 0
        while not stop.is_set():
            require_not_cancelled()
            try:
                await self.run_once()
                failures, pause_s = 0, self._config.sweep_every_s
            except Unavailable as error:
                failures += 1
                pause_s = RECONNECT.delay_s(failures)
                _log.warning("feed_not_swept", error=error.text, failures=failures)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)

    async def run_once(self, *, older_s: float = OLDER_S) -> int:
        """Sweep what is older; how many changes were missing. Raises: ValkeyDown, PostgresDown."""
        await self._feed.ready()
        await self._look_for_losses()
        self._swept = self._swept or await store.changes.forgotten(self._postgres)
        repaired = 0
        while changes := await store.changes.unswept(
            self._postgres, older_s=older_s, rows_max=CHANGES_PER_STEP
        ):
            repaired += await self._applier.bring_now(changes)
            await store.changes.mark_swept(self._postgres, [change.id for change in changes])
            self._swept = max(self._swept, changes[-1].id)
        changes_repaired.inc(repaired)
        for shard in range(self._hot.shards):
            look = await self._hot.look(shard)
            if look.state is None:
                self._feed.want_build()
            elif look.run != look.server_run or look.swept < self._swept:
                await self._hot.note_swept(
                    shard, run=look.server_run, swept=max(look.swept, self._swept)
                )
        await store.changes.drop_swept(self._postgres, older_s=KEPT_S, rows_max=DROPS_PER_STEP)
        sweep_lag_s.set(await store.changes.oldest_unswept_s(self._postgres))
        if time.monotonic() - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = time.monotonic()
            await self.trim()
        return repaired

    async def trim(self) -> None:
        """Let go of what is too old for the index: one step through the authors, all buckets."""
        now_ms = await store.changes.now_ms(self._postgres)
        marks = marks_at(now_ms, index_for_s=self._config.index_for_s)
        for shard in range(self._hot.shards):
            while await self._hot.trim(
                shard, floor=marks.floor, fine=marks.fine, buckets_max=BUCKETS_PER_STEP
            ):
                require_not_cancelled()
        self._scan = await self._hot.trim_posts(self._scan)
        while self._scan != b"0":
            require_not_cancelled()
            self._scan = await self._hot.trim_posts(self._scan)

    async def _look_for_losses(self) -> None:
        """Sweep again where the server started anew; build anew where it is an old copy."""
        is_anew = False
        for shard in range(self._hot.shards):
            look = await self._hot.look(shard)
            if look.state is None or look.run in (None, look.server_run):
                continue
            is_anew = True
            forgotten = await store.changes.forgotten(self._postgres)
            if look.swept < forgotten:
                _log.warning("feed_index_is_old", shard=shard, swept=look.swept, kept=forgotten)
                await self._feed.rebuild()
        if is_anew:
            again = await store.changes.unsweep(self._postgres)
            _log.info("feed_swept_again", changes=again)
