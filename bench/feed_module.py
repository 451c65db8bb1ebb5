"""How long does a page take beside ZREVMERGE, the C module behind the idea of merges inside Valkey?

FEED_MODULE is the path of a built module, which is loaded into the Valkey of the run; without it
nothing is measured. Both systems read the same index in turns, one call at a time. The module uses
its own order for posts of the same millisecond, so its pages that differ from the brute-force page
are counted, not refused.
"""

from __future__ import annotations

import time

from bench.children import BenchFault
from bench.engines import FEED_MODULE
from bench.feed_stage import FOLLOWS, PER_PAGE, World, make_world, staged
from bench.figures import Figure, Goal, Runs, figure, percentile
from bench.harness import Run
from bench.peers.feed_merges import Merges
from headrace import Headrace

MODULE = "ZREVMERGE in C"
POSTS, AUTHORS, VIEWERS = 360_000, 12_000, 10
TIMES = 20
"""How many times faster a page for the most follows is to be."""


async def measure_module(run: Run) -> list[Figure]:
    """First pages for all numbers of follows."""
    if not FEED_MODULE:
        print("  not measured: set FEED_MODULE to the path of a built module", flush=True)
        return []
    rows = []
    merges = Merges(run.engines.endpoints.valkey_url, "headrace:{f:0}:")
    try:
        for shape in ("uniform", "zipf"):
            world = make_world(shape, posts=POSTS, viewers=VIEWERS, authors=AUTHORS)
            await run.engines.clear_valkey()
            async with run.cell() as cell, staged(cell, world) as app:
                for follows in FOLLOWS:
                    rows += await _measure(run, app, merges, world, follows=follows)
    finally:
        await merges.close()
        await run.engines.clear_valkey()
    return rows


async def _measure(
    run: Run, app: Headrace, merges: Merges, world: World, *, follows: int
) -> list[Figure]:
    ours: list[float] = []
    theirs: list[float] = []
    differ = 0
    for viewer in world.viewers[follows] * run.sized(10, 3):
        authors, expected = world.authors_of(viewer), world.page_of(viewer)
        began_s = time.perf_counter()
        page = await app.feed.page(viewer, PER_PAGE)
        ours.append((time.perf_counter() - began_s) * 1000)
        if [post.id for post in page.posts] != expected:
            raise BenchFault(f"viewer {viewer}: not the brute-force page")
        began_s = time.perf_counter()
        found = await merges.in_module(authors, PER_PAGE)
        theirs.append((time.perf_counter() - began_s) * 1000)
        differ += found != expected
    size = f"{follows:,} follows, {world.shape}, {POSTS:,} posts"
    note = f"{MODULE}: {differ} of {len(ours)} pages are not the brute-force page"
    print(f"  {size}: {percentile(ours, 0.5):.3g} ms; {note}", flush=True)
    goal = Goal(at_most=percentile(theirs, 0.5) / TIMES) if follows == max(FOLLOWS) else None
    return [
        figure(
            f"page of 20 beside the module, p{share * 100:.0f}",
            "ms",
            size,
            ours=Runs((percentile(ours, share),)),
            peers={MODULE: Runs((percentile(theirs, share),))},
            goal=goal if share == 0.5 else None,
            why="both times include the caller's wait for a core, which shortens the ratio",
            is_less_better=True,
            not_measured=[note] if differ else [],
        )
        for share in (0.5, 0.99)
    ]
