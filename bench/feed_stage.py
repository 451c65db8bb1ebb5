"""What the questions about the feed stand on: authors with posts, viewers with follows, all of it known here as columns, so
that every answer can be compared with a brute-force one.

Truth is copied into PostgreSQL and the index is built from it as `penstock feed rebuild` does. Uniform: authors post alike
and are followed alike. Zipf: popular authors post more and are followed more (exponent 0.9), and posts come in bursts
that share a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import asyncpg
import numpy as np

from bench.systems import Cell
from penstock import Penstock
from penstock.engines.endpoints import Endpoints

FOLLOWS = (100, 400, 1_000, 5_000)
PER_PAGE = 20
AUTHORS = 20_000
FIRST_AUTHOR, FIRST_VIEWER = 10_000_000, 1_000_000
"""Numbers of authors take four bytes, as those of a large site do."""
SPAN_MS = 300 * 86_400_000
ZIPF = 0.9
BURST_MS = 60_000


@dataclass
class World:
    """Authors, posts and viewers; `author` and `ids` are columns of the posts, newest first.

    Authors are counted from 0 here, and are FIRST_AUTHOR and so on to the feed.
    """

    shape: str
    author: Any
    scores: Any
    ids: list[str]
    viewers: dict[int, list[int]]
    """By number of follows."""
    follows: dict[int, Any] = field(default_factory=dict)

    def page_of(self, viewer: int, skip: int = 0) -> list[str]:
        """The brute-force page."""
        found = np.flatnonzero(self.mask_of(viewer)[self.author])[skip : skip + PER_PAGE]
        return [self.ids[row] for row in found]

    def authors_of(self, viewer: int) -> list[int]:
        """Whom a viewer follows, as the feed knows them."""
        found: list[int] = (self.follows[viewer] + FIRST_AUTHOR).tolist()
        return found

    def mask_of(self, viewer: int) -> Any:
        """Which authors a viewer follows."""
        mask = np.zeros(AUTHORS, dtype=bool)
        mask[self.follows[viewer]] = True
        return mask


def make_world(shape: str, *, posts: int, viewers: int) -> World:
    """A world of this shape, the same each time."""
    dice = np.random.default_rng(20261121)
    weights = np.ones(AUTHORS)
    if shape == "zipf":
        weights = 1 / np.arange(1, AUTHORS + 1) ** ZIPF
    weights /= weights.sum()
    author = dice.choice(AUTHORS, size=posts, p=weights)
    now_ms = int(time.time() * 1000) - BURST_MS
    ms = now_ms - dice.integers(0, SPAN_MS, size=posts)
    if shape == "zipf":
        ms = ms // BURST_MS * BURST_MS
    scores = ms * 2048
    # Ids grow with the row, so the order by id is the order by row.
    order = np.lexsort((np.arange(posts), scores))[::-1]
    world = World(shape, author[order], scores[order], [f"p{n:019d}" for n in order.tolist()], {})
    number = FIRST_VIEWER
    for follows in FOLLOWS:
        for _ in range(viewers):
            number += 1
            world.viewers.setdefault(follows, []).append(number)
            world.follows[number] = dice.choice(AUTHORS, size=follows, replace=False, p=weights)
    return world


@asynccontextmanager
async def staged(cell: Cell, world: World) -> AsyncIterator[Penstock]:
    """An app whose truth and index are this world."""
    app = open_app(cell)
    try:
        await _copy(cell, world)
        await app.feed.rebuild_now(clean=True)
        yield app
    finally:
        await app.close()


def open_app(cell: Cell) -> Penstock:
    """An app on the engines of a cell; close it."""
    app = Penstock()
    app.use_endpoints(
        replace(Endpoints(cell.url, cell.engines.endpoints.valkey_url, "file:///nowhere"))
    )
    return app


async def _copy(cell: Cell, world: World) -> None:
    connection = await asyncpg.connect(cell.url)
    try:
        moment = await connection.fetchval("SELECT now()")
        await connection.copy_records_to_table(
            "feed_post", schema_name="penstock",
            columns=["id", "author", "score", "state", "visible_at"],
            records=zip(
                world.ids, (world.author + FIRST_AUTHOR).tolist(), world.scores.tolist(),
                _same(0, len(world.ids)), _same(moment, len(world.ids)), strict=True,
            ),
        )  # fmt: skip
        pairs = [(v, author) for v in world.follows for author in world.authors_of(v)]
        await connection.copy_records_to_table(
            "feed_follow", schema_name="penstock",
            columns=["viewer", "author", "followed_at", "is_shown"],
            records=((viewer, author, moment, True) for viewer, author in pairs),
        )  # fmt: skip
        authors = sorted(set((world.author + FIRST_AUTHOR).tolist()))
        versions = [(1, author, 1) for author in authors] + [(0, v, 1) for v in world.follows]
        await connection.copy_records_to_table(
            "feed_version", schema_name="penstock", columns=["kind", "entity", "version"],
            records=versions,
        )  # fmt: skip
        await connection.execute("ANALYZE")
    finally:
        await connection.close()


def _same(value: object, count: int) -> Sequence[object]:
    return [value] * count
