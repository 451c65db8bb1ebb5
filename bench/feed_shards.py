"""How do the costs of pages and posts grow with the shards?

Clusters of 1, 2 and 4 primaries, each with as many shards, get the same world. Pages are read by
many viewers in turns, and each is compared with the brute-force page. The busiest primary limits
the pages per second of a site whose servers have a core each, so its CPU time is the figure; rates
of this machine, where all servers share two cores, are not.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tests.kit.own_cluster import OwnCluster, own_cluster

from bench.children import BenchFault, cpu_of
from bench.feed_stage import (
    FIRST_AUTHOR,
    PER_PAGE,
    World,
    make_world,
    open_app_on,
    stage_follows,
    stage_posts,
)
from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from headrace import Headrace
from headrace.feed import NewPost

SHARDS = (1, 2, 4)
GOAL_TIMES = 3.5
AT_ONCE = 32
"""Callers per primary: each would serve as many pages as the one of a site with one."""


@dataclass
class Costs:
    """Costs on one cluster."""

    page_us: float
    """CPU of the busiest primary per page of all."""
    page_all_us: float
    """CPU of all primaries per page."""
    post_us: float
    """CPU of all primaries per post."""
    post_ms: float
    """Duration of a call that adds one post."""
    memory_mib: float
    """Memory of all primaries."""


async def measure_shards(run: Run) -> list[Figure]:
    """The same world on each cluster."""
    viewers = run.sized(100, 40)
    world = make_world("zipf", posts=run.sized(500_000, 100_000), viewers=viewers)
    counts = SHARDS[::2] if run.quick else SHARDS
    if run.quick:
        run.leave_out(f"{SHARDS[1]} shards")
    found: dict[int, list[Costs]] = {shards: [] for shards in counts}
    for _ in range(run.pairs):
        for shards in counts:
            costs = await _measure(run, world, shards)
            found[shards].append(costs)
            print(f"  {shards} shards: {costs}", flush=True)
    return _figures(found, f"{len(world.ids):,} posts, 100 to 5,000 follows")


async def _measure(run: Run, world: World, shards: int) -> Costs:
    async with run.cell() as cell:
        with own_cluster(cell.folder / "cluster", shards) as cluster:
            flags = {"feed.shards": str(shards)}
            app = open_app_on(cell, cluster.url, flags)
            try:
                await stage_follows(cell, world)
                await stage_posts(cell, world)
                await app.feed.index.rebuild_now(clean=True)
                memory_mib = sum(_memory_bytes(cluster)) / 2**20
                busiest_us, all_us = await _pages(run, app, cluster, world)
                post_us, post_ms = await _posts(run, app, cluster)
            finally:
                await app.close()
    return Costs(busiest_us, all_us, post_us, post_ms, memory_mib)


async def _pages(run: Run, app: Headrace, cluster: OwnCluster, world: World) -> tuple[float, float]:
    """CPU us per page: of the busiest primary, and of all."""
    viewers = [viewer for listed in world.viewers.values() for viewer in listed]
    expected = {viewer: world.page_of(viewer) for viewer in viewers}
    for viewer in viewers:
        await app.feed.page(viewer, PER_PAGE)
    began = _cpu_s(cluster)
    repeats = run.sized(50, 40)
    left = viewers * repeats

    async def read() -> None:
        while left:
            viewer = left.pop()
            page = await app.feed.page(viewer, PER_PAGE)
            if [post.id for post in page.posts] != expected[viewer] or page.is_slow:
                raise BenchFault(f"viewer {viewer}: not the brute-force page of the index")

    await asyncio.gather(*[read() for _ in range(AT_ONCE * len(cluster.primaries))])
    spent = [now - then for now, then in zip(_cpu_s(cluster), began, strict=True)]
    pages = len(viewers) * repeats
    return max(spent) / pages * 1e6, sum(spent) / pages * 1e6


async def _posts(run: Run, app: Headrace, cluster: OwnCluster) -> tuple[float, float]:
    """CPU us of all primaries per post, and ms of a call."""
    posts = run.sized(2_000, 500)
    began, began_s = _cpu_s(cluster), time.perf_counter()
    for number in range(posts):
        author = FIRST_AUTHOR + number % 1_000
        await app.feed.posts.add([NewPost(author=author, id=f"new:{number}")])
    took_ms = (time.perf_counter() - began_s) / posts * 1000
    spent = [now - then for now, then in zip(_cpu_s(cluster), began, strict=True)]
    return sum(spent) / posts * 1e6, took_ms


def _cpu_s(cluster: OwnCluster) -> list[float]:
    return [cpu_of(primary.process.pid) for primary in cluster.primaries if primary.process]


def _memory_bytes(cluster: OwnCluster) -> list[int]:
    found = []
    for primary in cluster.primaries:
        info = primary.ask("INFO", "memory")
        assert isinstance(info, bytes)
        rows = dict(row.split(b":", 1) for row in info.splitlines() if b":" in row)
        found.append(int(rows[b"used_memory_dataset"]))
    return found


def _figures(found: dict[int, list[Costs]], size: str) -> list[Figure]:
    rows = []
    for shards, costs in found.items():
        where = f"{shards} shards, {size}" if shards > 1 else f"1 shard, {size}"
        for name, unit, values in (
            ("CPU of the busiest primary per page", "us", [one.page_us for one in costs]),
            ("CPU of all primaries per page", "us", [one.page_all_us for one in costs]),
            ("CPU of all primaries per post", "us", [one.post_us for one in costs]),
            ("a post, mean", "ms", [one.post_ms for one in costs]),
            ("memory of all primaries", "MiB", [one.memory_mib for one in costs]),
        ):
            rows.append(figure(name, unit, where, ours=Runs(tuple(values))))
    times = tuple(
        one.page_us / many.page_us
        for one, many in zip(found[SHARDS[0]], found[SHARDS[-1]], strict=True)
    )
    goal = Goal(at_least=GOAL_TIMES)
    name = "times less CPU of the busiest primary per page"
    where = f"{SHARDS[-1]} shards, {size}"
    why = "viewers are spread by hash, so the busiest primary has more than its share"
    rows.append(figure(name, "x", where, ours=Runs(times), goal=goal, why=why))
    return rows
