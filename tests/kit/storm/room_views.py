"""Hits as they are sent and answered, and the bounds that every count must meet.

For each item `sent` counts the hits that were sent and `acked` those that were answered. The
stored total must lie between them, and so must every read: at least what was acked before its
request, at most what was sent before its reply.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import httpx
from tests.kit.checkers import Finding
from tests.kit.storm.storm import Storm, Tally, pause
from tests.kit.waiting import wait_true

from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.kernel.errors import Unavailable
from headrace.views import Total, Views, ViewsConfig
from headrace.views.valkey_store import ValkeyStore
from headrace.views.worker import Flusher

STORED = compile_query(
    "stored",
    "-- Stored totals and the sums of their hours.\n"
    "SELECT id, total, (SELECT sum(views) FROM headrace.views_hour h WHERE h.id = t.id) AS hours"
    " FROM headrace.views_total t WHERE class = 0",
)

TOTAL = compile_query(
    "total",
    "-- A stored total, or 0.\n"
    "SELECT coalesce(sum(total), 0)::bigint FROM headrace.views_total WHERE id = :id",
)


async def sweep_totals(valkey_store, shards):
    """Delete all cached totals as a flusher deletes unused ones, also with pending hits."""
    cursor = None
    while cursor != b"0":
        cursor, found = await valkey_store.find_idle(cursor or b"0", shards, idle_s=0)
        for idle in found:
            await valkey_store.sweep(idle)


def open_engines(postgres_url, valkey_url, folder, *, prefix, timeout_s=1.0) -> Engines:
    """All engines for a service in this process."""
    config = ValkeyConfig(prefix=prefix, timeout_s=timeout_s)
    limits = PostgresConfig(connect_timeout_s=2.0, statement_timeout_s=5.0)
    return Engines(
        Postgres(postgres_url, limits),
        Valkey(valkey_url, config),
        Multiplexer(valkey_url, config),
        Blobs((folder / "blobs").as_uri()),
    )


class CountedViews:
    """Clients, readers and flushers of this process, and their counts."""

    def __init__(self, postgres_url, valkey_url, folder, *, prefix="headrace", **settings) -> None:
        self.urls = (postgres_url, valkey_url)
        self.engines = open_engines(postgres_url, valkey_url, folder, prefix=prefix)
        self.config = ViewsConfig(flush_every_s=0.05, lease_s=1.0, **settings)
        self.views = self.new_views()
        self.sent: Counter = Counter()
        self.acked: Counter = Counter()
        self.calls = self.answers = self.in_flight = 0
        self.open = asyncio.Event()
        self.open.set()
        self.entities = [f"ad:{number}" for number in range(20)]
        self.wrong_reads: list[str] = []
        self.stop = asyncio.Event()
        self._tasks: list[asyncio.Task] = []
        self._random = random.Random(7)
        self._judges_hits = False

    def new_views(self) -> Views:
        jobs = Jobs(self.engines.postgres, JobsConfig(), Registry())
        return Views(self.engines, jobs, self.config)

    async def hit(self, send: Callable[[list[str]], Awaitable] | None = None) -> bool:
        """One call with some hits, counted before and after; whether it was answered."""
        ids = self._random.choices(self.entities, k=self._random.randint(1, 6))
        await self.open.wait()
        self.calls += 1
        before = self.acked.copy()
        self.sent.update(ids)
        self.in_flight += 1
        try:
            totals = await (send or self.views.hits)(ids)
        except (Unavailable, httpx.HTTPError):
            return False
        finally:
            self.in_flight -= 1
        if self._judges_hits:
            self._judge(before, totals)
        self.acked.update(ids)
        self.answers += 1
        return True

    async def read(self) -> None:
        """One read, judged by what was counted before and after it."""
        await self.open.wait()
        before = self.acked.copy()
        self.in_flight += 1
        try:
            self._judge(before, await self.views.totals(self.entities))
        except Unavailable:
            return
        finally:
            self.in_flight -= 1

    def _judge(self, before: Counter, totals: Sequence[Total]) -> None:
        for total in totals:
            if total.total is None or total.stale:
                continue
            if not before[total.id] <= total.total <= self.sent[total.id]:
                self.wrong_reads.append(
                    f"{total.id}: {before[total.id]} <= {total.total} <= {self.sent[total.id]}"
                )

    async def forget(self) -> None:
        """Delete all cached totals, as a flusher does with unused ones."""
        store = ValkeyStore(self.engines.valkey, self.engines.multiplexer)
        with suppress(Unavailable):
            await sweep_totals(store, range(self.config.shards))

    def start(self, *, hitters=4, readers=1, flushers=0, sweepers=0) -> None:
        """Let them run until `finish`.

        With sweepers no reader can be judged, because a read of a swept total lags by a flush.
        Instead the answers of hits are judged.
        """
        self._judges_hits = sweepers > 0
        steps = [self.hit] * hitters + [self.read] * readers + [self.forget] * sweepers
        self._tasks += [asyncio.create_task(self.repeat(step, self.stop)) for step in steps]
        for number in range(flushers):
            flusher = Flusher(self.engines, self.config, name=f"f{number}")
            self._tasks.append(asyncio.create_task(flusher.run(self.stop)))

    async def pass_more(self, hits=50) -> None:
        wanted = self.acked.total() + hits
        await wait_true(lambda: self.acked.total() >= wanted, what="more hits")

    async def finish(self) -> None:
        self.stop.set()
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        self.stop = asyncio.Event()

    async def settle(self) -> dict[str, int]:
        """Flush everything here; return the stored totals."""
        flusher = Flusher(self.engines, self.config, name="last")
        ended = asyncio.Event()
        running = asyncio.create_task(flusher.run(ended))
        await wait_true(self.is_flushed, what="all flushed")
        ended.set()
        await running
        return await self.stored()

    async def stored(self) -> dict[str, int]:
        """The stored totals, which equal the sums of their hours."""
        verified = await self.views.analytics.verify()
        assert verified.differences == []
        rows = await self.engines.postgres.all(STORED)
        assert all(row["total"] == row["hours"] for row in rows)
        return {row["id"]: row["total"] for row in rows}

    def forget_to(self, stored: dict[str, int]) -> None:
        """Count again from what is stored, after a loss that is allowed."""
        assert Counter(stored) <= self.sent
        self.acked, self.sent = Counter(stored), Counter(stored)

    async def require_exact(self) -> None:
        """Require exact counts, reads within their bounds, and cached totals as in PostgreSQL."""
        stored = await self.settle()
        assert self.wrong_totals(stored) == []
        await self.require_cached(stored)

    def wrong_totals(self, stored: dict[str, int]) -> list[Finding]:
        """Reads and stored totals out of their bounds."""
        reads, self.wrong_reads = self.wrong_reads, []
        found = [Finding("wrong read", "totals", text) for text in reads]
        for entity in self.entities:
            counted, acked, sent = stored.get(entity, 0), self.acked[entity], self.sent[entity]
            text = f"{acked} acknowledged, {counted} stored, {sent} sent"
            if counted < acked:
                found.append(Finding("lost", entity, text))
            if counted > sent:
                found.append(Finding("doubled", entity, text))
        return found

    async def require_cached(self, stored: dict[str, int]) -> None:
        """Require the cached totals to be the stored ones."""
        for views in (self.views, self.new_views()):
            read = await wait_true(lambda v=views: self._read_all(v), what="totals are read")
            cached = {total.id: total.total for total in read}
            assert cached == {entity: stored.get(entity, 0) for entity in self.entities}

    async def _read_all(self, views: Views) -> list[Total]:
        """All totals; empty while some are stale, because the circuit breaker is still open."""
        found = await views.totals(self.entities)
        return [] if any(total.stale for total in found) else found

    async def is_flushed(self) -> bool:
        """Whether no hit waits, and every shard has a flusher."""
        with suppress(Unavailable):
            lags = await self.views.analytics.lag()
            done = [lag.pending == 0 and lag.flusher is not None for lag in lags]
            return len(done) == self.config.shards and all(done)
        return False

    async def repeat(self, step: Callable[[], Awaitable], stop, pause_s: float = 0.002) -> None:
        while not stop.is_set():
            await step()
            await pause(stop, pause_s)

    async def close(self) -> None:
        """End what runs, close what is open."""
        self.stop.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engines.close()


class ViewsRoom:
    """Hits through Python and through an API that dies; readers all the while."""

    name = "views"
    roles = ("flusher", "api")

    async def begin(self, storm: Storm) -> None:
        self.storm = storm
        self._probes = self._posted = 0
        urls = (storm.endpoints.postgres_url, storm.endpoints.valkey_url)
        self.counted = CountedViews(*urls, storm.folder, prefix="storm")
        # A total that is not cached lags by a flush.
        for _ in range(40):
            await self.counted.hit()
        assert len(await self.counted.settle()) == len(self.counted.entities)

    def clients(self) -> list[Callable[[asyncio.Event], Awaitable[None]]]:
        counted = self.counted
        return [
            lambda stop: counted.repeat(counted.hit, stop, 0.01),
            lambda stop: counted.repeat(counted.read, stop, 0.01),
            self._post,
        ]

    async def _post(self, stop: asyncio.Event) -> None:
        async with self.storm.client() as client:

            def send(ids: list[str]) -> Awaitable[None]:
                return self._send(client, ids)

            await self.counted.repeat(lambda: self.counted.hit(send), stop, 0.01)

    async def _send(self, client: httpx.AsyncClient, ids: list[str]) -> None:
        hits = [{"id": one, "class": "human"} for one in ids]
        answer = await client.post("/v1/views", json=hits)
        assert answer.is_success or answer.status_code in {429, 503}, answer.text
        answer.raise_for_status()
        self._posted += 1

    async def is_settled(self) -> bool:
        return await self.counted.is_flushed()

    async def findings(self) -> list[Finding]:
        stored = await self.counted.stored()
        found = self.counted.wrong_totals(stored)
        await self.counted.require_cached(stored)
        return found

    async def last_findings(self) -> list[Finding]:
        return []

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[Counter]:
        """Send no hit and no read inside the block; yields the acknowledged hits."""
        self.counted.open.clear()
        try:
            await wait_true(lambda: not self.counted.in_flight, what="no hit is being sent")
            yield self.counted.acked.copy()
        finally:
            self.counted.open.set()

    def permit_loss(self, acknowledged: Counter, stored: dict[str, int]) -> int:
        """Accept that acknowledged hits that are not stored are lost; return their number."""
        waiting = acknowledged - Counter(stored)
        self.counted.acked -= waiting
        return waiting.total()

    def tally(self) -> Tally:
        counted = self.counted
        counts = counted.calls, counted.answers, counted.calls - counted.answers
        counted.calls = counted.answers = 0
        return Tally(*counts)

    def require_work(self) -> None:
        assert self.counted.acked.total() > 100
        assert self._posted, "the API acknowledged no hit"

    async def round_trip(self) -> bool:
        """Count a hit of a new item over HTTP, and wait until it is stored."""
        self._probes += 1
        probe = f"probe:{self._probes}"
        async with self.storm.client() as client:
            await self._send(client, [probe])
        is_stored = partial(self.storm.postgres.value, TOTAL, id=probe)
        await wait_true(is_stored, what="the hit of a round trip is stored")
        return True

    async def close(self) -> None:
        await self.counted.close()
