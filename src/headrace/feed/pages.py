"""Reads of a viewer: pages, an author's posts, live updates, marker, unread count, visibility.

Why a page shows a post or not is decided from stored facts and the page. All reasons that hide the
post are returned, because removing one of two does not show it. Index and PostgreSQL may differ
until the next sweep; that is a reason of its own, in both directions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres, Row
from headrace.feed import store
from headrace.feed.id_map import FEED, Cursors, IdMap, require_no_cursor
from headrace.feed.index import Index
from headrace.feed.merge import PageMerger, PageQuery, position_of
from headrace.feed.model import (
    PAGE_MAX,
    TICKS,
    UNREAD_MAX,
    FeedId,
    Marker,
    Page,
    PagePost,
    Position,
    Unread,
    moment_of,
    require_feed_id,
    require_kinds,
    require_limit,
    require_post_ids,
)
from headrace.feed.ranking import RankedPlace, Ranking, Rankings, place_of
from headrace.feed.settings import page_seconds
from headrace.feed.valkey_store import Found
from headrace.kernel import spans
from headrace.kernel.signing import CursorInvalid

_UNKNOWN: Final = "the post does not exist: it was never posted, or it was deleted"
_BEHIND: Final = (
    "the index is behind PostgreSQL: the sweep adds missing changes within seconds;"
    " if this persists, list differences with `headrace feed verify` and fix them with"
    " `headrace feed rebuild`"
)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fact that hides a post from a viewer, or shows it."""

    code: str
    """followed, unknown, waits, not_followed, muted, blocked, blocked_by_author, index_behind."""
    text: str
    at: datetime | None = None
    """The beginning of the state; for a waiting post its end."""


class PostWhy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a viewer's pages show a post, and all reasons."""

    viewer: FeedId
    post: str
    is_shown: bool
    reasons: list[Reason]
    author: FeedId | None = None
    at: datetime | None = None
    """Its time in the feed."""
    is_slow: bool = False
    """Whether pages read it from PostgreSQL: older than the index, or no index."""


def why_shown(
    viewer: FeedId, post: str, facts: Any, *, author: FeedId | None, page: tuple[bool, bool]
) -> PostWhy:
    """Decide from the `facts` of `store.why_post`; `page`: whether it has the post, and is slow."""
    is_shown, is_slow = page
    if facts is None:
        unknown = Reason(code="unknown", text=_UNKNOWN)
        return PostWhy(viewer=viewer, post=post, is_shown=False, reasons=[unknown])
    reasons = list(_hiding(facts, viewer, author))
    if is_behind(facts, is_shown=is_shown):
        reasons.append(Reason(code="index_behind", text=_BEHIND))
    if not reasons:
        text = f"{viewer} follows {author}, and neither has muted or blocked the other"
        reasons = [Reason(code="followed", text=text, at=facts["followed_at"])]
    return PostWhy(
        viewer=viewer,
        post=post,
        is_shown=is_shown,
        reasons=reasons,
        author=author,
        at=facts["visible_at"] if facts["state"] else moment_of(facts["score"]),
        is_slow=is_slow,
    )


def is_behind(facts: Any, *, is_shown: bool) -> bool:
    """Whether the page and PostgreSQL disagree about the post."""
    is_free = next(_hiding(facts, "", None), None) is None
    return is_free != is_shown


def _hiding(facts: Any, viewer: FeedId, author: FeedId | None) -> Iterator[Reason]:
    if facts["state"]:
        until_at = facts["visible_at"]
        text = f"the post waits until {until_at:%Y-%m-%d %H:%M:%S} UTC"
        yield Reason(code="waits", text=text, at=until_at)
    if facts["followed_at"] is None:
        yield Reason(code="not_followed", text=f"{viewer} does not follow {author}")
    if facts["muted_at"] is not None:
        yield Reason(code="muted", text=f"{viewer} has muted {author}", at=facts["muted_at"])
    if facts["blocked_at"] is not None:
        yield Reason(code="blocked", text=f"{viewer} has blocked {author}", at=facts["blocked_at"])
    if facts["blocked_by_at"] is not None:
        text = f"{author} has blocked {viewer}"
        yield Reason(code="blocked_by_author", text=text, at=facts["blocked_by_at"])


