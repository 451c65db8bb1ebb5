"""How many pages does one API process serve over HTTP, and what do immediately visible writes cost?

Pages: a closed loop with 64 connections; the server has one core, generator and Valkey share the
other. Latency: an open loop at half of the required rate, with no process pinned. On one core with
Valkey, which needs half of it, the generator would wait for CPU time and record that as latency of
the server. Writes: one client, which reads the next page after each write.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping

import httpx

from bench.children import BenchFault
from bench.feed_stage import PER_PAGE, World, make_world, staged
from bench.figures import Figure, Goal, Runs, figure, percentile
from bench.harness import Run
from bench.systems import Cell
from bench.views_stage import Api, load, on_core, our_api
from headrace import Headrace

FOLLOWS = 1_000
MANY = 5_000
PAGES_PER_S = 1_500


async def measure_http(run: Run) -> list[Figure]:
    """One saturated process."""
    found = await run.alternate({"headrace": lambda: _http(run)})
    size = f"{FOLLOWS:,} follows, 64 connections"
    waited = f"{FOLLOWS:,} follows, open loop of {PAGES_PER_S:,} pages/s"

    def of(metric: str) -> Runs | None:
        return found.get(metric, {}).get("headrace")

    return [
        figure(
            "HTTP pages of 20, one process",
            "pages/s",
            size,
            ours=of("pages/s"),
            goal=Goal(at_least=3_000),
            why="Valkey, which merges the page, shares its core with the generator",
        ),
        figure("HTTP page of 20, p50", "ms", waited, ours=of("p50")),
        figure(
            "HTTP page of 20, p99",
            "ms",
            waited,
            ours=of("p99"),
            goal=Goal(at_most=10),
            why="API, Valkey and generator share the cores and wait for each other",
        ),
        figure("CPU of a page of 20 in the API", "us", size, ours=of("us a page")),
    ]


async def _http(run: Run) -> Mapping[str, float]:
    world = make_world("uniform", posts=run.sized(200_000, 50_000), viewers=20)
    await run.engines.clear_valkey()
    async with run.cell() as cell, staged(cell, world) as app:
        token = (await app.tokens.create("bench", ("feed:read",))).text
        async with our_api(cell, token) as api:
            await _check(api, world)
            with on_core(api.child.pid, 0), on_core(run.engines.valkey_pid, 1):
                found, cpu = await _load(cell, api, world, run.sized(6, 3))
            waited, _ = await _load(cell, api, world, run.sized(6, 3), rate_per_s=PAGES_PER_S)
            await _check(api, world)
    rate = found["rate_per_s"]
    values = {"pages/s": rate, "p50": waited["p50"], "p99": waited["p99"]}
    return values | {"us a page": cpu / rate * 1e6}


async def _load(
    cell: Cell, api: Api, world: World, seconds: float, *, rate_per_s: float | None = None
) -> tuple[Mapping[str, float], float]:
    paths = [f"/v1/feed/viewers/{viewer}?limit={PER_PAGE}" for viewer in world.viewers[FOLLOWS]]
    requests = [{"method": "GET", "path": path} for path in paths]
    kinds = [{"name": "page", "requests": requests, "rate_per_s": rate_per_s}]
    if rate_per_s:
        found, cpu = await load(cell, api, kinds, loop="open", seconds=seconds)
    else:
        found, cpu = await load(cell, api, kinds, loop="closed", seconds=seconds, core=1)
    return found["page"], cpu


async def _check(api: Api, world: World) -> None:
    """Every viewer's page over HTTP is the brute-force one. Raises: BenchFault."""
    headers = {"authorization": f"Bearer {api.token}"}
    url = f"http://127.0.0.1:{api.port}/v1/feed/viewers/"
    async with httpx.AsyncClient(headers=headers) as client:
        for viewer in world.viewers[FOLLOWS]:
            page = (await client.get(f"{url}{viewer}?limit={PER_PAGE}")).json()
            if [post["id"] for post in page["posts"]] != world.page_of(viewer):
                raise BenchFault(f"viewer {viewer}: a wrong page over HTTP")


async def measure_writes(run: Run) -> list[Figure]:
    """Posts, deletions, unfollows."""
    found = await run.alternate({"headrace": lambda: _writes(run)})
    size = "one caller, each seen on the next page"
    names = {"post": None, "delete": None, "follow": None, "unfollow": None}
    rows = [
        figure(f"{name}, p50", "ms", size, ours=found.get(name, {}).get("headrace"))
        for name in names
    ]
    many = found.get("unfollow all", {}).get("headrace")
    return [
        *rows,
        figure(
            "unfollow all",
            "ms",
            f"{MANY:,} follows",
            ours=many,
            goal=Goal(at_most=20),
            why="all rows of the follows are deleted and synced in PostgreSQL before the answer",
        ),
    ]


async def _writes(run: Run) -> Mapping[str, float]:
    world = make_world("uniform", posts=run.sized(200_000, 50_000), viewers=3)
    await run.engines.clear_valkey()
    async with run.cell() as cell, staged(cell, world) as app:
        waits: dict[str, list[float]] = {}
        viewer = world.viewers[FOLLOWS][0]
        author = world.authors_of(viewer)[0]
        for number in range(run.sized(300, 50)):
            post = f"new{number}"
            await _seen(app, viewer, waits, "post", call=app.feed.post(author, post), post=post)
            await _seen(
                app, viewer, waits, "unfollow", call=app.feed.unfollow(viewer, author), post=None
            )
            await _seen(
                app, viewer, waits, "follow", call=app.feed.follow(viewer, author), post=post
            )
            await _seen(app, viewer, waits, "delete", call=app.feed.delete(post), post=None)
        for one in world.viewers[MANY]:
            await _seen(
                app, one, waits, "unfollow all", call=app.feed.follows.unfollow_all(one), post=None
            )
            if (await app.feed.page(one)).posts:
                raise BenchFault("somebody is followed still")
    return {name: percentile(row, 0.5) for name, row in waits.items()}


async def _seen(
    app: Headrace,
    viewer: int,
    waits: dict[str, list[float]],
    name: str,
    *,
    call: Awaitable[object],
    post: str | None,
) -> None:
    """Time a write and a read that has to show it.

    Raises: BenchFault if the newest post is not `post`, or is one of the new ones.
    """
    began_s = time.perf_counter()
    await call
    waits.setdefault(name, []).append((time.perf_counter() - began_s) * 1000)
    ids = [one.id for one in (await app.feed.page(viewer, 1)).posts]
    if post is not None and ids != [post]:
        raise BenchFault(f"{name}: expected {post} on the next page, got {ids}")
    if post is None and ids and ids[0].startswith("new"):
        raise BenchFault(f"{name}: {ids} is seen still")
