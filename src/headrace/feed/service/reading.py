"""Pages, an author's own posts, the read marker, and how much is unread."""

from __future__ import annotations

from typing import Final

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.hot import Found
from headrace.feed.merge import Merge
from headrace.feed.model import (
    PAGE_MAX,
    UNREAD_MAX,
    FeedId,
    Marker,
    Page,
    PagePost,
    Place,
    Unread,
    moment_of,
    require_feed_id,
    require_limit,
)
from headrace.feed.names import Names
from headrace.feed.service.places import FEED, Places, require_no_cursor
from headrace.feed.service.watching import Watch, told_posts
from headrace.kernel.signing import CursorInvalid

AUTHOR: Final = "feed.author"


class Reading:
    """Answers what is asked of posts in order."""

    def __init__(self, postgres: Postgres, names: Names, merge: Merge, places: Places) -> None:
        self._postgres = postgres
        self._names = names
        self._merge = merge
        self._places = places

    async def page(self, viewer: object, limit: int, cursor: str | None, since: str | None) -> Page:
        """A page of a viewer's feed."""
        wanted, _ = require_feed_id("viewer", viewer), require_limit(limit, PAGE_MAX)
        number = wanted if isinstance(wanted, int) else await self._names.find(wanted)
        if number is None:
            require_no_cursor(cursor, since)
            return Page(posts=[])
        before = self._places.read(FEED, number, cursor) if cursor is not None else None
        after = self._places.read(FEED, number, since) if since is not None else None
        merged = await self._merge.page(number, limit=limit, before=before, after=after)
        found = merged.posts
        if not found:
            return Page(posts=[], is_slow=merged.is_slow)
        return Page(
            posts=await told_posts(found, self._names),
            next=None if merged.is_end else self._places.sign(FEED, number, _place_of(found[-1])),
            newest=self._places.sign(FEED, number, _place_of(found[0])),
            is_slow=merged.is_slow,
        )

    async def watch(self, viewer: object, since: str | None) -> Watch:
        """Begin to watch a viewer's feed."""
        number = await self._number_of(require_feed_id("viewer", viewer), since)
        at = self._places.read(FEED, number, since)
        if at is None:
            newest = (await self._merge.page(number, limit=1)).posts
            at = _place_of(newest[0]) if newest else Place(0, "")
        watch = Watch(number, self._merge, self._names, self._places, at=at)
        await watch.look()
        return watch

    async def author_posts(self, author: object, limit: int, cursor: str | None) -> Page:
        """An author's own posts, newest first."""
        wanted, _ = require_feed_id("author", author), require_limit(limit, PAGE_MAX)
        number = await self._names.find(wanted)
        if number is None:
            require_no_cursor(cursor)
            return Page(posts=[])
        before = self._places.read(AUTHOR, number, cursor)
        rows = await store.posts.author_posts(self._postgres, number, before=before, rows_max=limit)
        is_full = len(rows) == limit
        last = Place(rows[-1].score, rows[-1].id) if is_full else None
        return Page(
            posts=[PagePost(row.id, wanted, row.score) for row in rows],
            next=self._places.sign(AUTHOR, number, last) if last else None,
        )

    async def marker(self, viewer: object) -> Marker:
        """Up to where a viewer has read."""
        number = await self._names.find(require_feed_id("viewer", viewer))
        found = None if number is None else await store.follows.marker(self._postgres, number)
        if number is None or found is None:
            return Marker()
        place, set_at = found
        return Marker(
            place=self._places.sign(FEED, number, place),
            post=place.id,
            at=moment_of(place.score),
            set_at=set_at,
        )

    async def set_marker(self, viewer: object, place: str | None) -> Marker:
        """Note up to where a viewer has read: a place of his feed, or its newest post."""
        wanted = require_feed_id("viewer", viewer)
        number = await self._number_of(wanted, place)
        at = self._places.read(FEED, number, place)
        if at is None:
            newest = (await self._merge.page(number, limit=1)).posts
            at = _place_of(newest[0]) if newest else None
        if at is not None:
            await store.follows.set_marker(self._postgres, number, at)
        return await self.marker(wanted)

    async def unread(self, viewer: object) -> Unread:
        """How many posts are newer than the marker."""
        number = await self._names.find(require_feed_id("viewer", viewer))
        if number is None:
            return Unread(count=0)
        found = await store.follows.marker(self._postgres, number)
        merged = await self._merge.page(
            number, limit=UNREAD_MAX + 1, after=found[0] if found else None
        )
        count = len(merged.posts)
        return Unread(count=min(count, UNREAD_MAX), has_more=count > UNREAD_MAX)

    async def _number_of(self, viewer: FeedId, place: str | None) -> int:
        """The number of a viewer, made where there is none: then no place can be his. Raises: CursorInvalid."""
        if place is not None and await self._names.find(viewer) is None:
            raise CursorInvalid
        [number] = await self._names.make([viewer])
        return number


def _place_of(post: Found) -> Place:
    return Place(post.score, post.id)
