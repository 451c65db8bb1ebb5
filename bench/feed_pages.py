"""How long does a page take, by follows and depth, and how much memory does the index need?

All systems read the same index in turns, one call at a time, and each answer is compared with the
brute-force page. The systems are the merge of every followed author in the app, the same merge in a
Lua script, and, as the limit of any index, columns in the memory of this process.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.children import BenchFault, cpu_of
from bench.feed_build import Built, build
from bench.feed_stage import AUTHORS, FOLLOWS, PER_PAGE, World, make_world, open_app
from bench.figures import Figure, Goal, Runs, figure, percentile
from bench.harness import PAIRS, Run
from bench.peers.feed_merges import Merges
from headrace import Headrace

APP, LUA, COLUMNS = "merge in the app", "Lua merge of every author", "columns in process"
SHAPES = ("uniform", "zipf")
PEER_VIEWERS = 5
FULL_POSTS = 1_000_000
ReadPage = Callable[[int], Awaitable[list[str]]]
Values = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Size:
    """How large a world is."""

    posts: int
    authors: int
    crowd: int
    """Follows of each kind of viewer that are only there."""
    viewers: int = 20
    peer_rounds: int = PAIRS
    """Rounds that include the merges: the last of them takes a second a page."""
    proved: int | None = None
    """So many authors and viewers are proved; None: all."""


async def measure_pages(run: Run) -> list[Figure]:
    """Both shapes."""
    small = Size(100_000, AUTHORS, 20_000, viewers=5)
    size = small if run.quick else Size(1_000_000, AUTHORS, 400_000)
    return [row for shape in SHAPES for row in await measure_shape(run, shape, size)]


def measure_large(shape: str) -> Callable[[Run], Awaitable[list[Figure]]]:
    """One shape, ten times as many; a quick run has the small world of `pages` alone."""
    size = Size(10_000_000, 100_000, 400_000, peer_rounds=1, proved=10_000)

    async def measure(run: Run) -> list[Figure]:
        if run.quick:
            run.leave_out(f"{size.posts:,} posts, {shape}")
            return []
        return await measure_shape(run, shape, size)

    return measure


async def measure_shape(run: Run, shape: str, size: Size) -> list[Figure]:
    world = make_world(
        shape, posts=size.posts, viewers=size.viewers, authors=size.authors, crowd=size.crowd
    )
    values: Values = {}
    await run.engines.clear_valkey()
    merges = Merges(run.engines.endpoints.valkey_url, "headrace:{f:0}:")
    async with run.cell() as cell:
        app = open_app(cell)
        try:
            built = await build(cell, app, merges, world, sample=size.proved)
            print(f"  {shape}: {built}", flush=True)
            for number in range(run.pairs):
                for follows in FOLLOWS:
                    await _round(run, app, world, follows=follows, values=values)
                    if number < size.peer_rounds:
                        await _peer_round(merges, world, follows=follows, values=values)
                print(f"  {number + 1}/{run.pairs} {shape}: {_text_of(values)}", flush=True)
        finally:
            await app.close()
            await merges.close()
            await run.engines.clear_valkey()
    return [*_figures(values, shape, size.posts, _deep(run)), *_built_figures(built, shape, size)]


async def _round(run: Run, app: Headrace, world: World, *, follows: int, values: Values) -> None:
    """Ours for all viewers of so many follows, again and again, since it is fast."""
    viewers = world.viewers[follows]
    skip = _deep(run)
    feed, places = app.feed, await _deep_places(app, viewers, skip)

    async def first(viewer: int) -> list[str]:
        return [post.id for post in (await feed.page(viewer, PER_PAGE)).posts]

    async def deep(viewer: int) -> list[str]:
        page = await feed.page(viewer, PER_PAGE, cursor=places[viewer])
        return [post.id for post in page.posts]

    repeats = run.sized(25, 20)
    pid = run.engines.valkey_pid
    began_s = cpu_of(pid)
    waits = await _timed(world, viewers * repeats, first)
    spent_us = (cpu_of(pid) - began_s) / (len(viewers) * repeats) * 1e6
    _note(values, f"{follows} first", "headrace", waits)
    values.setdefault(f"{follows} server us", {}).setdefault("headrace", []).append(spent_us)
    _note(values, f"{follows} deep", "headrace", await _timed(world, viewers * repeats, deep, skip))


async def _peer_round(merges: Merges, world: World, *, follows: int, values: Values) -> None:
    """The merges and the limit, once."""
    viewers = world.viewers[follows]
    listed = {viewer: world.authors_of(viewer) for viewer in viewers}

    async def in_app(viewer: int) -> list[str]:
        return await merges.in_app(listed[viewer], PER_PAGE)

    async def in_lua(viewer: int) -> list[str]:
        return await merges.in_lua(viewer, PER_PAGE)

    # Both merges take up to seconds at 5,000 follows.
    fewer = viewers[:PEER_VIEWERS] * max(1, 1_000 // follows)
    _note(values, f"{follows} first", APP, await _timed(world, fewer, in_app))
    _note(values, f"{follows} first", LUA, await _timed(world, fewer, in_lua))
    _note(values, f"{follows} first", COLUMNS, _columns(world, viewers))


async def _timed(world: World, viewers: list[int], read: ReadPage, skip: int = 0) -> list[float]:
    """Milliseconds of each call. Raises: BenchFault, where a page is not the brute-force one."""
    expected = {viewer: world.page_of(viewer, skip) for viewer in set(viewers)}
    for viewer in expected:
        await read(viewer)
    waits = []
    for viewer in viewers:
        began_s = time.perf_counter()
        found = await read(viewer)
        waits.append((time.perf_counter() - began_s) * 1000)
        if found != expected[viewer]:
            raise BenchFault(
                f"viewer {viewer} after {skip}: {found[:3]}, not {expected[viewer][:3]}"
            )
    return waits


def _columns(world: World, viewers: list[int]) -> list[float]:
    """The limit: the newest posts' authors in a column, and which of them a viewer follows."""
    waits = []
    for viewer in viewers * 5:
        mask = world.mask_of(viewer)
        began_s = time.perf_counter()
        world.ids_of(world.newest(mask, PER_PAGE))
        waits.append((time.perf_counter() - began_s) * 1000)
    return waits


