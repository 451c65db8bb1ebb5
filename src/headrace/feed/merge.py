"""A page of a feed: each shard is asked once, what they found is merged, and what they cannot have comes from the truth.

    shard 0: newest of its followed authors  \
    shard 1: ...                              > merged by (score, id), cut at the limit, filled up from PostgreSQL
    ...                                      /  where the index ends before the page does

A shard answers with as many posts as the page has, so what is merged is the page. Mutes, blocks, deletions and posts
that wait need no filter: the index has none of them, so a page is full until the true end. No post below the highest
floor of the shards is taken from the index, since another shard may lack posts of that age.

Without an index (Valkey is away, came back empty, or may lack the last changes) the page is made from PostgreSQL: slower,
and the same. So it is while this process knows of a change that it could not bring. A process reads few such pages at once
(`SlowPages`) and refuses those that would wait long: other calls need its connections to PostgreSQL, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.errors import SlowPagesBusy
from headrace.feed.hot import Found, Hot, ShardPage
from headrace.feed.model import Place
from headrace.feed.settings import pages_refused, pages_told
from headrace.kernel.errors import Unavailable

WAITING_TIMES: Final = 4
"""So many times as many pages wait as are read."""
WAIT_S_MAX: Final = 5.0
_FROM_INDEX: Final = pages_told.labels(source="index")
_FROM_POSTGRES: Final = pages_told.labels(source="postgres")


@dataclass(frozen=True, slots=True)
class Merged:
    """Posts of a page, newest first."""

    posts: list[Found]
    is_end: bool
    """Whether there is nothing after them."""
    is_slow: bool = False


@dataclass(slots=True)
class _Gate:
    """The slow pages of one event loop."""

    free: asyncio.Semaphore
    waiting: int = field(default=0)


class SlowPages:
    """Pages read from PostgreSQL: `at_once` at a time in each event loop, some more wait, others are refused."""

    def __init__(self, postgres: Postgres, at_once: int) -> None:
        self._postgres = postgres
        self._at_once = at_once
        self._gates = WeakKeyDictionary[asyncio.AbstractEventLoop, _Gate]()

    async def read(
        self, viewer: int, *, limit: int, before: Place | None, after: Place | None
    ) -> list[Found]:
        """The newest posts between two places. Raises: SlowPagesBusy, PostgresDown."""
        free = await self._enter()
        try:
            rows = await store.posts.page(
                self._postgres, viewer, before=before, after=after, rows_max=limit
            )
        finally:
            free.release()
        return [Found(*row) for row in rows]

    async def _enter(self) -> asyncio.Semaphore:
        """Wait for a turn; the caller releases it. Raises: SlowPagesBusy."""
        gate = self._gates.setdefault(
            asyncio.get_running_loop(), _Gate(asyncio.Semaphore(self._at_once))
        )
        if gate.waiting >= WAITING_TIMES * self._at_once:
            raise self._refusal()
        gate.waiting += 1
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await gate.free.acquire()
        except TimeoutError:
            raise self._refusal() from None
        finally:
            gate.waiting -= 1
        return gate.free

    def _refusal(self) -> SlowPagesBusy:
        pages_refused.inc()
        return SlowPagesBusy(self._at_once)


class Merge:
    """Makes pages. `on_unready` is called where the index has to be made ready."""

    def __init__(
        self, slow_pages: SlowPages, hot: Hot, applier: Applier, on_unready: Callable[[], None]
    ) -> None:
        self._slow_pages = slow_pages
        self._hot = hot
        self._applier = applier
        self._on_unready = on_unready

    async def page(
        self, viewer: int, *, limit: int, before: Place | None = None, after: Place | None = None
    ) -> Merged:
        """The newest posts between two places. Raises: PostgresDown, SlowPagesBusy."""
        parts = await self._ask(viewer, limit, before, after)
        if parts is None:
            return await self._slow(viewer, limit, before, after)
        _FROM_INDEX.inc()
        floor = max([part.floor for part in parts])
        posts = parts[0].posts
        if len(parts) > 1:
            posts = [post for part in parts for post in part.posts if post.score >= floor]
            posts.sort(reverse=True)
            posts = posts[:limit]
        if len(posts) == limit:
            return Merged(posts, is_end=False)
        if floor == 0 or (after is not None and after.score >= floor):
            return Merged(posts, is_end=True)
        edge = Place(floor, "")
        try:
            rest = await self._slow_pages.read(
                viewer,
                limit=limit - len(posts),
                before=min(before, edge) if before else edge,
                after=after,
            )
        except Unavailable:
            if not posts:
                raise
            return Merged(posts, is_end=False)
        posts = posts + rest
        return Merged(posts, is_end=len(posts) < limit, is_slow=True)

    async def _ask(
        self, viewer: int, limit: int, before: Place | None, after: Place | None
    ) -> list[ShardPage] | None:
        """What each shard has; None where one of them cannot say."""
        if self._applier.has_left:
            self._on_unready()
            return None
        shards = range(self._hot.shards)
        asked = [
            self._hot.page(shard, viewer, limit=limit, before=before, after=after)
            for shard in shards
        ]
        try:
            found = [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)
        except ValkeyDown:
            return None
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            self._on_unready()
            return None
        return parts

    async def _slow(
        self, viewer: int, limit: int, before: Place | None, after: Place | None
    ) -> Merged:
        _FROM_POSTGRES.inc()
        posts = await self._slow_pages.read(viewer, limit=limit, before=before, after=after)
        return Merged(posts, is_end=len(posts) < limit, is_slow=True)
