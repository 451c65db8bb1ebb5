"""How many reads and hits does one API process serve, and what is the latency on a large site?

The large site has 5,000 reads of 20 totals and 150 hits a second. Throughput: closed loop, 64
connections, the server alone on one core, generator and Valkey on the other. Latency: open loop,
nothing pinned, with the flusher at work; once more while an analyst reads the whole series.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from bench.children import cpu_of
from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from bench.systems import Cell
from bench.views_stage import (
    ITEMS,
    PER_READ,
    Api,
    flusher,
    hits,
    load,
    make_token,
    on_core,
    open_views,
    our_api,
    pin,
    raw_api,
    reads,
    view_items,
    wait_flushed,
)
from headrace import Headrace
from headrace.engines.sql import compile_query
from headrace.kernel.resilience import require_not_cancelled

RAW = "raw ASGI, same Valkey call"
TWO = "headrace, two processes"
TWO_GOAL = Goal(times={"one process": 1.7})
BOUND = "one core parses, checks the token and waits for Valkey: see the CPU of a read"
CORES_FOR_TWO = 4
"""Two processes, Valkey and the generator."""
READS_PER_S, HITS_PER_S = 5_000, 150
HISTORY_HOURS = 24 * 30
SCAN = compile_query(
    "scan",
    "-- An analyst reads everything.\n"
    "SELECT class, sum(views), count(*) FROM headrace.views_hour GROUP BY 1",
)
MONTHS = compile_query(
    "months",
    "-- The partitions of that month.\nSELECT headrace.ensure_view_months_v1(ARRAY("
    " SELECT now() - months * interval '1 month' FROM generate_series(0, 2) months))",
)
HISTORY = compile_query(
    "history",
    "-- Hours of a month of some items.\nINSERT INTO headrace.views_hour (id, hour, class, views)"
    " SELECT 'old:' || i, date_trunc('hour', now()) - h * interval '1 hour', 0, 1"
    " FROM generate_series(1, :items::integer) i, generate_series(1, :hours::integer) h",
)


async def measure_most(run: Run) -> list[Figure]:
    """One saturated process, ours and the raw one in turns; and two of ours."""
    found = await run.alternate(
        {
            "headrace": lambda: _most(run, is_ours=True),
            RAW: lambda: _most(run, is_ours=False),
            TWO: lambda: _most_of_two(run),
        }
    )
    reads_by, cpu_by = found.get("reads/s", {}), found.get("us a read", {})
    raw = {RAW: reads_by[RAW]} if RAW in reads_by else {}
    return [
        figure(
            "HTTP reads of 20 totals, one process",
            "reads/s",
            f"{ITEMS:,} items, 64 connections",
            ours=reads_by.get("headrace"),
            peers=raw,
            goal=Goal(at_least=17_000, times={RAW: 0.6}),
            why=BOUND,
        ),
        figure(
            "CPU of a read of 20 totals",
            "us",
            f"{ITEMS:,} items, 64 connections",
            ours=cpu_by.get("headrace"),
            peers={RAW: cpu_by[RAW]} if RAW in cpu_by else {},
            is_less_better=True,
        ),
        figure(
            "HTTP hits, one process",
            "hits/s",
            "1 item a request, 64 connections",
            ours=found.get("hits/s", {}).get("headrace"),
            goal=Goal(at_least=12_000),
            why=BOUND,
        ),
        _of_two("HTTP reads of 20 totals, two processes", "reads/s", reads_by),
        _of_two("CPU of a read of 20 totals, two processes", "us", cpu_by),
    ]


def _of_two(name: str, unit: str, values: Mapping[str, Runs]) -> Figure:
    """Two processes beside one. Without cores for both, only their CPU a read can be compared."""
    one = {"one process": values["headrace"]} if "headrace" in values else {}
    is_cpu, cores = unit == "us", len(os.sched_getaffinity(0))
    has_goal = cores >= CORES_FOR_TWO and not is_cpu
    return figure(
        name,
        unit,
        f"{ITEMS:,} items, 64 connections, nothing pinned",
        ours=values.get(TWO),
        peers=one,
        is_less_better=is_cpu,
        goal=TWO_GOAL if has_goal else None,
        why="the generator and Valkey take cores from the second process",
        not_measured=[]
        if has_goal or is_cpu
        else [f"goal {TWO_GOAL.text(unit)}: needs {CORES_FOR_TWO} cores"],
    )


async def _most_of_two(run: Run) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    async with run.cell() as cell, _viewed(cell) as (app, totals):
        token = await make_token(app)
        async with our_api(cell, token, HEADRACE_WEB_PROCESSES="2") as api:
            kinds = [{"name": "read", "requests": reads(totals, checked=True)}]
            found, cpu = await load(cell, api, kinds, loop="closed", seconds=run.sized(6, 3))
            rate = found["read"]["rate_per_s"]
            return {"reads/s": rate, "us a read": cpu / rate * 1e6}


async def _most(run: Run, *, is_ours: bool) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    async with run.cell() as cell, _viewed(cell) as (app, totals):
        token = await make_token(app)
        serving = our_api(cell, token) if is_ours else raw_api(cell, token)
        async with serving as api:
            pin(api.child.pid, 0)
            with on_core(run.engines.valkey_pid, 1):
                seconds = run.sized(6, 3)
                kinds = [{"name": "read", "requests": reads(totals, checked=True)}]
                found, cpu = await load(cell, api, kinds, loop="closed", seconds=seconds, core=1)
                rate = found["read"]["rate_per_s"]
                values = {"reads/s": rate, "us a read": cpu / rate * 1e6}
                if is_ours:
                    values |= await _most_hits(cell, api, app, list(totals), seconds)
    return values


async def _most_hits(
    cell: Cell, api: Api, app: Headrace, items: list[str], seconds: float
) -> Mapping[str, float]:
    before = await _sum(app, items)
    kinds = [{"name": "hit", "requests": hits(items)}]
    found, cpu = await load(cell, api, kinds, loop="closed", seconds=seconds, core=1)
    counted = await _sum(app, items) - before
    # The last request of each connection is under way when the generator ends.
    if not found["hit"]["done"] <= counted <= found["hit"]["sent"]:
        raise SystemExit(f"{found['hit']} hits, {counted} counted")
    rate = found["hit"]["rate_per_s"]
    return {"hits/s": rate, "us a hit": cpu / rate * 1e6}


async def _sum(app: Headrace, items: list[str]) -> int:
    total = 0
    for start in range(0, len(items), 1_000):
        totals = await app.views.totals(items[start : start + 1_000])
        total += sum(one.total or 0 for one in totals)
    return total


async def measure_wait(run: Run) -> list[Figure]:
    """The open loop, without and with an analyst."""
    found = await run.alternate(
        {"plain": lambda: _wait(run, scans=False), "scan": lambda: _wait(run, scans=True)}
    )
    size = f"{READS_PER_S:,} reads/s of {PER_READ} + {HITS_PER_S} hits/s, open loop"
    goals = {
        "plain": {"p50": None, "p99": Goal(at_most=3), "p99.9": Goal(at_most=20)},
        "scan": {"p50": None, "p99": Goal(at_most=10), "p99.9": None},
    }
    rows = [
        figure(
            f"HTTP {kind} {share}{beside}",
            "ms",
            size,
            why="generator, API, flusher and engines share the cores and wait for each other",
            ours=found.get(f"{kind} {share}", {}).get(way),
            goal=goal,
        )
        for way, beside in (("plain", ""), ("scan", ", while all series are read"))
        for kind in ("read", "hit")
        for share, goal in goals[way].items()
    ]
    cpu = found.get("cpu %", {})
    rows.append(
        figure(
            "CPU of API and flusher",
            "% of a core",
            size,
            why="a read that comes alone costs twice one of 64 at once; the flusher uses 3 %",
            ours=cpu.get("plain"),
            goal=Goal(at_most=55),
        )
    )
    lag = found.get("lag p99 s", {})
    rows.append(
        figure(
            "age of what series do not show yet, p99",
            "s",
            size,
            ours=lag.get("plain"),
            goal=Goal(at_most=3),
        )
    )
    return rows


async def _wait(run: Run, *, scans: bool) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    async with run.cell() as cell, _viewed(cell) as (app, totals):
        token, items = await make_token(app), list(totals)
        if scans:
            await app.engines.postgres.run(MONTHS)
            await app.engines.postgres.run(
                HISTORY, items=run.sized(2_000, 500), hours=HISTORY_HOURS
            )
        async with flusher(cell) as carrier, our_api(cell, token) as api:
            await wait_flushed(app, carrier)
            kinds = [
                {
                    "name": "read",
                    "rate_per_s": READS_PER_S,
                    "requests": reads(totals, checked=False),
                },
                {"name": "hit", "rate_per_s": HITS_PER_S, "requests": hits(items)},
            ]
            before_s, beside = cpu_of(carrier.pid), _Beside(app, scans=scans)
            watching, seconds = asyncio.create_task(beside.run()), run.sized(20, 6)
            try:
                found, cpu = await load(cell, api, kinds, loop="open", seconds=seconds)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            flush_cpu = (cpu_of(carrier.pid) - before_s) / (seconds + 1)
    values = {
        f"{kind} {share}": found[kind][share] for kind in found for share in ("p50", "p99", "p99.9")
    }
    values["cpu %"] = (cpu + flush_cpu) * 100
    return values | beside.lag()


class _Beside:
    """What happens beside the load: the lag is looked at.

    An analyst reads everything, again and again.
    """

    def __init__(self, app: Headrace, *, scans: bool) -> None:
        self._app, self._scans = app, scans
        self._lags: list[float] = []
        self.scans_done = 0

    async def run(self) -> None:
        """Until cancelled."""
        scanning = asyncio.create_task(self._scan()) if self._scans else None
        try:
            while True:
                require_not_cancelled()
                await asyncio.sleep(0.1)
                self._lags.append(
                    max(row.oldest_s for row in await self._app.views.analytics.lag())
                )
        finally:
            if scanning is not None:
                scanning.cancel()

    async def _scan(self) -> None:
        while True:
            require_not_cancelled()
            async with self._app.engines.postgres.session() as session:
                await session.allow_long_statements(60)
                await session.all(SCAN)
                self.scans_done += 1

    def lag(self) -> Mapping[str, float]:
        """The lag's 99 of 100, and how many scans there were."""
        ordered = sorted(self._lags) or [0.0]
        lag = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return {"lag p99 s": lag} | ({"scans": float(self.scans_done)} if self._scans else {})


@asynccontextmanager
async def _viewed(cell: Cell) -> AsyncIterator[tuple[Headrace, dict[str, int]]]:
    app = open_views(cell)
    try:
        yield app, await view_items(app)
    finally:
        await app.close()
