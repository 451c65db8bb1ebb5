"""How fast are jobs enqueued: by call size, and into lanes, whose counts are kept beside the jobs?

One connection, one process, 100 B payload. Enqueue without lanes, beside the peers, is in
`jobs_drain.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from bench.figures import Figure, Goal, figure
from bench.harness import Run, produce
from bench.limits import CELL, COMMITS, COPY, limit_in, limits_cell
from bench.systems import OURS

LANED_SINGLE_PER_S = 2_000
LANED_BULK_PER_S = 80_000


async def measure(run: Run) -> list[Figure]:
    """100 a call without lanes; one and 1,000 a call into few and many lanes."""
    lanes = (10_000,) if run.quick else (100, 10_000, 100_000)
    cells: dict[str, Callable[[], Awaitable[Mapping[str, float]]]] = {
        CELL: partial(limits_cell, run),
        "100 a call": partial(_calls_of_100, run),
    }
    cells |= {f"{count:,} lanes": partial(_laned, run, count) for count in lanes}
    found = await run.alternate(cells)
    goals = {"single": Goal(at_least=LANED_SINGLE_PER_S), "bulk": Goal(at_least=LANED_BULK_PER_S)}
    names = {
        "single": "enqueue into lanes, one a call",
        "bulk": "enqueue into lanes, 1,000 a call",
    }
    limit = {
        "single": limit_in(found, COMMITS),
        "bulk": limit_in(found, COPY),
    }
    figures = [
        figure(
            names[metric],
            "jobs/s",
            f"{count:,} lanes",
            ours=found.get(metric, {}).get(f"{count:,} lanes"),
            goal=goals[metric],
            limit=limit[metric],
        )
        for metric in names
        for count in lanes
    ]
    hundred = found.get("hundred", {}).get("100 a call")
    return [
        figure("enqueue, 100 a call", "jobs/s", "20,000 jobs", ours=hundred, limit=limit["bulk"]),
        *figures,
    ]


async def _calls_of_100(run: Run) -> Mapping[str, float]:
    async with run.cell(OURS) as cell:
        cell.env = {"BENCH_BULK": "100"}
        return {"hundred": (await produce(cell, "bulk", 20_000)).rate_per_s}


async def _laned(run: Run, lanes: int) -> Mapping[str, float]:
    async with run.cell(OURS) as cell:
        cell.env = {"BENCH_QUEUE": "noop_lanes", "BENCH_LANES": str(lanes)}
        single = await produce(cell, "single", run.sized(4_000, 1_000))
        bulk = await produce(cell, "bulk", run.sized(100_000, 30_000))
        return {"single": single.rate_per_s, "bulk": bulk.rate_per_s}
