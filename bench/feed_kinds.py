"""What does a page of one kind, or of a ranking, cost beside an ordinary page?

One post in 20 is a video. The pages of 20 are read through the service in turns: unfiltered, videos
only, and ordered by a handler that compares the newest 100 posts. Each page is compared with the
brute-force one.
"""

from __future__ import annotations

import time
from typing import Final

from bench.children import BenchFault
from bench.feed_stage import PER_PAGE, World, make_world, staged
from bench.figures import Figure, Goal, Runs, figure, percentile
from bench.harness import Run
from headrace import Headrace
from headrace.engines.sql import compile_query
from headrace.feed import Page

EVERY: Final = 20
WINDOW: Final = 100
KINDS: Final = {"unfiltered": None, f"one kind of {EVERY}": "video", f"ranking of {WINDOW}": None}
WHY: Final = f"a page of one kind reads {EVERY} times its posts of the unfiltered feed"
GOALS: Final = {
    f"one kind of {EVERY}": Goal(at_most=5.0),
    f"ranking of {WINDOW}": Goal(at_most=3.0),
}
MARK: Final = compile_query(
    "mark",
    "-- Make some posts videos.\nUPDATE headrace.feed_post SET kind = 'video'"
    f" WHERE hashtext(id) % {EVERY} = 0 RETURNING id",
)


async def measure_kinds(run: Run) -> list[Figure]:
    """The median page of each, by follows."""
    world = make_world("uniform", posts=run.sized(1_000_000, 100_000), viewers=5)
    rows = []
    async with run.cell() as cell, staged(cell, world) as app:
        videos = {row["id"] for row in await app.feed.postgres.all(MARK)}
        await app.feed.index.rebuild_now(clean=True)
        app.feed.pages.rankings.define("oldest", lambda _, posts: posts[::-1], newest=WINDOW)
        for follows, viewers in world.viewers.items():
            spent_ms = await _times(app, world, videos, viewers)
            for name, values in spent_ms.items():
                value = Runs((percentile(values, 0.5),))
                goal = GOALS.get(name)
                text = f"{follows:,} follows, {name}"
                rows.append(figure("a page of 20, p50", "ms", text, ours=value, goal=goal, why=WHY))
                print(f"  {text}: {value.median:.3g} ms", flush=True)
    await run.engines.clear_valkey()
    return rows


async def _times(
    app: Headrace, world: World, videos: set[str], viewers: list[int]
) -> dict[str, list[float]]:
    """Milliseconds of each page. Raises: BenchFault, where a page is wrong."""
    spent_ms: dict[str, list[float]] = {name: [] for name in KINDS}
    for viewer in viewers * 20:
        newest = world.ids_of(world.newest(world.mask_of(viewer), PER_PAGE * EVERY * 4))
        expected = [
            newest[:PER_PAGE],
            [post for post in newest if post in videos][:PER_PAGE],
            newest[:WINDOW][::-1][:PER_PAGE],
        ]
        for name, wanted in zip(KINDS, expected, strict=True):
            began_s = time.perf_counter()
            page = await _page(app, viewer, name)
            spent_ms[name].append((time.perf_counter() - began_s) * 1000)
            if [post.id for post in page.posts] != wanted:
                raise BenchFault(f"viewer {viewer}, {name}: not the brute-force page")
    return spent_ms


async def _page(app: Headrace, viewer: int, name: str) -> Page:
    kind = KINDS[name]
    rank = "oldest" if name.startswith("ranking") else None
    return await app.feed.page(viewer, PER_PAGE, kinds=kind and [kind], rank=rank)
