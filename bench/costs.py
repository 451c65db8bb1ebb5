"""What does one operation of each room cost: CPU, log, disk and memory of each process?

Capacity is planned with these figures (`headrace size`, docs/reference/capacity.md). Each operation
runs many times through the documented call. Before and after, the meter reads the CPU of
PostgreSQL, of Valkey and of our processes, the write-ahead log and its syncs, the size of the
database, the memory of Valkey and its append-only file. A run of its own then counts bytes of the
network, and reads and writes of the database with those of a checkpoint, which writes each changed
page.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import asyncpg

from bench.children import cpu_of, wait_for
from bench.costs_media import measure_media, measure_memory
from bench.feed_stage import FIRST_AUTHOR, make_world, staged
from bench.fetch_photos import APP as PHOTOS_APP
from bench.fetch_photos import CUSTOMERS, PHOTOS_OF_ITEM, SLOTS
from bench.fetch_photos import DEADLINE_S as PHOTOS_S
from bench.fetch_site import Offered, fetch_site
from bench.figures import Figure, Runs, figure
from bench.harness import READY_S, Measure, Run, wait_started
from bench.origins.nginx import nginx
from bench.origins.photos import make_photos
from bench.ours import open_app
from bench.peers.driver import PAYLOAD
from bench.relay import Relay, relayed
from bench.systems import OURS, Cell
from bench.tally import read_tally
from bench.views_stage import flusher, open_views, wait_flushed
from headrace import Headrace
from headrace.engines.valkey import Valkey, ValkeyConfig

PRECISE: Final = {
    "CPU of PostgreSQL": "us",
    "CPU of Valkey": "us",
    "CPU of Headrace": "us",
    "write-ahead log": "B",
    "syncs of the log": "syncs",
    "size of the database": "B",
    "memory of Valkey": "B",
    "append-only file": "B",
}
TRAFFIC: Final = {
    "network of PostgreSQL": "B",
    "network of Valkey": "B",
    "reads of the database": "reads",
    "writes of the database": "writes",
    "written by the database": "B",
}
"""Counted in a run of their own, through a relay and with a checkpoint at its begin and end."""
UNITS: Final = {**PRECISE, **TRAFFIC}
STATISTICS_S: Final = 1.5
"""A session reports its counters of I/O with the first statement that ends a second later."""
READING: Final = """
SELECT pg_current_wal_insert_lsn() - '0/0', pg_database_size(current_database()),
    sum(fsyncs) FILTER (WHERE object = 'wal'), sum(reads),
    sum(coalesce(writes, 0) + coalesce(extends, 0)),
    sum(coalesce(write_bytes, 0) + coalesce(extend_bytes, 0))
