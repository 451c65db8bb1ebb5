"""How long does one page hold Valkey's only thread where many posts are close together?

Each world has a viewer whose authors post at once, or who reads far down among busy authors, or who
follows one author with many posts in one millisecond; beside them an ordinary world. Pages are read
at random places, each of them REPEATS times, and every answer is compared with the brute-force
page. The time is Valkey's own (`INFO commandstats`) and of each place the least: what other
processes take away in between is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.children import BenchFault
from bench.feed_stage import (
    FIRST_VIEWER,
    PER_PAGE,
    World,
    make_world,
    staged,
    world_of,
)
from bench.figures import Figure, Goal, Runs, figure, percentile
from bench.harness import Run
from headrace import Headrace
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.feed.model import Position

PLACES, REPEATS = 200, 3
MINUTE_MS, DAY_MS = 60_000, 86_400_000
SEED = 20261122


@dataclass(frozen=True)
class Crowd:
    """A world, and the rows of its posts after which a page is read."""

    size: str
    make: Callable[[], tuple[World, int, int]]
    """The world, and the first and last of these rows."""


async def measure_crowded(run: Run) -> list[Figure]:
    """Worlds with crowded moments, and the ordinary one."""
    rows = []
    if run.quick:
        run.leave_out(*(crowd.size for crowd in CROWDS[1:3]), CROWDS[4].size)
    for crowd in (CROWDS[0], CROWDS[3]) if run.quick else CROWDS:
        world, first, last = crowd.make()
        rows += await _measure(run, world, crowd.size, (first, last))
    world = make_world("uniform", posts=run.sized(1_000_000, 100_000), viewers=5)
    return rows + await _measure(run, world, f"ordinary, {len(world.ids):,} posts", None)


async def _measure(run: Run, world: World, size: str, span: tuple[int, int] | None) -> list[Figure]:
    await run.engines.clear_valkey()
    rows = []
    async with run.cell() as cell, staged(cell, world) as app:
        for follows, viewers in world.viewers.items():
            client = Valkey(run.engines.endpoints.valkey_url, ValkeyConfig())
            try:
                spent_ms = await _times(app, client, world, viewers=viewers, span=span)
            finally:
                await client.close()
            text = size if span else f"{follows:,} follows, {size}"
            for share, goal_ms in ((0.5, 1.0), (0.99, 3.0)):
                value = Runs((percentile(spent_ms, share),))
                goal = Goal(at_most=goal_ms)
                name = f"Valkey's time of a page of 20, p{share * 100:.0f}"
                rows.append(figure(name, "ms", text, ours=value, goal=goal))
                print(f"  {text}: p{share * 100:.0f} {value.median:.3g} ms", flush=True)
    await run.engines.clear_valkey()
    return rows


async def _times(
    app: Headrace,
    client: Valkey,
    world: World,
    *,
    viewers: list[int],
    span: tuple[int, int] | None,
) -> list[float]:
    """Milliseconds of Valkey of a page at each place. Raises: BenchFault, where a page is wrong."""
    dice = np.random.default_rng(SEED)
    spent_ms = []
    for number in range(PLACES):
        viewer = viewers[number % len(viewers)]
        row = _row_of(world, viewer, number, span, dice)
        spent_ms.append(await _time_of(app, client, world, viewer=viewer, row=row))
    return spent_ms


def _row_of(
    world: World, viewer: int, number: int, span: tuple[int, int] | None, dice: np.random.Generator
) -> int | None:
    """After which post; None: the first page."""
    if span:
        return int(dice.integers(*span))
    if number < PLACES // 2:
        return None
    return world.newest(world.mask_of(viewer), int(dice.integers(50, 500)))[-1]


async def _time_of(
    app: Headrace, client: Valkey, world: World, *, viewer: int, row: int | None
) -> float:
    before = None if row is None else Position(int(world.scores[row]), world.ids[row].decode())
    after = 0 if row is None else row + 1
    rows = np.flatnonzero(world.mask_of(viewer)[world.author[after:]])[:PER_PAGE] + after
    expected = world.ids_of(rows.tolist())
    least_us = float("inf")
    for _ in range(REPEATS):
        began_us = await _spent_us(client)
        found = await app.feed.valkey.page(viewer, limit=PER_PAGE, before=before, after=None)
        least_us = min(least_us, await _spent_us(client) - began_us)
        if found is None or [post.id for post in found.posts] != expected:
            raise BenchFault(f"viewer {viewer} after row {row}: not the brute-force page")
    return least_us / 1000


async def _spent_us(client: Valkey) -> int:
    """Of functions that read, since the server was started."""
    info = await client.command("INFO", "commandstats")
    return int(info.get("cmdstat_fcall_ro", {}).get("usec", 0))


def _minute(authors: int, follows: int, posts: int) -> Callable[[], tuple[World, int, int]]:
    """All post within two minutes, an hour ago."""

    def make() -> tuple[World, int, int]:
        dice = np.random.default_rng(SEED)
        began_ms = int(time.time() * 1000) - 60 * MINUTE_MS
        ticks = dice.integers(began_ms * 2048, (began_ms + 2 * MINUTE_MS) * 2048, size=posts)
        world = world_of("crowded", authors, dice.integers(0, authors, size=posts), ticks)
        return _followed(world, dice.permutation(authors)[:follows]), 0, posts * 9 // 10

    return make


def _busy() -> tuple[World, int, int]:
    """5,000 authors with 30 posts a day; of these posts those of ten and eleven days ago."""
    authors, days = 5_000, 2
    dice = np.random.default_rng(SEED)
    posts = authors * 30 * days
    oldest_ms = int(time.time() * 1000) - (10 + days) * DAY_MS
    ms = dice.integers(oldest_ms, oldest_ms + days * DAY_MS, size=posts)
    world = world_of("busy", authors, dice.integers(0, authors, size=posts), ms * 2048)
    return _followed(world, np.arange(authors)), 0, posts * 9 // 10


def _tied(posts: int) -> Callable[[], tuple[World, int, int]]:
    """One author with many posts in one millisecond, and 5,000 with one each in a month."""

    def make() -> tuple[World, int, int]:
        authors = 5_000
        dice = np.random.default_rng(SEED)
        now_ms = int(time.time() * 1000)
        # The millisecond is newer than all the others.
        ms = np.concatenate(
            [
                np.full(posts, now_ms - DAY_MS),
                dice.integers(now_ms - 30 * DAY_MS, now_ms - 2 * DAY_MS, size=authors),
            ]
        )
        author = np.concatenate([np.zeros(posts, dtype=int), np.arange(authors)])
        world = world_of("tied", authors, author, ms * 2048)
        return _followed(world, np.arange(authors)), 0, posts

    return make


def _followed(world: World, authors: np.ndarray) -> World:
    """The world with one viewer."""
    world.viewers = {len(authors): [FIRST_VIEWER]}
    world.follows = {FIRST_VIEWER: authors}
    return world


CROWDS = (
    Crowd(
        "1,000 follows of 2,000 authors with 20,000 posts in two minutes",
        _minute(2_000, 1_000, 20_000),
    ),
    Crowd(
        "5,000 follows of 10,000 authors with 100,000 posts in two minutes",
        _minute(10_000, 5_000, 100_000),
    ),
    Crowd("5,000 follows with 30 posts a day each, ten days deep", _busy),
    Crowd("5,000 follows, one with 10,000 posts in one millisecond", _tied(10_000)),
    Crowd("5,000 follows, one with 50,000 posts in one millisecond", _tied(50_000)),
)
