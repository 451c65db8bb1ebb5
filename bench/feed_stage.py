"""What the questions about the feed stand on.

Authors with posts, viewers with follows, all of it known here as columns, so that every answer can
be compared with a brute-force one.

Truth is copied into PostgreSQL and the index is built from it as `headrace feed rebuild` does.
Uniform: authors post alike and are followed alike. Zipf: popular authors post more and are followed
more (exponent 0.9), and posts come in bursts that share a millisecond.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.feed_copy import copy_follows, copy_posts
from bench.systems import Cell
from headrace import Headrace
from headrace.engines.endpoints import Endpoints

FOLLOWS = (100, 400, 1_000, 5_000)
PER_PAGE = 20
AUTHORS = 20_000
FIRST_AUTHOR, FIRST_VIEWER = 10_000_000, 1_000_000
"""Numbers of authors take four bytes, as those of a large site do."""
SPAN_MS = 300 * 86_400_000
ZIPF = 0.9
BURST_MS = 60_000
ID_LENGTH = 20
LOOKED_AT_ONCE = 4_096


@dataclass
class World:
    """Authors, posts and viewers.

    `author`, `scores`, `numbers` and `ids` are columns of the posts, newest first.

    Authors are counted from 0 here, and are FIRST_AUTHOR and so on to the feed.

    """

    shape: str
    authors: int
    author: Any
    scores: Any
    numbers: Any
    ids: Any
    viewers: dict[int, list[int]]
    """Those who are looked at, by number of follows; more of them may be in `follows`."""
    follows: dict[int, Any] = field(default_factory=dict)

    def page_of(self, viewer: int, skip: int = 0) -> list[str]:
        """The brute-force page."""
        return self.ids_of(self.newest(self.mask_of(viewer), skip + PER_PAGE)[skip:])

    def newest(self, mask: Any, need: int) -> list[int]:
        """Rows of the newest posts whose authors are in a mask."""
        found: list[int] = []
        chunk, start = LOOKED_AT_ONCE, 0
        while len(found) < need and start < len(self.author):
            rows = np.flatnonzero(mask[self.author[start : start + chunk]])
            found += (rows[: need - len(found)] + start).tolist()
            start, chunk = start + chunk, chunk * 2
        return found

    def ids_of(self, rows: list[int]) -> list[str]:
        """Ids of the posts in some rows."""
        return [each.decode() for each in self.ids[rows].tolist()]

    def authors_of(self, viewer: int) -> list[int]:
        """The authors that a viewer follows, as the feed stores them."""
        found: list[int] = (self.follows[viewer] + FIRST_AUTHOR).tolist()
        return found

    def mask_of(self, viewer: int) -> Any:
        """Which authors a viewer follows."""
        mask = np.zeros(self.authors, dtype=bool)
        mask[self.follows[viewer]] = True
        return mask


def make_world(
    shape: str, *, posts: int, viewers: int, authors: int = AUTHORS, crowd: int = 0
) -> World:
    """A world of this shape, the same each time. `crowd`.

    So many follows more of each kind of viewer.
    """
    dice = np.random.default_rng(20261121)
    weights = np.ones(authors)
    if shape == "zipf":
        weights = 1 / np.arange(1, authors + 1) ** ZIPF
    weights /= weights.sum()
    author = dice.choice(authors, size=posts, p=weights)
    now_ms = int(time.time() * 1000) - BURST_MS
    ms = now_ms - dice.integers(0, SPAN_MS, size=posts)
    if shape == "zipf":
        ms = ms // BURST_MS * BURST_MS
    world = world_of(shape, authors, author, ms * 2048)
    number = FIRST_VIEWER
    for follows in FOLLOWS:
        for row in range(viewers + crowd // follows):
            number += 1
            if row < viewers:
                world.viewers.setdefault(follows, []).append(number)
            world.follows[number] = dice.choice(authors, size=follows, replace=False, p=weights)
    return world


def world_of(shape: str, authors: int, author: Any, scores: Any) -> World:
    """A world of these posts, without viewers."""
    # Ids grow with the number, so the order by id is the order by number.
    order = np.lexsort((np.arange(len(author)), scores))[::-1]
    return World(shape, authors, author[order], scores[order], order, _ids(order), {})


def _ids(numbers: Any) -> Any:
    """`p` and 19 digits."""
    text = np.empty((len(numbers), ID_LENGTH), dtype=np.uint8)
    text[:, 0] = ord("p")
    rest = numbers
    for place in range(ID_LENGTH - 1, 0, -1):
        rest, digits = np.divmod(rest, 10)
        text[:, place] = digits + ord("0")
    return text.view(f"S{ID_LENGTH}").ravel()


@asynccontextmanager
async def staged(cell: Cell, world: World) -> AsyncIterator[Headrace]:
    """An app whose truth and index are this world."""
    app = open_app(cell)
    try:
        await stage_follows(cell, world)
        await stage_posts(cell, world)
        await app.feed.index.rebuild_now(clean=True)
        yield app
    finally:
        await app.close()


def open_app(cell: Cell) -> Headrace:
    """An app on the engines of a cell; close it."""
    return open_app_on(cell, cell.engines.endpoints.valkey_url, {})


def open_app_on(cell: Cell, valkey_url: str, flags: dict[str, str]) -> Headrace:
    """An app on another Valkey with these settings; close it."""
    app = Headrace(flags=flags)
    app.use_endpoints(Endpoints(cell.url, valkey_url, "file:///nowhere"))
    return app


async def stage_follows(cell: Cell, world: World) -> None:
    """The truth of all viewers."""
    numbers = list(world.follows)
    counts = [len(world.follows[viewer]) for viewer in numbers]
    authors = np.concatenate([world.follows[viewer] for viewer in numbers]) + FIRST_AUTHOR
    await copy_follows(cell.url, np.repeat(numbers, counts), authors)


async def stage_posts(cell: Cell, world: World) -> None:
    """The truth of all authors."""
    # In the order of ids, in which they would have arrived.
    order = np.argsort(world.numbers)
    await copy_posts(
        cell.url, world.ids[order], world.author[order] + FIRST_AUTHOR, world.scores[order]
    )
