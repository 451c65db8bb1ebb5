"""The sweeper: apply changes that the index may lack, and trim it.

Writers apply every change at once. A second later the sweep applies it again, which confirms it and
covers writers that died in between. Ten minutes later the change is purged. The sweep also recovers
the index after a restart of Valkey (`index_recovery.py`).

Any number may run, because applying a change twice has no effect.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from headrace.engines.postgres_errors import PostgresDown
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.index_recovery import SETTLE_S, Recovery, marks_at
from headrace.feed.service import Feed
from headrace.feed.settings import changes_repaired, sweep_lag_s
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import Peak
from headrace.kernel.resilience import Backoff, require_not_cancelled, wait_event

RECONNECT: Final = Backoff(0.1, 3.0)
OLDER_S: Final = 1.0
"""Newer changes are left to their writers."""
KEPT_S: Final = 600.0
"""How long a change is kept; Valkey loses only seconds."""
PURGES_PER_STEP: Final = 5_000
TRIM_EVERY_S: Final = 600.0
BUCKETS_PER_STEP: Final = 2_000
_log: Final = logger(__name__)


class Sweeper:
    """One sweeping process."""

    def __init__(self, feed: Feed) -> None:
        self._postgres = postgres = feed.postgres
        self._valkey = feed.valkey
        self._index = feed.index
        self._config = feed.config
        self._applier = Applier(postgres, feed.valkey)
        self._recovery = Recovery(postgres, feed.valkey, self._applier)
        self._sparse_log = SparseLogger(_log)
        self._trimmed_s = float("-inf")
        self._scan = b"0"
        self._swept = 0
        self._lag = Peak(sweep_lag_s)

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
                self._sparse_log.warning("feed_not_swept", error=error.text, failures=failures)
                if not isinstance(error, PostgresDown):
                    # Changes wait while Valkey is down; PostgreSQL has their age.
                    with suppress(Unavailable):
                        await self._note_lag()
            await wait_event(stop, pause_s)

    async def run_once(self, *, older_s: float = OLDER_S, settle_s: float = SETTLE_S) -> int:
        """Sweep changes older than `older_s`. Return how many were missing.

        Raises: ValkeyDown, PostgresDown, FeedShardsFixed.
        """
        await self._index.ready()
        state = await self._recovery.run_once(settle_s=settle_s)
        if state.needs_build:
            self._index.require_ready()
        self._swept = self._swept or await store.last_purged(self._postgres)
        swept = await self._applier.sweep(older_s=older_s)
        self._swept = max(self._swept, swept.last)
        changes_repaired.inc(swept.missing)
        for shard in range(self._valkey.shards):
            await self._valkey.split_all(shard)
            status = await self._valkey.status(shard)
            is_current = status.state is not None and status.run == status.server_run
            if is_current and status.swept < self._swept:
                await self._valkey.note(shard, "run", run=status.server_run, swept=self._swept)
        await store.purge_swept(self._postgres, older_s=KEPT_S, rows_max=PURGES_PER_STEP)
        await self._note_lag()
        if time.monotonic() - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = time.monotonic()
            await self.trim()
        return state.repaired + swept.missing

    async def _note_lag(self) -> None:
        self._lag.note(await store.oldest_unswept_s(self._postgres))

    async def trim(self) -> None:
        """Delete posts and buckets that are too old for the index."""
        now_ms = await store.now_ms(self._postgres)
        marks = marks_at(now_ms, index_for_s=self._config.index_for_s)
        for shard in range(self._valkey.shards):
            while await self._valkey.trim(
                shard, floor=marks.floor, fine=marks.fine, buckets_max=BUCKETS_PER_STEP
            ):
                require_not_cancelled()
        self._scan = await self._valkey.trim_posts(self._scan)
        while self._scan != b"0":
            require_not_cancelled()
            self._scan = await self._valkey.trim_posts(self._scan)
