"""How long does a catalogue take of which 1 % changed, and how much memory?

A CSV with a link a row, read, judged, staged, compared and applied by the real verb in a process
of its own, on embedded durable PostgreSQL. Seconds of that process's run, its largest resident
size, and PostgreSQL's time is in the seconds. The first load makes a group of photo jobs an item;
their photos are taken for stored before the second, as if the night was over.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import asyncpg

from bench.children import BenchFault, Child
from bench.fetch_site import fetch_site
from bench.figures import Figure, Goal, figure
from bench.harness import Run
from bench.machine import ROOT
from bench.systems import OURS, Cell

SIZES = (10_000, 100_000, 1_000_000)
CUSTOMER = "shop"
CHANGED = 0.01
SECONDS_GOAL, MEMORY_GOAL = Goal(at_most=30), Goal(at_most=200)
DEADLINE_S = 900.0
FIELDS = "id,name,description,price,category,photos"
STORED = """
INSERT INTO headrace.fetch_photo (sha256, key, format, size_bytes, width, height)
    VALUES ('bench', 'bench', 'jpeg', 1, 1, 1);
INSERT INTO headrace.fetch_link (customer, url, outcome, sha256, run_id)
    SELECT DISTINCT ON (n.url) r.customer, n.url, 'stored', 'bench', r.id
    FROM headrace.fetch_need n JOIN headrace.fetch_run r ON r.id = n.run_id ORDER BY n.url;
UPDATE headrace.fetch_need SET outcome = 'stored';
UPDATE headrace.fetch_change SET published_at = now();
UPDATE headrace.fetch_run SET state = 'done', items_pending = 0, ended_at = now();
"""


async def measure(run: Run) -> list[Figure]:
    """Three sizes; a quick run takes the least."""
    figures = []
    for rows in SIZES[: run.sized(3, 1)]:
        size = f"{rows:,} items, {CHANGED:.0%} changed"
        cells = {OURS.name: partial(_diff, run, rows)}
        pairs = 1 if rows == SIZES[-1] else run.pairs
        found = await run.alternate(cells, pairs=pairs)
        is_goal = rows == SIZES[-1]
        for name, unit, key, goal in (
            ("diff of a catalogue", "s", "diff s", SECONDS_GOAL),
            ("memory of the process that reads it", "MiB", "MiB", MEMORY_GOAL),
            ("first load of a catalogue", "s", "load s", None),
        ):
            ours = found.get(key, {}).get(OURS.name)
            figures.append(figure(name, unit, size, ours=ours, goal=goal if is_goal else None))
    return figures


async def _diff(run: Run, rows: int) -> Mapping[str, float]:
    async with run.cell() as cell, fetch_site(cell, {}) as site:
        await site.set_customers([CUSTOMER])
        first, second = cell.folder / "first.csv", cell.folder / "second.csv"
        changed = await asyncio.to_thread(_write_both, first, second, rows)
        load = await _run_catalogue(cell, first)
        if load["new"] != rows:
            raise BenchFault(f"first load: {load}")
        await _store_all(cell)
        await cell.engines.settle(cell.database)
        diff = await _run_catalogue(cell, second)
        if (diff["new"], diff["changed"], diff["gone"]) != (0, changed, 0):
            raise BenchFault(f"{changed} rows changed: {diff}")
        return {"diff s": diff["seconds"], "MiB": diff["rss_mib"], "load s": load["seconds"]}


def _write_both(first: Path, second: Path, rows: int) -> int:
    """A catalogue, and the same with every hundredth price changed; how many those are."""
    chance, changed = random.Random(1), 0
    with first.open("w") as before, second.open("w") as after:
        before.write(f"{FIELDS}\n")
        after.write(f"{FIELDS}\n")
        for number in range(rows):
            words = " ".join(f"word{chance.randrange(1_000)}" for _ in range(12))
            head = f"item-{number},Item number {number},{words}"
            tail = f"category {number % 40},https://shop.example/photos/{number}.jpg\n"
            price = chance.randrange(100, 100_000)
            is_changed = number % int(1 / CHANGED) == 0
            changed += is_changed
            before.write(f"{head},{price},{tail}")
            after.write(f"{head},{price + is_changed},{tail}")
    return changed


async def _run_catalogue(cell: Cell, path: Path) -> dict[str, float]:
    words = [sys.executable, "-m", "bench.apps.run_catalogue", str(path), CUSTOMER]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": paths, "HEADRACE_POSTGRES_URL": cell.url}
    child = Child(words, folder=cell.folder, env=env, name="reads")
    try:
        return json.loads((await child.finish(DEADLINE_S)).strip().splitlines()[-1])
    finally:
        await child.end()


async def _store_all(cell: Cell) -> None:
    connection = await asyncpg.connect(cell.url)
    try:
        await connection.execute(STORED, timeout=DEADLINE_S)
    finally:
        await connection.close()
