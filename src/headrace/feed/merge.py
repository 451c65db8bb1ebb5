"""A page of a feed: one call of the viewer's shard, completed from PostgreSQL below the index.

Mutes, blocks, deletions and waiting posts need no filter, because the index does not contain them.
So a page is full until the true end.

A filter by kinds reads unfiltered pages of the index and omits other posts, up to `SCANNED_MAX`
posts a page; a page that reaches this limit may be short or empty, and has a next one.

Without a usable shard the same page comes from PostgreSQL, more slowly: its Valkey is down, empty,
or may lack recent changes, or this process has deferred changes of the shard. A process reads few
such pages at once (`SlowPages`) and refuses those that would wait long, because other calls share
its connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.feed import store
from headrace.feed.errors import SlowPagesBusy
from headrace.feed.index import Index
from headrace.feed.model import PAGE_MAX, Position
from headrace.feed.settings import pages_read, pages_refused
from headrace.feed.valkey_store import Found, ShardPage, ValkeyStore
from headrace.kernel.errors import Unavailable

SCANNED_MAX: Final = 5_000
"""Posts that a page with a filter reads from the index."""
WAITING_TIMES: Final = 4
"""Limit of waiting pages, as a multiple of those read at once."""
WAIT_S_MAX: Final = 5.0
_FROM_INDEX: Final = pages_read.labels(source="index")
_FROM_POSTGRES: Final = pages_read.labels(source="postgres")


class PageQuery(NamedTuple):
    """The newest posts of a viewer between two positions; with `kinds` only of these."""

    viewer: int
    limit: int
    before: Position | None = None
    after: Position | None = None
    kinds: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class MergedPage:
    """Posts of a page, newest first."""

    posts: list[Found]
    is_end: bool
    """Whether no older posts exist."""
    is_slow: bool = False
    end: Position | None = None
    """Where to continue, if not after the last post."""


@dataclass(slots=True)
class _Gate:
    """Slow pages of one event loop."""

    free: asyncio.Semaphore
    waiting: int = field(default=0)


class SlowPages:
    """Pages read from PostgreSQL, `at_once` at a time per event loop; some wait, others fail."""

    def __init__(self, postgres: Postgres, at_once: int) -> None:
        self._postgres = postgres
        self._at_once = at_once
        self._gates = WeakKeyDictionary[asyncio.AbstractEventLoop, _Gate]()

    async def read(self, query: PageQuery) -> list[Found]:
        """The posts of a query. Raises: SlowPagesBusy, PostgresDown."""
        free = await self._enter()
        try:
            rows = await store.page(
                self._postgres,
                query.viewer,
                before=query.before,
                after=query.after,
                kinds=None if query.kinds is None else sorted(query.kinds),
                rows_max=query.limit,
            )
        finally:
            free.release()
        return [Found(*row) for row in rows]

    async def _enter(self) -> asyncio.Semaphore:
        """Acquire the semaphore; the caller releases it. Raises: SlowPagesBusy."""
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


class PageMerger:
    """Merge pages of the index and of PostgreSQL."""

    def __init__(self, slow_pages: SlowPages, valkey: ValkeyStore, index: Index) -> None:
        self._slow_pages = slow_pages
        self._valkey = valkey
        self._index = index

    async def page(self, query: PageQuery) -> MergedPage:
        """The posts of a query. Raises: PostgresDown, SlowPagesBusy."""
        limit, kinds = query.limit, query.kinds
        if kinds is None:
            return await self._page(query)
        posts, is_slow = list[Found](), False
        query = query._replace(limit=PAGE_MAX)
        for _ in range(0, SCANNED_MAX, PAGE_MAX):
            part = await self._page(query)
            posts += [post for post in part.posts if post.kind in kinds]
            is_slow = is_slow or part.is_slow
            if len(posts) > limit or part.is_end:
                is_end = part.is_end and len(posts) <= limit
                return MergedPage(posts[:limit], is_end=is_end, is_slow=is_slow)
            query = query._replace(before=position_of(part.posts[-1]))
        return MergedPage(posts, is_end=False, is_slow=is_slow, end=query.before)

    async def _page(self, query: PageQuery) -> MergedPage:
        """Posts of the index, and of PostgreSQL below it; only the latter are filtered."""
        limit, before, after = query.limit, query.before, query.after
        found = await self._read_index(query)
        if found is None:
            _FROM_POSTGRES.inc()
            posts = await self._slow_pages.read(query)
            return MergedPage(posts, is_end=len(posts) < limit, is_slow=True)
        _FROM_INDEX.inc()
        floor, posts = found.floor, found.posts
        if len(posts) == limit:
            return MergedPage(posts, is_end=False)
        if floor == 0 or (after is not None and after.score >= floor):
            return MergedPage(posts, is_end=True)
        edge = Position(floor, "")
        try:
            rest = await self._slow_pages.read(
                query._replace(
                    limit=limit - len(posts), before=min(before, edge) if before else edge
                )
            )
        except Unavailable:
            if not posts:
                raise
            return MergedPage(posts, is_end=False)
        posts = posts + rest
        return MergedPage(posts, is_end=len(posts) < limit, is_slow=True)

    async def _read_index(self, query: PageQuery) -> ShardPage | None:
        """The page of the viewer's shard; None if the shard is not usable."""
        if self._index.applier.lacks_changes(self._valkey.shard_of(query.viewer)):
            self._index.require_ready()
            return None
        try:
            found = await self._valkey.page(
                query.viewer, limit=query.limit, before=query.before, after=query.after
            )
        except ValkeyDown:
            return None
        if found is None:
            self._index.require_ready()
        return found


def position_of(post: Found) -> Position:
    """The position of a post."""
    return Position(post.score, post.id)
