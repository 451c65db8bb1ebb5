"""Does a hanging host delay anybody else? Item times of fast customers, with and without 30 % of
customers whose hosts hang, a third of them already in DNS.

Two ratios have the goal. In the run to compare with, either the hosts of the same customers answer,
or these customers are absent. The first is the effect of hanging alone: catalogues of more
customers are read on the same cores, whether their hosts hang or not.

Open loop: each customer offers some new items every few seconds, whatever became of the last ones.
An item's time runs from its applied catalogue to its result. Fast hosts answer within 0.15 s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from bench.children import BenchFault, Child
from bench.fetch_plot import Chart, write_chart
from bench.fetch_site import Offered, Site, fetch_site
from bench.figures import Figure, Goal, Runs, figure, percentile
from bench.harness import READY_S, Run
from bench.origins.plan import HostPlan
from bench.origins.started import Origins, origins

ITEMS, PHOTOS = 3, 2
"""Of each offer."""
CONNECTIONS = 8
SLOTS = 0
WITH, WITHOUT = "with hanging hosts", "without"
MORE = "with as many that answer"
"""The same customers and catalogues, and no host hangs."""
GOAL = Goal(at_most=1.1)
AFTER_S = 30.0
FAST_HOST = HostPlan(low_s=0.05, high_s=0.15)


@dataclass(frozen=True)
class Shape:
    """How many customers of each kind, how long, and in which classes."""

    fast: int
    slow: int
    rounds: int
    gap_s: float
    classes: str


async def measure(run: Run) -> list[Figure]:
    """Pairs of both, and their ratio."""
    quick = Shape(14, 6, 2, 1.5, "500ms, 2s, 4s")
    shape = quick if run.quick else Shape(28, 12, 12, 3.0, "1s, 5s, 30s")
    size = f"{shape.fast} fast customers, {shape.slow} whose hosts hang, classes {shape.classes}"
    series: dict[str, list[tuple[float, float]]] = {}
    cells = {
        WITHOUT: partial(_times, run, shape, series, hanging=0),
        WITH: partial(_times, run, shape, series, hanging=shape.slow),
        MORE: partial(_times, run, shape, series, hanging=0, answering=shape.slow),
    }
    found = await run.alternate(cells, pairs=run.sized(2, 1))
    p95, p50 = found.get("p95 s", {}), found.get("p50 s", {})
    if not run.quick and series:
        _draw(series, size)
    return [
        figure(
            f"isolation: p95 item time, to that {MORE}",
            "x",
            size,
            ours=_ratios(p95, MORE),
            goal=GOAL,
            why="timeouts of hosts whose class is not known yet, and slots that the plan adds",
        ),
        figure(
            f"isolation: p95 item time, to that {WITHOUT}",
            "x",
            size,
            ours=_ratios(p95, WITHOUT),
            goal=GOAL,
            why="the catalogues of more customers are read on the same cores: compare the row"
            f" '{MORE}'",
        ),
        *(
            figure(f"item time of fast customers, {which}, {cell}", "s", size, ours=runs.get(cell))
            for which, runs in (("p50", p50), ("p95", p95))
            for cell in cells
        ),
    ]


def _ratios(p95: Mapping[str, Runs], base: str) -> Runs | None:
    """Times with hanging hosts to those of the same round in another cell."""
    if WITH not in p95 or base not in p95:
        return None
    pairs = zip(p95[WITH].values, p95[base].values, strict=False)
    return Runs(tuple(slow / fast for slow, fast in pairs))


async def _times(
    run: Run,
    shape: Shape,
    series: dict[str, list[tuple[float, float]]],
    *,
    hanging: int,
    answering: int = 0,
) -> Mapping[str, float]:
    plans = {_host(f"fast{n}"): FAST_HOST for n in range(shape.fast)}
    plans |= {_host(f"more{n}"): FAST_HOST for n in range(answering)}
    plans |= {_host(f"slow{n}"): HostPlan(is_silent=True) for n in range(shape.slow)}
    async with run.cell() as cell, origins(cell.folder / "origin", plans) as hosts:
        settings = {**hosts.settings, "HEADRACE_FETCH_CLASSES": shape.classes}
        async with fetch_site(cell, settings) as site:
            names = [f"fast{n}" for n in range(shape.fast)] + [f"slow{n}" for n in range(hanging)]
            names += [f"more{n}" for n in range(answering)]
            await site.set_customers(names, connections=CONNECTIONS)
            worker = site.work(slots=SLOTS)
            scheduler = site.schedule()
            try:
                applied = await _offer_all(site, hosts, names, shape)
                results = await _wait_results(site, worker, set(applied))
            finally:
                await worker.end()
                await scheduler.end()
    times = {key: results[key] - at_s for key, at_s in applied.items()}
    began_s = min(applied.values())
    label = WITH if hanging else MORE if answering else WITHOUT
    series[label] = sorted((applied[key] - began_s, times[key]) for key in applied)
    values = list(times.values())
    return {"p50 s": percentile(values, 0.5), "p95 s": percentile(values, 0.95)}


async def _offer_all(
    site: Site, hosts: Origins, names: list[str], shape: Shape
) -> dict[tuple[str, str], float]:
    """Offer round after round at their times; (customer, item) -> when it was applied."""
    applied: dict[tuple[str, str], float] = {}
    catalogues: dict[str, list[Offered]] = {name: [] for name in names}
    warm_up = 1
    began_s = time.monotonic() + READY_S / 10
    for number in range(shape.rounds + warm_up):
        for place, name in enumerate(names):
            due_s = began_s + (number + place / len(names)) * shape.gap_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            items = [_item(hosts, name, number, at) for at in range(ITEMS)]
            catalogues[name] += items
            await site.offer(name, catalogues[name])
            if number >= warm_up and name.startswith("fast"):
                applied |= {(name, item.item): time.time() for item in items}
    return applied


def _item(hosts: Origins, name: str, number: int, at: int) -> Offered:
    paths = [f"/{name}/{number}/{at}/{photo}.jpg" for photo in range(PHOTOS)]
    return Offered(f"i{number}-{at}", [hosts.url(_host(name), path) for path in paths])


def _host(customer: str) -> str:
    """Every third slow one hangs in DNS already."""
    is_silent = customer.startswith("slow") and int(customer[4:]) % 3 == 0
    return f"{customer}.silent.test" if is_silent else f"{customer}.test"


async def _wait_results(
    site: Site, worker: Child, expected: set[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    ends_s = time.monotonic() + AFTER_S
    while True:
        found = await site.results()
        if expected <= found.keys():
            return found
        if time.monotonic() > ends_s or not worker.is_running:
            missing = len(expected - found.keys())
            raise BenchFault(f"{missing} items of fast customers undone {worker.err[-600:]}")
        await asyncio.sleep(0.2)


def _draw(series: dict[str, list[tuple[float, float]]], size: str) -> None:
    most = max(value for rows in series.values() for _, value in rows)
    longest = max(at for rows in series.values() for at, _ in rows)
    chart = Chart("item time of fast customers, s (each item)", longest, most * 1.1)
    for place, (name, rows) in enumerate(sorted(series.items(), reverse=True)):
        chart.dots(name, rows, place)
    write_chart("fetch_isolation", f"isolation: {size}", [chart])