AUTHOR: Final = "feed.author"
RANKED: Final = "feed.ranked."
OVERLAP_MS: Final = 2_000
"""How far each poll of a live feed reaches back."""
NOBODY: Final = 0
"""The number of a viewer with an unknown text id: no entity has it, and it follows nobody."""
JUST_AFTER: Final = "!"
"""Sorts before every character of an id, so `id!` is the position right after `id`."""


class Pages:
    """Read posts in order."""

    def __init__(
        self, postgres: Postgres, ids: IdMap, index: Index, merger: PageMerger, *, cursors: Cursors
    ) -> None:
        self.rankings = Rankings()
        self._postgres = postgres
        self._ids = ids
        self._index = index
        self._merger = merger
        self._cursors = cursors

    async def page(
        self,
        viewer: FeedId,
        limit: int = 20,
        *,
        cursor: str | None = None,
        since: str | None = None,
        kinds: Iterable[str] | None = None,
        rank: str | None = None,
    ) -> Page:
        """The newest posts of followed authors, newest first, up to 200.

        `cursor` is `next` of the previous page. `since` is `newest` of an earlier page or the
        `position` of a marker, and selects newer posts only. `kinds` selects posts of these kinds;
        if they are rare, a page may be short or empty and have a `next`. `rank` names an order
        defined with `@app.feed_ranking`. `next` is None on the last page. While Valkey is down the
        page comes from PostgreSQL, more slowly. Raises: InvalidFeedId, InvalidLimit, InvalidKind,
        RankingUnknown, RankingFailed, CursorInvalid, SlowPagesBusy; PostgresDown if no engine has
        the page.
        """
        began_s = time.perf_counter()
        with spans.inside("feed.page", "INTERNAL", {"headrace.feed.limit": limit}) as span:
            page = await self._page(
                viewer, limit, cursor=cursor, since=since, kinds=kinds, rank=rank
            )
            if span is not None:
                span.note(
                    {"headrace.feed.posts": len(page.posts), "headrace.feed.is_slow": page.is_slow}
                )
        page_seconds.observe(time.perf_counter() - began_s)
        return page

    async def _page(
        self,
        viewer: FeedId,
        limit: int,
        *,
        cursor: str | None,
        since: str | None,
        kinds: Iterable[str] | None,
        rank: str | None,
    ) -> Page:
        if not self._index.is_open:
            await self._index.open()
        given, _ = require_feed_id("viewer", viewer), require_limit(limit, PAGE_MAX)
        wanted = require_kinds(kinds) if kinds is not None else None
        ranking = self.rankings.find(rank) if rank is not None else None
        number = given if isinstance(given, int) else await self._ids.find(given)
        if number is None:
            require_no_cursor(cursor, since)
            return Page(posts=[])
        after = self._cursors.read(FEED, number, since) if since is not None else None
        if ranking is not None:
            listing = f"{RANKED}{ranking.name}"
            place = place_of(self._cursors.read(listing, number, cursor, tuple[int, str, str]))
            query = PageQuery(number, ranking.newest, place.before, after, wanted)
            return await self._ranked_page(given, ranking, place, query, limit=limit)
        before = self._cursors.read(FEED, number, cursor) if cursor is not None else None
        merged = await self._merger.page(PageQuery(number, limit, before, after, wanted))
        found = merged.posts
        last = None
        if not merged.is_end:
            end = merged.end or position_of(found[-1])
            last = self._cursors.sign(FEED, number, end)
        if not found:
            return Page(posts=[], next=last, is_slow=merged.is_slow)
        return Page(
            posts=await external_posts(found, self._ids),
            next=last,
            newest=self._cursors.sign(FEED, number, position_of(found[0])),
            is_slow=merged.is_slow,
        )

    async def _ranked_page(
        self,
        viewer: FeedId,
        ranking: Ranking,
        place: RankedPlace,
        window: PageQuery,
        *,
        limit: int,
    ) -> Page:
        """A page of a ranking; it ends at the end of the `window`."""
        number = window.viewer
        merged = await self._merger.page(window)
        if not merged.posts and merged.is_end:
            return Page(posts=[], is_slow=merged.is_slow)
        ranked = await ranking.rank(viewer, await external_posts(merged.posts, self._ids))
        left = place.remaining(ranked)
        posts = left[:limit]
        next_place = newest = None
        if merged.posts:
            top = position_of(merged.posts[0])
            newest = self._cursors.sign(FEED, number, top)
            place = place if place.before else RankedPlace(top._replace(id=top.id + JUST_AFTER))
        if len(left) > limit:
            next_place = place.after(posts)
        elif not merged.is_end:
            next_place = RankedPlace(merged.end or position_of(merged.posts[-1]))
        return Page(
            posts=posts,
            next=self._cursors.sign(f"{RANKED}{ranking.name}", number, next_place.to_position())
            if next_place
            else None,
            newest=newest,
            is_slow=merged.is_slow,
        )

    async def author_posts(
        self,
        author: FeedId,
        limit: int = 20,
        *,
        cursor: str | None = None,
        kinds: Iterable[str] | None = None,
    ) -> Page:
        """An author's visible posts, newest first, independent of any viewer.

        `kinds` selects posts of these kinds. Raises: InvalidFeedId, InvalidLimit, InvalidKind,
        CursorInvalid, PostgresDown.
        """
        given, _ = require_feed_id("author", author), require_limit(limit, PAGE_MAX)
        wanted = require_kinds(kinds)
        number = await self._ids.find(given)
        if number is None:
            require_no_cursor(cursor)
            return Page(posts=[])
        before = self._cursors.read(AUTHOR, number, cursor)
        rows = await store.author_posts(
            self._postgres,
            number,
            before=before,
            kinds=None if wanted is None else sorted(wanted),
            rows_max=limit,
        )
        is_full = len(rows) == limit
        last = Position(rows[-1].score, rows[-1].id) if is_full else None
        return Page(
            posts=[
                PagePost(id=row.id, author=given, at=moment_of(row.score), kind=row.kind)
                for row in rows
            ],
            next=self._cursors.sign(AUTHOR, number, last) if last else None,
        )

    async def watch(
        self, viewer: FeedId, *, since: str | None = None, kinds: Iterable[str] | None = None
    ) -> LiveFeed:
        """Start a live feed now, or after a position; call its `poll` repeatedly.

        `kinds` selects posts of these kinds. Raises: InvalidFeedId, InvalidKind, CursorInvalid,
        PostgresDown.
        """
        wanted = require_kinds(kinds)
        await self._index.ready()
        number = await self._number_of(require_feed_id("viewer", viewer), since)
        at = self._cursors.read(FEED, number, since)
        if at is None:
            newest = (await self._merger.page(PageQuery(number, 1))).posts
            at = position_of(newest[0]) if newest else Position(0, "")
        live = LiveFeed(number, self._merger, self._ids, self._cursors, at=at, kinds=wanted)
        await live.poll()
        return live

    async def marker(self, viewer: FeedId) -> Marker:
        """The read marker of a viewer. Raises: InvalidFeedId, PostgresDown."""
        number = await self._ids.find(require_feed_id("viewer", viewer))
        found = None if number is None else await store.marker(self._postgres, number)
        if number is None or found is None:
            return Marker()
        position, set_at = found
        return Marker(
            position=self._cursors.sign(FEED, number, position),
            post=position.id,
            at=moment_of(position.score),
            set_at=set_at,
        )

    async def set_marker(self, viewer: FeedId, position: str | None = None) -> Marker:
        """Move the read marker forward to a position, by default to the newest post.

        `newest` and `next` of a page are positions. Raises: InvalidFeedId, CursorInvalid,
        PostgresDown.
        """
        await self._index.ready()
        given = require_feed_id("viewer", viewer)
        number = await self._number_of(given, position)
        at = self._cursors.read(FEED, number, position)
        if at is None:
            newest = (await self._merger.page(PageQuery(number, 1))).posts
            at = position_of(newest[0]) if newest else None
        if at is not None:
            await store.set_marker(self._postgres, number, at)
        return await self.marker(given)

    async def unread(self, viewer: FeedId, *, kinds: Iterable[str] | None = None) -> Unread:
        """Number of posts newer than the marker, counted to 100; `kinds` counts only these.

        Raises: InvalidFeedId, InvalidKind, PostgresDown.
        """
        wanted = require_kinds(kinds)
        await self._index.ready()
        number = await self._ids.find(require_feed_id("viewer", viewer))
        if number is None:
            return Unread(count=0)
        found = await store.marker(self._postgres, number)
        after = found[0] if found else None
        merged = await self._merger.page(
            PageQuery(number, UNREAD_MAX + 1, after=after, kinds=wanted)
        )
        count = len(merged.posts)
        return Unread(
            count=min(count, UNREAD_MAX), has_more=count > UNREAD_MAX or not merged.is_end
        )

    async def why(self, viewer: FeedId, post_id: str) -> PostWhy:
        """Whether a viewer's pages show a post, and why. Raises: InvalidFeedId, PostgresDown."""
        await self._index.ready()
        who, [wanted] = require_feed_id("viewer", viewer), require_post_ids([post_id])
        number = await self._ids.find(who) or NOBODY
        facts, page = await self._facts_and_page(number, wanted)
        if facts is not None and is_behind(facts, is_shown=page[0]):
            # A change between both reads looks the same, so read again.
            facts, page = await self._facts_and_page(number, wanted)
        author = None
        if facts is not None:
            author = (await self._ids.external_ids([facts["author"]]))[facts["author"]]
        return why_shown(who, wanted, facts, author=author, page=page)

    async def _facts_and_page(
        self, viewer: int, post_id: str
    ) -> tuple[Row | None, tuple[bool, bool]]:
        facts = await store.why_post(self._postgres, viewer, post_id)
        if facts is None or viewer == NOBODY:
            return facts, (False, False)
        here = Position(facts["score"], post_id + JUST_AFTER)
        merged = await self._merger.page(PageQuery(viewer, 1, before=here))
        is_shown = any(found.id == post_id for found in merged.posts)
        return facts, (is_shown, merged.is_slow and is_shown)

    async def _number_of(self, viewer: FeedId, cursor: str | None) -> int:
        """The number of a viewer, created if missing without a cursor. Raises: CursorInvalid."""
        if cursor is not None and await self._ids.find(viewer) is None:
            raise CursorInvalid(cursor)
        [number] = await self._ids.find_or_create([viewer])
        return number


class LiveUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Posts since the last poll, newest first. `is_cut`: there were more, so read the page."""

    posts: list[PagePost]
    is_cut: bool = False


class LiveFeed:
    """New posts for one viewer.

    A post gets its time before its transaction commits, so it may appear after a newer one. Each
    poll therefore reaches back by OVERLAP_MS and omits posts that were already returned.
    """

    def __init__(
        self,
        viewer: int,
        merger: PageMerger,
        ids: IdMap,
        cursors: Cursors,
        *,
        at: Position,
        kinds: frozenset[str] | None,
    ) -> None:
        self._viewer = viewer
        self._merger = merger
        self._ids = ids
        self._cursors = cursors
        self._at = at
        self._kinds = kinds
        self._returned: set[str] | None = None
        """Ids within the overlap; None before the first poll, which only records them."""

    @property
    def position(self) -> str:
        """The newest returned post, to continue with `since=`."""
        return self._cursors.sign(FEED, self._viewer, self._at)

    async def poll(self) -> LiveUpdate:
        """New posts. Raises: PostgresDown."""
        after = Position(max(0, self._at.score - OVERLAP_MS * TICKS), "")
        merged = await self._merger.page(
            PageQuery(self._viewer, PAGE_MAX, after=after, kinds=self._kinds)
        )
        if self._returned is None:
            self._returned = {p.id for p in merged.posts if (p.score, p.id) <= self._at}
            return LiveUpdate(posts=[])
        new = [post for post in merged.posts if post.id not in self._returned]
        if new:
            self._at = max(self._at, position_of(new[0]))
        since = self._at.score - OVERLAP_MS * TICKS
        self._returned = {post.id for post in merged.posts if post.score >= since}
        return LiveUpdate(posts=await external_posts(new, self._ids), is_cut=not merged.is_end)


async def external_posts(found: list[Found], ids: IdMap) -> list[PagePost]:
    """Posts with the external ids of their authors."""
    names = await ids.external_ids([post.author for post in found])
    return [
        PagePost(id=post.id, author=names[post.author], at=moment_of(post.score), kind=post.kind)
        for post in found
    ]