FROM pg_stat_io
"""
PER_CALL: Final = 20
PER_FIRST_CALL: Final = 1_000
FOLLOWS: Final = 400
LEAST: Final = 0.01
"""Smaller values are the noise of the meter."""


@dataclass
class Meter:
    """Counts what the engines and our processes use while `measured` lasts."""

    cell: Cell
    ours: Sequence[int]
    """Pids of our processes, each with those below it."""
    relay: Relay | None = None
    """Set: only traffic is measured."""
    app: Headrace | None = None
    """Set: its idle session reports its counters by a statement more."""

    async def read(self) -> dict[str, float]:
        """All counters so far. They grow by our own reading, too: a millisecond of CPU."""
        engines = self.cell.engines
        database: Any = await asyncpg.connect(engines.database_url(self.cell.database))
        try:
            log_bytes, size_bytes, syncs, reads, writes, written = await database.fetchrow(READING)
        finally:
            await database.close()
        valkey = Valkey(engines.endpoints.valkey_url, ValkeyConfig())
        try:
            info = await valkey.command("INFO")
        finally:
            await valkey.close()
        # The engines are children of this process.
        servers = (engines.postgres_pid, engines.valkey_pid)
        values = (
            cpu_of(engines.postgres_pid) * 1e6,
            cpu_of(engines.valkey_pid) * 1e6,
            sum(cpu_of(pid, without=servers) for pid in self.ours) * 1e6,
            log_bytes,
            syncs or 0,
            size_bytes,
            info["used_memory"],
            info.get("aof_current_size", 0),
            self.relay.bytes_so_far() if self.relay is not None else 0,
            info["total_net_input_bytes"] + info["total_net_output_bytes"],
            reads or 0,
            writes or 0,
            written or 0,
        )
        return dict(zip(UNITS, map(float, values), strict=True))

    @asynccontextmanager
    async def measured(
        self, found: dict[str, float], operation: str, n: int, *, at_once: bool = False
    ) -> AsyncIterator[None]:
        """Add to `found` what each of `n` operations in the block costs.

        `at_once`: the operations run already, so nothing is waited for before the block.
        """
        if not at_once:
            await self._settle()
        before = await self.read()
        yield
        await self._settle()
        after = await self.read()
        kinds = PRECISE if self.relay is None else TRAFFIC
        found |= {f"{operation}: {key}": (after[key] - before[key]) / n for key in kinds}

    async def _settle(self) -> None:
        """Have all counters written; for traffic also all pages."""
        await asyncio.sleep(STATISTICS_S)
        if self.app is not None:
            await self.app.jobs.queues.all()
        if self.relay is not None:
            await self.cell.engines.run("CHECKPOINT")
            await asyncio.sleep(STATISTICS_S)


async def measure_jobs(run: Run) -> list[Figure]:
    """Enqueued alone, in bulk, and run by an agent in batches."""
    jobs = run.sized(100_000, 20_000)

    async def cell(relay: Relay | None) -> Mapping[str, float]:
        found: dict[str, float] = {}
        async with run.cell() as cell:
            app = open_app(cell.url)
            task = app.task("noop")(_nothing)
            meter = Meter(cell, [os.getpid()], relay, app)
            try:
                await app.jobs.queues.declare()
                singles = jobs // 20
                async with meter.measured(found, "job enqueued, one a call", singles):
                    for _ in range(singles):
                        await task.enqueue(**PAYLOAD)
                async with meter.measured(found, "job enqueued, 1,000 a call", jobs):
                    for _ in range(jobs // 1_000):
                        await task.enqueue_many([PAYLOAD] * 1_000)
            finally:
                await app.close()
            worker = cell.work()
            try:
                first = (await wait_started(cell, worker, 1)).count
                meter, rest = Meter(cell, [worker.pid], relay), singles + jobs - first
                async with meter.measured(found, "job run, batches of 100", rest, at_once=True):
                    await wait_started(cell, worker, singles + jobs)
            finally:
                await worker.end()
        return found

    return await _figures(run, cell, f"{jobs:,} jobs of 100 B")


async def measure_views(run: Run) -> list[Figure]:
    """Hits counted in calls of 20, their flush, and reads of 20 totals; all totals are cached."""
    hits = run.sized(200_000, 20_000)
    calls = [
        [f"item:{n}" for n in range(start, start + PER_CALL)] for start in range(0, hits, PER_CALL)
    ]

    async def cell(relay: Relay | None) -> Mapping[str, float]:
        found: dict[str, float] = {}
        await run.engines.clear_valkey()
        async with run.cell() as cell:
            app = open_views(cell)
            meter = Meter(cell, [os.getpid()], relay, app)
            try:
                async with flusher(cell) as carrier:
                    await app.views.hits(calls[0])
                    for start in range(0, hits, PER_FIRST_CALL):
                        ids = range(start, start + PER_FIRST_CALL)
                        await app.views.hits([f"item:{n}" for n in ids])
                    await wait_flushed(app, carrier)
                async with meter.measured(found, "view counted, 20 a call", hits):
                    for call in calls:
                        await app.views.hits(call)
                async with meter.measured(found, "total read, 20 a call", hits):
                    for call in calls:
                        await app.views.totals(call)
                async with flusher(cell) as carrier:
                    meter = Meter(cell, [carrier.pid], relay)
                    async with meter.measured(found, "view flushed", hits, at_once=True):
                        await wait_flushed(app, carrier)
            finally:
                await app.close()
        return found

    return await _figures(run, cell, f"{hits:,} items viewed twice")


async def measure_feed(run: Run) -> list[Figure]:
    """Posts, follows and pages."""
    world = make_world("zipf", posts=100_000, viewers=20)
    posts, follows, pages = run.sized(5_000, 500), run.sized(5_000, 500), run.sized(20_000, 2_000)

    async def cell(relay: Relay | None) -> Mapping[str, float]:
        found: dict[str, float] = {}
        await run.engines.clear_valkey()
        async with run.cell() as cell, staged(cell, world) as app:
            meter = Meter(cell, [os.getpid()], relay, app)
            viewers = world.viewers[FOLLOWS]
            async with meter.measured(found, "post published", posts):
                for n in range(posts):
                    await app.feed.post(FIRST_AUTHOR + n % world.authors, f"post-{n}")
            async with meter.measured(found, "author followed", follows):
                for n in range(follows):
                    await app.feed.follow(50_000_000 + n // 50, FIRST_AUTHOR + n % 50)
            async with meter.measured(found, "page of 20 posts, 400 follows", pages):
                for n in range(pages):
                    await app.feed.page(viewers[n % len(viewers)])
        return found

    return await _figures(run, cell, "100,000 posts, skewed")


async def measure_fetch(run: Run) -> list[Figure]:
    """Photos of 150 KB from the request to the consumer, with the items that they belong to."""
    photos = run.sized(6_000, 1_000)
    folder = run.folder / "cost-photos"
    await asyncio.to_thread(make_photos, folder, photos)

    async def cell(relay: Relay | None) -> Mapping[str, float]:
        found: dict[str, float] = {}
        async with (
            run.cell() as cell,
            nginx(cell.folder / "origin", folder) as origin,
            fetch_site(cell, origin.settings) as site,
        ):
            names = [f"c{n}" for n in range(CUSTOMERS)]
            await site.set_customers(names)
            meter, items = Meter(cell, [os.getpid()], relay, site.app), photos // PHOTOS_OF_ITEM
            async with meter.measured(found, "item of a new catalogue, 4 photos", items):
                for number, name in enumerate(names):
                    urls = [origin.url(n) for n in range(number, photos, CUSTOMERS)]
                    starts = range(0, len(urls), PHOTOS_OF_ITEM)
                    offered = [Offered(f"i{at}", urls[at : at + PHOTOS_OF_ITEM]) for at in starts]
                    await site.offer(name, offered)
            worker = cell.work(PHOTOS_APP, slots=SLOTS)
            try:
                await wait_for(origin.has_sent, "a request", READY_S, worker)
                meter = Meter(cell, [worker.pid], relay)
                async with meter.measured(found, "photo of 150 KB", photos, at_once=True):
                    await wait_for(
                        lambda: read_tally(cell.tally_folder).count >= photos,
                        "all photos",
                        PHOTOS_S,
                        worker,
                    )
            finally:
                await worker.end()
        return found

    return await _figures(run, cell, f"{photos:,} photos of {CUSTOMERS} customers")


async def _figures(
    run: Run, cell: Callable[[Relay | None], Awaitable[Mapping[str, float]]], size: str
) -> list[Figure]:
    found = await run.alternate({OURS.name: partial(cell, None)})
    async with relayed(run.engines, run.folder / f"relay{run.cells_done}") as relay:
        found |= await run.alternate({OURS.name: partial(cell, relay)}, pairs=1)
    # Rows of an operation stand together.
    operations = list(dict.fromkeys(name.rpartition(": ")[0] for name in found))
    names = [f"{operation}: {key}" for operation in operations for key in UNITS]
    return [
        figure(name, UNITS[name.rpartition(": ")[2]], size, ours=values)
        for name in names
        if name in found and (values := _positive(found[name][OURS.name])).median >= LEAST
    ]


def _positive(runs: Runs) -> Runs:
    return Runs(tuple(max(0.0, value) for value in runs.values))


async def _nothing(text: str) -> None:
    """Never run here."""


QUESTIONS: Final[dict[str, Measure]] = {
    "jobs": measure_jobs,
    "views": measure_views,
    "feed": measure_feed,
    "fetch": measure_fetch,
    "media": measure_media,
    "memory": measure_memory,
}
SETTINGS: Final = {
    "headrace": "embedded engines, fsync on, AOF everysec; one client, no load beside"
}