def _deep(run: Run) -> int:
    return run.sized(1_000, 200)


async def _deep_places(app: Headrace, viewers: list[int], skip: int) -> dict[int, str]:
    found = {}
    for viewer in viewers:
        cursor = None
        for _ in range(skip // 200):
            cursor = (await app.feed.page(viewer, 200, cursor=cursor)).next
        assert cursor is not None, "the feed ends before the deep page"
        found[viewer] = cursor
    return found


def _note(values: Values, metric: str, system: str, waits: list[float]) -> None:
    values.setdefault(f"{metric} p50", {}).setdefault(system, []).append(percentile(waits, 0.5))
    values.setdefault(f"{metric} p99", {}).setdefault(system, []).append(percentile(waits, 0.99))


def _text_of(values: Values) -> str:
    return ", ".join(
        f"{metric} {row['headrace'][-1]:.3g}" for metric, row in values.items() if "p50" in metric
    )


def _figures(values: Values, shape: str, posts: int, skip: int) -> list[Figure]:
    rows = []
    for follows in FOLLOWS:
        size = f"{follows:,} follows, {shape}, {posts:,} posts"
        for where in ("first", "deep"):
            for share, goal in (("p50", Goal(at_most=1.0)), ("p99", Goal(at_most=3.0))):
                by = {n: Runs(tuple(v)) for n, v in values[f"{follows} {where} {share}"].items()}
                limit = {COLUMNS: by[COLUMNS].median} if COLUMNS in by else {}
                name = "page of 20" if where == "first" else f"page of 20 after {skip:,} posts"
                rows.append(
                    figure(
                        f"{name}, {share}",
                        "ms",
                        size,
                        ours=by["headrace"],
                        limit=limit,
                        peers={peer: by[peer] for peer in (APP, LUA) if peer in by},
                        goal=goal,
                        why="the caller waits for a core; Valkey's own time is in `crowded`",
                        is_less_better=True,
                    )
                )
        spent = values[f"{follows} server us"]["headrace"]
        name = "CPU of Valkey of a page of 20"
        rows.append(figure(name, "us", size, ours=Runs(tuple(spent))))
    return [*rows, *_times(values, shape, posts)]


def _times(values: Values, shape: str, posts: int) -> list[Figure]:
    """How many times faster than the merges at 5,000 follows."""
    by, rows = values["5000 first p50"], []
    for peer, times in ((APP, 100), (LUA, 20)):
        pairs = zip(by[peer], by["headrace"], strict=False)
        ratios = Runs(tuple(theirs / ours for theirs, ours in pairs))
        rows.append(
            figure(
                f"times faster than the {peer}",
                "x",
                f"5,000 follows, {shape}, {posts:,} posts",
                ours=ratios,
                goal=Goal(at_least=times),
            )
        )
    return rows


def _built_figures(built: Built, shape: str, size: Size) -> list[Figure]:
    of = f"{size.posts:,} posts of {size.authors:,} authors, {shape}"
    # With few posts, the key of an author takes more than the posts.
    is_full = size.posts >= FULL_POSTS
    proved = "all of it" if size.proved is None else f"{size.proved:,} of its authors"

    def row(name: str, unit: str, value: float, goal: float | None = None) -> Figure:
        return figure(
            name,
            unit,
            of,
            ours=Runs((value,)),
            is_less_better=True,
            goal=Goal(at_most=goal) if goal is not None and is_full else None,
        )

    return [
        row("memory of a post in Valkey, ids of 20", "B", built.post_bytes, 60),
        row("memory of a follow in Valkey", "B", built.follow_bytes, 10),
        row("rebuild as a job", "s", built.seconds),
        row("memory of its process", "MiB", built.memory_mib),
        row("longest wait of another caller of Valkey meanwhile", "ms", built.stall_ms),
        row(f"proof of {proved}: 0 differ", "s", built.proved_s),
    ]
