"""What do hits of items without a cached total cost? 2 % of the hits are such.

A total that is not cached is filled from PostgreSQL, plus the hits that wait for their flush, of
which Valkey has notes. The flusher runs, as on a site.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import count

from bench.children import cpu_of
from bench.figures import Figure, figure
from bench.harness import Run
from bench.systems import OURS
from bench.views_stage import flusher, open_views

CALLERS = 32
CACHED = 1_000
NEW_SHARE = 0.02
SIZES = (1, 20)
"""Hits a call."""


async def measure_cold(run: Run) -> list[Figure]:
    """Hits a second and CPU of Valkey, with and without new items."""
    found = await run.alternate({OURS.name: lambda: _cell(run)})
    figures = []
    for size in SIZES:
        for share in (0.0, NEW_SHARE):
            text = f"{size} a call, {CALLERS} at once, {share:.0%} on new items"
            for name, unit in (("hits beside a flusher", "hits/s"), ("CPU of Valkey, a hit", "us")):
                ours = found.get(f"{unit} {size} {share}", {}).get(OURS.name)
                figures.append(figure(name, unit, text, ours=ours))
    return figures


async def _cell(run: Run) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    values: dict[str, float] = {}
    async with run.cell() as cell, flusher(cell):
        app = open_views(cell)
        try:
            cached = [f"item:{n}" for n in range(CACHED)]
            await app.views.hits(cached)
            numbers = count()

            def next_item(share: float) -> str:
                number = next(numbers)
                is_new = number % CACHED < share * CACHED
                return f"new:{number}" if is_new else cached[number % CACHED]

            async def caller(ends_s: float, size: int, share: float) -> int:
                hits = 0
                while time.monotonic() < ends_s:
                    await app.views.hits([next_item(share) for _ in range(size)])
                    hits += size
                return hits

            for size in SIZES:
                for share in (0.0, NEW_SHARE):
                    before_s, began_s = cpu_of(run.engines.valkey_pid), time.monotonic()
                    ends_s = began_s + run.sized(5, 2)
                    callers = [caller(ends_s, size, share) for _ in range(CALLERS)]
                    hits = sum(await asyncio.gather(*callers))
                    used_s = cpu_of(run.engines.valkey_pid) - before_s
                    values[f"hits/s {size} {share}"] = hits / (time.monotonic() - began_s)
                    values[f"us {size} {share}"] = used_s / hits * 1e6
        finally:
            await app.close()
    return values
