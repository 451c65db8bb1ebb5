"""The sweep: brings what the index was not seen to have, and keeps it in bounds.

Every change was brought by its writer at once. A second later the sweep brings it once more, which tells it whether that
went well, and is how a change gets there whose writer died in between. Ten minutes later it is forgotten.

A Valkey that started anew may lack what was changed last: `returning.py` sees to it here as everywhere.

Any number may run: bringing a change twice does no harm.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.hot import Hot
from headrace.feed.rebuild import marks_at
from headrace.feed.returning import SETTLE_S, Returning
from headrace.feed.service import Feed
from headrace.feed.settings import FeedConfig, changes_repaired, sweep_lag_s
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import Backoff, require_not_cancelled

RECONNECT: Final = Backoff(0.1, 3.0)
OLDER_S: Final = 1.0
"""Younger changes are left to their writers."""
KEPT_S: Final = 600.0
"""So long a change is kept after it was made; Valkey loses seconds at most."""
DROPS_PER_STEP: Final = 5_000
TRIM_EVERY_S: Final = 600.0
BUCKETS_PER_STEP: Final = 2_000
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class Sweeper:
    """All that one sweeping process does."""

    def __init__(self, postgres: Postgres, hot: Hot, feed: Feed, config: FeedConfig) -> None:
        self._postgres = postgres
        self._hot = hot
        self._feed = feed
        self._config = config
        self._applier = Applier(postgres, hot)
        self._returning = Returning(postgres, hot, self._applier)
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
                _often.warning("feed_not_swept", error=error.text, failures=failures)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)

    async def run_once(self, *, older_s: float = OLDER_S, settle_s: float = SETTLE_S) -> int:
        """Sweep what is older; how many changes were missing. Raises: ValkeyDown, PostgresDown."""
        await self._feed.ready()
        standing = await self._returning.run_once(settle_s=settle_s)
        if standing.is_old or standing.is_missing:
            self._feed.want_ready()
        self._swept = self._swept or await store.changes.forgotten(self._postgres)
        swept = await self._applier.sweep(older_s=older_s)
        self._swept = max(self._swept, swept.last)
        changes_repaired.inc(swept.missing)
        for shard in range(self._hot.shards):
            await self._hot.split_all(shard)
            look = await self._hot.look(shard)
            if look.state is not None and look.run == look.server_run and look.swept < self._swept:
                await self._hot.note_swept(shard, run=look.server_run, swept=self._swept)
        await store.changes.drop_swept(self._postgres, older_s=KEPT_S, rows_max=DROPS_PER_STEP)
        sweep_lag_s.set(await store.changes.oldest_unswept_s(self._postgres))
        if time.monotonic() - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = time.monotonic()
            await self.trim()
        return standing.missing + swept.missing

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
