"""A viewer who watches: what is new since the last look.

A post gets its moment before its transaction commits, so one may come into sight a moment after a newer one. Each look
therefore goes back by OVERLAP_MS and leaves out what was told before.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.feed.hot import Found
from headrace.feed.merge import Merge
from headrace.feed.model import PAGE_MAX, TICKS, PagePost, Place
from headrace.feed.names import Names
from headrace.feed.service.places import FEED, Places

OVERLAP_MS: Final = 2_000


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What came since the last look, newest first. `is_cut`: there was more, so read the page instead."""

    posts: list[PagePost]
    is_cut: bool = False


class Watch:
    """One viewer's eyes; `place` is the newest post that was told."""

    def __init__(
        self, viewer: int, merge: Merge, names: Names, places: Places, *, at: Place
    ) -> None:
        self._viewer = viewer
        self._merge = merge
        self._names = names
        self._places = places
        self._at = at
        self._told: set[str] | None = None
        """Ids of the overlap; None before the first look, which tells nothing that is not newer than `at`."""

    @property
    def place(self) -> str:
        """Where to go on with `since=` after this."""
        return self._places.sign(FEED, self._viewer, self._at)

    async def look(self) -> News:
        """What is new. Raises: PostgresDown."""
        merged = await self._merge.page(
            self._viewer,
            limit=PAGE_MAX,
            after=Place(max(0, self._at.score - OVERLAP_MS * TICKS), ""),
        )
        if self._told is None:
            self._told = {post.id for post in merged.posts if (post.score, post.id) <= self._at}
            return News(posts=[])
        new = [post for post in merged.posts if post.id not in self._told]
        if new:
            self._at = max(self._at, Place(new[0].score, new[0].id))
        since = self._at.score - OVERLAP_MS * TICKS
        self._told = {post.id for post in merged.posts if post.score >= since}
        return News(posts=await told_posts(new, self._names), is_cut=not merged.is_end)


async def told_posts(found: list[Found], names: Names) -> list[PagePost]:
    """Posts with their authors as their owners name them."""
    if all(post.author > 0 for post in found):
        return [PagePost(post.id, post.author, post.score) for post in found]
    told = await names.told([post.author for post in found])
    return [PagePost(post.id, told[post.author], post.score) for post in found]
