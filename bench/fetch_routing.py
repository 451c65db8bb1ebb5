"""After learning, how many slow photos start in a class too small for them?

Hosts of the mix seen in production (40 % within 1 s, 40 % within 5 s, 20 % within 30 s, 60 to 80 %
of attempts failing), with all seconds, classes too, divided by ten. The first catalogue teaches,
the second is measured: a photo whose first request was given up although its host would have
answered it later went twice. Before there was routing, 60 % of all went twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from bench.children import BenchFault, Child
from bench.fetch_site import Offered, Site, fetch_site
from bench.figures import Figure, Goal, figure
from bench.harness import Run
from bench.origins.log import Request
from bench.origins.plan import HostPlan, seed_mix
from bench.origins.started import Origins, origins
from bench.systems import OURS

SCALE = 0.1
CLASSES = "100ms, 500ms, 3s"
LEAST_S = 0.1
"""The smallest class: who needs longer is slow."""
SLOTS = 2
ITEMS_OF_PHOTOS = 5
GOAL = Goal(at_most=5)
LEARNED_S = 5.0
"""Longest wait for the speeds to be computed again."""
RETRIES = {"HEADRACE_JOBS_RETRY_FIRST": "200ms", "HEADRACE_JOBS_RETRY_MAX": "1s"}
DEADLINE_S = 150.0


@dataclass(frozen=True)
class Shares:
    """Of slow photos, and of all: how many went more than once because of their class."""

    slow: int
    slow_twice: int


async def measure(run: Run) -> list[Figure]:
    """One run of two catalogues."""
    hosts, photos = run.sized(40, 8), run.sized(40, 6)
    size = f"{hosts} hosts x {photos} photos, seconds divided by {1 / SCALE:.0f}"
    found = await run.alternate({OURS.name: partial(_shares, run, hosts, photos)}, pairs=1)
    return [
        figure(
            f"slow photos that start in too small a class, {when}",
            "%",
            size,
            ours=found.get(key, {}).get(OURS.name),
            goal=goal,
        )
        for when, key, goal in (
            ("before learning", "before", None),
            ("after learning", "after", GOAL),
        )
    ]


async def _shares(run: Run, hosts: int, photos: int) -> Mapping[str, float]:
    plans = seed_mix(hosts, scale=SCALE)
    async with run.cell() as cell, origins(cell.folder / "origin", plans) as origin:
        settings = {**origin.settings, "HEADRACE_FETCH_CLASSES": CLASSES}
        async with fetch_site(cell, settings) as site:
            names = [f"c{n}" for n in range(hosts)]
            await site.set_customers(names)
            worker, scheduler = site.work(slots=SLOTS, **RETRIES), site.schedule()
            try:
                await _bring(site, worker, _links(origin, plans, photos, 1), 1)
                taught_s = time.monotonic()
                await asyncio.sleep(LEARNED_S)
                await _bring(site, worker, _links(origin, plans, photos, 2), 2)
            finally:
                await worker.end()
                await scheduler.end()
            await origin.end()
            log = origin.requests()
    before = judge_first_requests([r for r in log if r.arrived_s <= taught_s], plans)
    after = judge_first_requests([r for r in log if r.arrived_s > taught_s], plans)
    if not after.slow or not before.slow:
        raise BenchFault(f"{len(log)} requests and no slow photo among them")
    failed = sum(request.status != 200 for request in log) / len(log)
    print(f"  {len(log):,} requests, {failed:.0%} failed; before {before}, after {after}")
    return {
        "before": 100 * before.slow_twice / before.slow,
        "after": 100 * after.slow_twice / after.slow,
    }


def _links(
    origin: Origins, plans: Mapping[str, HostPlan], photos: int, number: int
) -> dict[str, list[str]]:
    """A customer a host, and photos of it that no other catalogue names."""
    return {
        f"c{at}": [origin.url(host, f"/{number}/{photo}.jpg") for photo in range(photos)]
        for at, host in enumerate(plans)
    }


async def _bring(site: Site, worker: Child, links: Mapping[str, list[str]], number: int) -> None:
    """Offer these links, by customer, and wait until all photos are decided."""
    for customer, urls in links.items():
        rows = [
            Offered(f"i{number}-{n}", urls[n : n + ITEMS_OF_PHOTOS])
            for n in range(0, len(urls), ITEMS_OF_PHOTOS)
        ]
        await site.offer(customer, rows)
    ends_s = time.monotonic() + DEADLINE_S
    while await site.pending():
        if time.monotonic() > ends_s or not worker.is_running:
            raise BenchFault(f"catalogue {number}: {await site.decided()} {worker.err[-600:]}")
        await asyncio.sleep(0.1)


def judge_first_requests(log: Iterable[Request], plans: Mapping[str, HostPlan]) -> Shares:
    """Look at the first request of each path.

    Was it given up before the host would have answered?
    """
    seen: set[tuple[str, str]] = set()
    slow = twice = 0
    for request in log:
        key = (request.host, request.path)
        if key in seen:
            continue
        seen.add(key)
        _status, wait_s = plans[request.host].answer(request.host, request.path, 0)
        if wait_s > LEAST_S:
            slow += 1
            twice += request.status == 0 and request.held_us / 1e6 < wait_s
    return Shares(slow, twice)
