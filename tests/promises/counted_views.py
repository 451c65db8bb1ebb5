"""A record of hits as they are sent and answered, and the conditions that every number must meet.

For each entity, `asked` is the number of hits that were sent, and `acked` the number of hits that
were answered. The counted number must be between them, and exactly `acked` if every answer was
received. A reader at the same time must see at least the hits that were acked before its request,
and at most the hits that were sent before its answer.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

from tests.kit.waiting import wait_true

from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.kernel.errors import Unavailable
from headrace.views import Views, ViewsConfig
from headrace.views.worker import Flusher

STORED = compile_query(
    "stored",
    "-- What is counted.\n"
    "SELECT id, total, (SELECT sum(views) FROM headrace.views_hour h WHERE h.id = t.id) AS hours"
    " FROM headrace.views_total t WHERE class = 0",
)


class CountedViews:
    """Clients, readers and flushers of this process on two engines, and their notes."""

    def __init__(self, postgres_url, valkey_url, folder, *, prefix="headrace", **settings) -> None:
        self.urls = (postgres_url, valkey_url)
        config = ValkeyConfig(prefix=prefix)
        short = PostgresConfig(connect_timeout_s=2.0, statement_timeout_s=5.0)
        self.engines = Engines(
            Postgres(postgres_url, short),
            Valkey(valkey_url, config),
            Multiplexer(valkey_url, config),
            Blobs((folder / "blobs").as_uri()),
        )
        self.config = ViewsConfig(flush_every_s=0.05, **settings)
        self.views = self.new_views()
        self.asked: Counter = Counter()
        self.acked: Counter = Counter()
        self.entities = [f"ad:{number}" for number in range(20)]
        self.wrong_reads: list[str] = []
        self.stop = asyncio.Event()
        self._tasks: list[asyncio.Task] = []
        self._random = random.Random(7)

    def new_views(self) -> Views:
        """Another instance of the service."""
        jobs = Jobs(self.engines.postgres, JobsConfig(), Registry())
        return Views(self.engines, jobs, self.config)

    async def hit(self) -> bool:
        """One call of some hits, noted before and after; whether it was answered."""
        ids = self._random.choices(self.entities, k=self._random.randint(1, 6))
        self.asked.update(ids)
        try:
            await self.views.hits(ids)
        except Unavailable:
            return False
        self.acked.update(ids)
        return True

    async def read(self) -> None:
        """One read, judged by what was noted before and after it."""
        before = {entity: self.acked[entity] for entity in self.entities}
        try:
            found = await self.views.totals(self.entities)
        except Unavailable:
            return
        for total in found:
            if total.total is None or total.stale:
                continue
            if not before[total.id] <= total.total <= self.asked[total.id]:
                self.wrong_reads.append(
                    f"{total.id}: {before[total.id]} <= {total.total} <= {self.asked[total.id]}"
                )

    def start(self, *, hitters=4, readers=1, flushers=0) -> None:
        """Let them run until `finish`."""
        for _ in range(hitters):
            self._tasks.append(asyncio.create_task(self._repeat(self.hit)))
        for _ in range(readers):
            self._tasks.append(asyncio.create_task(self._repeat(self.read)))
        for number in range(flushers):
            flusher = Flusher(self.engines, self.config, name=f"f{number}")
            self._tasks.append(asyncio.create_task(flusher.run(self.stop)))

    async def pass_more(self, hits=50) -> None:
        """Wait until so many more hits were answered."""
        wanted = self.acked.total() + hits
        await wait_true(lambda: self.acked.total() >= wanted, what="more hits")

    async def finish(self) -> None:
        """End all of them."""
        self.stop.set()
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        self.stop = asyncio.Event()

    async def settle(self) -> dict[str, int]:
        """Flush all there is; what is then counted, with totals and hours compared."""
        flusher = Flusher(self.engines, self.config, name="last")
        ended = asyncio.Event()
        running = asyncio.create_task(flusher.run(ended))
        await wait_true(self._is_flushed, what="all flushed")
        ended.set()
        await running
        verified = await self.views.analytics.verify()
        assert verified.differences == []
        rows = await self.engines.postgres.all(STORED)
        assert all(row["total"] == row["hours"] for row in rows)
        return {row["id"]: row["total"] for row in rows}

    async def require_exact(self) -> None:
        """Require exact counts, reads within their bounds, and cached totals as in PostgreSQL."""
        counted = await self.settle()
        assert self.wrong_reads == []
        off = {
            entity: (self.acked[entity], counted.get(entity, 0), self.asked[entity])
            for entity in self.entities
            if not self.acked[entity] <= counted.get(entity, 0) <= self.asked[entity]
        }
        assert off == {}, f"acked, counted, asked: {off}"
        await self.require_cached(counted)

    async def require_cached(self, counted) -> None:
        """Every instance tells what PostgreSQL has counted."""
        for views in (self.views, self.new_views()):
            told = {total.id: total.total for total in await views.totals(self.entities)}
            assert told == {entity: counted.get(entity, 0) for entity in self.entities}

    async def close(self) -> None:
        """End what runs, close what is open."""
        self.stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engines.close()

    async def _is_flushed(self) -> bool:
        with suppress(Unavailable):
            lags = await self.views.analytics.lag()
            done = [lag.pending == 0 and lag.flusher is not None for lag in lags]
            return len(done) == self.config.shards and all(done)
        return False

    async def _repeat(self, step) -> None:
        while not self.stop.is_set():
            await step()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), 0.002)
