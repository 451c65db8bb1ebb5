"""Do limits hold in the sellers' own logs, and is the allowed rate used, also while slots, agents
and schedulers die; and is there a burst after a jam?

Judged by the origin's access log alone: a window begins with each request, retries and redirects
count, and the share is of whole windows watched. The jam: a host answers nothing for a while, then
everything again; its requests a second go into a chart.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tests.kit.processes import descendants

from bench.children import BenchFault, Child, send_signal, wait_for
from bench.fetch_plot import Chart, write_chart
from bench.fetch_site import Offered, Site, fetch_site
from bench.figures import Figure, Goal, figure
from bench.harness import READY_S, Run
from bench.jobs_lanes import SHORT_LEASE, WHY_KILLED, WHY_LATE
from bench.origins.log import by_host, judge, per_second
from bench.origins.plan import HostPlan
from bench.origins.started import Origins, origins
from bench.systems import OURS

STARTS_MAX = 20
CUSTOMERS, CUSTOMERS_QUICK = 100, 20
CONNECTIONS = 8
WORKERS = SLOTS = 2
PHOTOS_OF_ITEM = 5
PAUSE_S = (2.0, 5.0)
"""Between two kills."""
HOST = HostPlan(low_s=0.01, high_s=0.3, failing=0.15, redirecting=0.1)
SHARE_GOAL, OVER_GOAL, BURST_GOAL = Goal(at_least=95), Goal(at_most=0), Goal(at_most=100)


@dataclass(frozen=True)
class Shape:
    """How many customers, the window of each, and how many whole ones are watched."""

    customers: int
    window_s: float
    windows: int

    @property
    def seconds(self) -> float:
        """Watched after the first request: half a window more, in which lanes settle."""
        return self.window_s * (self.windows + 0.5)


async def measure(run: Run) -> list[Figure]:
    """Undisturbed, disturbed (not in a quick run), and the jam."""
    customers = run.sized(CUSTOMERS, CUSTOMERS_QUICK)
    shape = Shape(customers, 5.0, 1) if run.quick else Shape(customers, 20.0, 4)
    size = f"{customers} customers x {STARTS_MAX} in {shape.window_s:.0f} s"
    figures: list[Figure] = []
    for name, is_disturbed in (("", False), (", slots, agents and schedulers killed", True)):
        missing = ["left out of a quick run"] if run.quick and is_disturbed else []
        cells = {OURS.name: partial(_requests, run, shape, is_disturbed=is_disturbed)}
        found = await run.alternate({} if missing else cells, pairs=1)
        figures += [
            figure(
                f"share of the allowed rate used, by the sellers' logs{name}",
                "%",
                size,
                ours=found.get("share", {}).get(OURS.name),
                goal=None if missing else SHARE_GOAL,
                why=WHY_KILLED if is_disturbed else WHY_LATE,
                not_measured=missing,
            ),
            figure(
                f"windows over the limit in the sellers' logs{name}",
                "windows",
                size,
                ours=found.get("over", {}).get(OURS.name),
                goal=None if missing else OVER_GOAL,
                not_measured=missing,
            ),
        ]
    return [*figures, *await _jam_figures(run)]


async def _requests(run: Run, shape: Shape, *, is_disturbed: bool) -> Mapping[str, float]:
    plans = {f"c{n}.test": HOST for n in range(shape.customers)}
    settings = SHORT_LEASE if is_disturbed else {}
    async with (
        run.cell() as cell,
        origins(cell.folder / "origin", plans) as hosts,
        fetch_site(cell, hosts.settings) as site,
    ):
        await _fill(site, hosts, shape)
        await cell.engines.settle(cell.database)
        fleet = Fleet(site, settings)
        try:
            await wait_for(hosts.requests, "a request", READY_S, fleet.agents[0])
            ends_s = time.monotonic() + shape.seconds
            if is_disturbed:
                await fleet.suffer_until(ends_s)
            else:
                await asyncio.sleep(ends_s - time.monotonic())
            ended_s = time.monotonic()
        finally:
            await fleet.end()
        await hosts.end()
        log = hosts.requests()
        left = await site.pending()
    if not left:
        raise BenchFault("all photos were decided before the end: the share has no meaning")
    judged = judge(
        by_host(log),
        starts_max=STARTS_MAX,
        window_s=shape.window_s,
        from_s=ended_s - shape.windows * shape.window_s,
        until_s=ended_s,
    )
    print(
        f"  {len(log):,} requests, {judged.checked:,} windows, {judged.over} over,"
        f" least span {judged.least_s:.3f} s"
    )
    return {"share": judged.share * 100, "over": float(judged.over)}


async def _fill(site: Site, hosts: Origins, shape: Shape) -> None:
    """More photos than may be requested in the time."""
    names = [f"c{n}" for n in range(shape.customers)]
    await site.set_customers(
        names, starts_max=STARTS_MAX, window_s=shape.window_s, connections=CONNECTIONS
    )
    items = STARTS_MAX * (shape.windows + 3) // PHOTOS_OF_ITEM
    for name in names:
        await site.offer(
            name,
            [
                Offered(
                    f"i{item}",
                    [hosts.url(f"{name}.test", f"/{item}/{n}.jpg") for n in range(PHOTOS_OF_ITEM)],
                )
                for item in range(items)
            ],
        )


class Fleet:
    """Agents and a scheduler that are started again when they die."""

    def __init__(self, site: Site, settings: dict[str, str]) -> None:
        self._site, self._settings = site, settings
        self.agents = [self._agent() for _ in range(WORKERS)]
        self._scheduler = site.schedule(**settings)

    async def suffer_until(self, ends_s: float) -> None:
        """A slot, an agent with all below it, or the scheduler is killed, every few seconds."""
        chance = random.Random(11)
        while time.monotonic() < ends_s:
            await asyncio.sleep(min(chance.uniform(*PAUSE_S), max(0.0, ends_s - time.monotonic())))
            at = chance.randrange(len(self.agents))
            below = descendants(self.agents[at].pid)
            match chance.choice(("slot", "slot", "agent", "scheduler")):
                case "slot" if below:
                    send_signal(below[-1])
                case "scheduler":
                    send_signal(self._scheduler.pid)
                    await self._scheduler.end()
                    self._scheduler = self._site.schedule(**self._settings)
                case _:
                    for pid in [self.agents[at].pid, *below]:
                        send_signal(pid)
                    await self.agents[at].end()
                    self.agents[at] = self._agent()

    async def end(self) -> None:
        """Stop all."""
        for child in [*self.agents, self._scheduler]:
            await child.end()

    def _agent(self) -> Child:
        return self._site.work(slots=SLOTS, **self._settings)


@dataclass(frozen=True)
class Jam:
    """A host with this limit answers nothing from `from_s` to `to_s` after its first request."""

    starts_max: int
    window_s: float
    from_s: float
    to_s: float
    ends_s: float


async def _jam_figures(run: Run) -> list[Figure]:
    jam = Jam(20, 2.0, 1.5, 4.0, 9.0) if run.quick else Jam(100, 10.0, 15.0, 40.0, 80.0)
    size = f"{jam.starts_max} in {jam.window_s:g} s, jammed for {jam.to_s - jam.from_s:g} s"
    found = await run.alternate({OURS.name: partial(_jammed, run, jam)}, pairs=1)
    return [
        figure(
            "most requests in a window through and after a jam, to those allowed",
            "%",
            size,
            ours=found.get("most", {}).get(OURS.name),
            goal=BURST_GOAL,
        ),
        figure(
            "share of the allowed rate used after a jam",
            "%",
            size,
            ours=found.get("share", {}).get(OURS.name),
        ),
    ]


async def _jammed(run: Run, jam: Jam) -> Mapping[str, float]:
    plans = {name: HostPlan(low_s=0.02, high_s=0.1) for name in ("jammed.test", "free.test")}
    async with (
        run.cell() as cell,
        origins(cell.folder / "origin", plans) as hosts,
        fetch_site(cell, hosts.settings) as site,
    ):
        names = ["jammed", "free"]
        await site.set_customers(
            names, starts_max=jam.starts_max, window_s=jam.window_s, connections=CONNECTIONS
        )
        photos = int(jam.starts_max / jam.window_s * jam.ends_s * 1.3)
        for name in names:
            urls = [hosts.url(f"{name}.test", f"/{n}.jpg") for n in range(photos)]
            rows = [Offered(f"i{n}", urls[n : n + 5]) for n in range(0, photos, 5)]
            await site.offer(name, rows)
        worker, scheduler = site.work(slots=SLOTS), site.schedule()
        try:
            began = await wait_for(hosts.requests, "a request", READY_S, worker)
            began_s = began[0].arrived_s
            await asyncio.sleep(began_s + jam.from_s - time.monotonic())
            hosts.hold(["jammed.test"])
            await asyncio.sleep(began_s + jam.to_s - time.monotonic())
            hosts.hold([])
            await asyncio.sleep(began_s + jam.ends_s - time.monotonic())
        finally:
            await worker.end()
            await scheduler.end()
        await hosts.end()
        moments = by_host(hosts.requests())
    jammed = [at for at in moments["jammed.test"] if at <= began_s + jam.ends_s]
    settled_s = began_s + jam.to_s + jam.window_s
    judged = judge(
        {"jammed.test": jammed},
        starts_max=jam.starts_max,
        window_s=jam.window_s,
        from_s=settled_s,
        until_s=began_s + jam.ends_s,
    )
    if not run.quick:
        _draw(jam, moments, began_s)
    most = most_in_window(jammed, jam.window_s)
    print(f"  jam: {len(jammed)} requests, {judged.over} windows over, most {most} in a window")
    return {"most": 100 * most / jam.starts_max, "share": 100 * judged.share}


def most_in_window(moments: list[float], window_s: float) -> int:
    """The most requests that any window of that length held."""
    most = first = 0
    for last, moment in enumerate(moments):
        while moment - moments[first] >= window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def _draw(jam: Jam, moments: dict[str, list[float]], began_s: float) -> None:
    ends_s = began_s + jam.ends_s
    counts = {
        host: per_second(own, from_s=began_s, until_s=ends_s) for host, own in moments.items()
    }
    most = max(max(own) for own in counts.values())
    charts = []
    for title, host in (("the jammed host", "jammed.test"), ("its neighbour", "free.test")):
        chart = Chart(f"requests a second at {title}, by its own log", jam.ends_s, most * 1.2)
        chart.line("requests/s", counts[host], 0)
        chart.limit("allowed on average", jam.starts_max / jam.window_s)
        if host == "jammed.test":
            chart.mark("no answers", jam.from_s, jam.to_s)
        charts.append(chart)
    title = f"a jam and its end: {jam.starts_max} requests in {jam.window_s:g} s are allowed"
    write_chart("fetch_jam", title, charts)
