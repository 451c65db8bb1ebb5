"""How fast are hits counted by the Python client and flushed, and how much memory do they need?

Hits: one process, 32 callers at once, 20 hits a call, popular items far more often; every total is
added up at the end. Flush: distinct items, so that each hit is two rows, a total and an hour;
the queue of hits writes as many.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate

import asyncpg

from bench.children import BenchFault
from bench.figures import Figure, Goal, figure, others
from bench.harness import Run
from bench.peers.seed_views import QUEUE, TABLES, PlainViews, SeedViews
from bench.views_stage import ITEMS, PER_READ, open_views
from headrace import Headrace
from headrace.engines.sql import compile_query
from headrace.views import store
from headrace.views.model import shard_of
from headrace.views.valkey_store import ValkeyStore
from headrace.views.worker import Flusher

RECORDED = "headrace, changes recorded"
QUEUED, PLAIN, TOOL = "queue of hits", "plain INCR and dump", "benchmark tool"
CALLERS = 32
HITS_AN_ENTRY = 50
FIRST = 200
"""Hits through the client: they set all shards up."""
FLUSH_S_MAX = 60.0
LOOK_EVERY_S = 0.02
"""While entries settle."""
SUM = compile_query(
    "sum", "-- All views.\nSELECT coalesce(sum(total), 0)::bigint FROM headrace.views_total"
)
Hits = Callable[[Sequence[str]], Awaitable[object]]


async def measure_hits(run: Run) -> list[Figure]:
    """Hits a second through the clients."""
    found = await run.alternate(
        {"headrace": lambda: _ours(run), QUEUED: lambda: _seed(run), PLAIN: lambda: _plain(run)}
    )
    rates, memory, single = (found.get(name, {}) for name in ("hits/s", "B a hit", "single/s"))
    limit = _tool_limit(run)
    return [
        figure(
            "hits through the Python client",
            "hits/s",
            f"calls of {PER_READ}, {CALLERS} at once",
            ours=rates.get("headrace"),
            peers=others(rates),
            limit=limit,
            goal=Goal(at_least=300_000),
            why="one Python process prepares all calls, and its work for a call is the limit",
            not_measured=(
                [] if limit else ["limit: neither valkey-benchmark nor redis-benchmark is here"]
            ),
        ),
        figure(
            "hits through the Python client, one a call",
            "hits/s",
            f"{CALLERS} at once",
            ours=single.get("headrace"),
            peers=others(single),
        ),
        figure(
            "memory of a pending hit",
            "B",
            f"calls of {PER_READ}",
            ours=memory.get("headrace"),
            peers=others(memory),
            goal=Goal(at_most=12),
            is_less_better=True,
        ),
        figure(
            "memory of a cached total",
            "B",
            f"{ITEMS:,} items",
            ours=found.get("B a total", {}).get("headrace"),
            goal=Goal(at_most=80),
        ),
    ]


async def measure_flush(run: Run) -> list[Figure]:
    """Rows a second into PostgreSQL."""
    found = await run.alternate(
        {
            "headrace": lambda: _flush_ours(run),
            RECORDED: lambda: _flush_ours(run, changes_kept_s=3600.0),
            QUEUED: lambda: _flush_seed(run),
        }
    )
    rates = found.get("rows/s", {})
    return [
        figure(
            "flush to PostgreSQL",
            "rows/s",
            f"{run.sized(400_000, 100_000):,} distinct items",
            ours=rates.get("headrace"),
            peers=others(rates),
            goal=Goal(at_least=100_000),
        )
    ]


async def _ours(run: Run) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    async with run.cell() as cell:
        app = open_views(cell)
        try:
            items = [f"item:{number}" for number in range(ITEMS)]
            empty = await _memory(run)
            for start in range(0, ITEMS, 1_000):
                await app.views.hits(items[start : start + 1_000])
            filled = await _memory(run)
            rate, sent = await _drive(app.views.hits, items, run.sized(6, 3))
            pending = await _memory(run) - filled
            single, singles = await _drive_single(app.views.hit, items, run.sized(3, 1))
            totals = 0
            for start in range(0, ITEMS, 1_000):
                found = await app.views.totals(items[start : start + 1_000])
                totals += sum(one.total or 0 for one in found)
            if totals != sent + singles + ITEMS:
                raise BenchFault(f"{sent + singles + ITEMS} hits, {totals} counted")
        finally:
            await app.close()
    # The first hits are pending too; their entries of 1,000 take about 8 B a hit.
    cached = (filled - empty) / ITEMS - pending / sent
    return {"hits/s": rate, "single/s": single, "B a hit": pending / sent, "B a total": cached}


async def _seed(run: Run) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    seed = SeedViews(run.engines.endpoints.valkey_url)
    try:
        items = [f"item:{number}" for number in range(ITEMS)]
        await seed.client.mset({f"seed:c:{item}": 0 for item in items})
        filled = await _memory(run)
        rate, sent = await _drive(seed.hits, items, run.sized(6, 3))
        if await seed.client.llen(QUEUE) != sent:
            raise BenchFault("the queue of hits counted something else")
        return {"hits/s": rate, "B a hit": (await _memory(run) - filled) / sent}
    finally:
        await seed.close()
        await run.engines.clear_valkey()


async def _plain(run: Run) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    plain = PlainViews(run.engines.endpoints.valkey_url)
    try:
        items = [f"item:{number}" for number in range(ITEMS)]
        await plain.hits(items)
        rate, _ = await _drive(plain.hits, items, run.sized(6, 3))
        single, _ = await _drive_single(lambda item: plain.hits([item]), items, run.sized(3, 1))
        return {"hits/s": rate, "single/s": single}
    finally:
        await plain.close()
        await run.engines.clear_valkey()


async def _drive_single(
    hit: Callable[[str], Awaitable[object]], items: Sequence[str], seconds: float
) -> tuple[float, int]:
    """`app.views.hit(item)` from CALLERS callers, as a page does it."""
    rate, sent = await _drive(lambda call: hit(call[0]), items, seconds)
    return rate / PER_READ, sent // PER_READ


async def _drive(hits: Hits, items: Sequence[str], seconds: float) -> tuple[float, int]:
    """Calls of 20 from CALLERS callers for so long; hits a second, and how many it were."""
    dice, sent = random.Random(3), 0
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(items))))
    calls = [dice.choices(items, cum_weights=weights, k=PER_READ) for _ in range(2_000)]
    began_s = time.perf_counter()
    ends_s = began_s + seconds

    async def caller(number: int) -> int:
        done = 0
        while time.perf_counter() < ends_s:
            await hits(calls[(number * 61 + done) % len(calls)])
            done += 1
        return done

    sent = sum(await asyncio.gather(*(caller(number) for number in range(CALLERS)))) * PER_READ
    return sent / (time.perf_counter() - began_s), sent


async def _flush_ours(run: Run, **settings: float) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    async with run.cell() as cell:
        app = open_views(cell)
        try:
            items = run.sized(400_000, 100_000)
            await _pend(app, [f"item:{n}" for n in range(items)])
            return await _flushed(app, items, settings)
        finally:
            await app.close()


async def _pend(app: Headrace, items: Sequence[str]) -> None:
    """Hit each once, by the function alone.

    Totals that nobody reads are not worth PostgreSQL's time here.
    """
    shards = app.views.config.shards
    await app.views.hits(items[:FIRST])
    parts: list[list[str]] = [[] for _ in range(shards)]
    for item in items[FIRST:]:
        parts[shard_of(item, shards)].append(item)
    hot = ValkeyStore(app.engines.valkey, app.engines.multiplexer)
    for shard, part in enumerate(parts):
        for start in range(0, len(part), HITS_AN_ENTRY):
            lines = part[start : start + HITS_AN_ENTRY]
            counted = await hot.hit(shard, lines, floor_ms="0", offset_s=0)
            if not counted.entry:
                raise BenchFault(f"shard {shard} counts nothing")


async def _flushed(app: Headrace, items: int, settings: Mapping[str, float]) -> Mapping[str, float]:
    """The flusher's own steps, in this process, so that its start is not counted.

    Entries are not flushed before they settled (`views/flush.py`). That is a wait and no work, so
    the clock starts with the first step that writes; from then on it runs until all is written,
    whatever a step does.
    """
    config = dataclasses.replace(app.views.config, **settings)
    carrier = Flusher(app.engines, config, name="bench")
    await store.ensure_shards(app.engines.postgres, config.shards)
    await carrier.keep_changes()
    ends_s = time.monotonic() + FLUSH_S_MAX
    began_s, written = 0.0, 0
    while written < items:
        if time.monotonic() > ends_s:
            raise BenchFault(f"{items} hits, {written} written within {FLUSH_S_MAX:.0f} s")
        step_s = time.perf_counter()
        rows = await carrier.run_once()
        if rows:
            began_s, written = began_s or step_s, written + rows
        elif not written:
            await asyncio.sleep(LOOK_EVERY_S)
    took_s = time.perf_counter() - began_s
    stored = await app.engines.postgres.value(SUM)
    if stored != items:
        raise BenchFault(f"{items} hits, {stored} in PostgreSQL")
    return {"rows/s": 2 * items / took_s}


async def _flush_seed(run: Run) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    seed = SeedViews(run.engines.endpoints.valkey_url)
    async with run.cell() as cell:
        connection = await asyncpg.connect(cell.url)
        try:
            await connection.execute(TABLES)
            items = run.sized(400_000, 100_000)
            for start in range(0, items, 1_000):
                names = [f"item:{n}" for n in range(start, start + 1_000)]
                await seed.client.lpush(QUEUE, *names)
            rows, began_s = 0, time.perf_counter()
            while written := await seed.flush(connection):
                rows += written
            took_s = time.perf_counter() - began_s
            if await connection.fetchval("SELECT sum(total) FROM seed_total") != items:
                raise BenchFault("the queue of hits wrote something else")
            return {"rows/s": rows / took_s}
        finally:
            await connection.close()
            await seed.close()


async def _memory(run: Run) -> int:
    """Bytes that Valkey's data takes."""
    client = PlainViews(run.engines.endpoints.valkey_url)
    try:
        return int((await client.client.info("memory"))["used_memory_dataset"])
    finally:
        await client.close()


def _tool_limit(run: Run) -> dict[str, float]:
    """INCR in pipelines of 20 by the server's own benchmark tool, if it is installed."""
    tool = shutil.which("valkey-benchmark") or shutil.which("redis-benchmark")
    if tool is None:
        return {}
    path = run.engines.endpoints.valkey_url.removeprefix("unix://")
    words = [tool, "-s", path, "-t", "incr", "-n", "2000000", "-P", "20", "-c", "32", "-q", "--csv"]
    out = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
    rates = [
        line.split(",")[1].strip('"') for line in out.splitlines() if line.startswith('"INCR"')
    ]
    return {f"INCR/s of {TOOL}, pipelines of 20": float(rates[0])} if rates else {}
