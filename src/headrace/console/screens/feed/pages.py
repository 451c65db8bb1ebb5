"""Feeds as their viewers see them, page by page; why a post is there or not; how the index stands."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.console.seeing import Ask, Found, attempt
from headrace.feed.model import Marker, MuteOrBlock, Page, People, ShardState, Unread
from headrace.feed.why import PostWhy

POSTS_SHOWN: Final = 30
PEOPLE_SHOWN: Final = 50
BOARDS: Final = ("feed", "following", "muted", "blocked")
AUTHOR_BOARDS: Final = ("posts", "followers")

NOTHING: Final[Found[Any]] = Found()
"""Where nothing was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerView:
    """A viewer's feed, or one of his lists; without a viewer: where one is asked for."""

    viewer: str
    board: str
    boards: Sequence[str] = BOARDS
    page: Found[Page] = NOTHING
    people: Found[People] = NOTHING
    unread: Found[Unread] = NOTHING
    marker: Found[Marker] = NOTHING
    following: int | None = None
    more: str | None = None
    is_first: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorView:
    """An author's posts, or who follows him; without an author: where one is asked for."""

    author: str
    board: str
    boards: Sequence[str] = AUTHOR_BOARDS
    page: Found[Page] = NOTHING
    people: Found[People] = NOTHING
    followers: int | None = None
    more: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    """Why a viewer sees a post or not; None: not both were given yet."""

    viewer: str
    post: str
    why: Found[PostWhy] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexView:
    """How the index stands."""

    shards: Found[list[ShardState]]
    index_for_s: float
    keep_for_s: float


async def see_viewer(ask: Ask) -> ViewerView:
    """A viewer's feed as his next page shows it, or whom he follows, mutes, blocks."""
    feed, viewer = ask.service("feed"), ask.query.text("viewer", most=128).strip()
    board = ask.query.choice("list", BOARDS, "feed")
    if not viewer:
        return ViewerView(viewer=viewer, board=board)
    cursor = ask.query.text("cursor", most=512) or None
    unread, marker, following = await asyncio.gather(
        attempt(feed.pages.unread(viewer)),
        attempt(feed.pages.marker(viewer)),
        attempt(feed.follows.following(viewer, 1)),
    )
    page: Found[Page] = NOTHING
    people: Found[People] = NOTHING
    more = None
    if board == "feed":
        page = await attempt(feed.page(viewer, POSTS_SHOWN, cursor=cursor))
        more = page.value.next if page.value else None
    else:
        people = await attempt(_people(feed, viewer, board, cursor=cursor))
        more = people.value.next if people.value else None
    return ViewerView(
        viewer=viewer,
        board=board,
        page=page,
        people=people,
        unread=unread,
        marker=marker,
        following=following.value.total if following.value else None,
        more=ask.url(cursor=more) if more else None,
        is_first=cursor is None,
    )


async def see_author(ask: Ask) -> AuthorView:
    """An author's own posts, or who follows him."""
    feed, author = ask.service("feed"), ask.query.text("author", most=128).strip()
    board = ask.query.choice("list", AUTHOR_BOARDS, "posts")
    if not author:
        return AuthorView(author=author, board=board)
    cursor = ask.query.text("cursor", most=512) or None
    page: Found[Page] = NOTHING
    if board == "posts":
        followers = await attempt(feed.follows.followers(author, 1))
        page = await attempt(feed.pages.author_posts(author, POSTS_SHOWN, cursor=cursor))
        more = page.value.next if page.value else None
    else:
        followers = await attempt(feed.follows.followers(author, PEOPLE_SHOWN, cursor=cursor))
        more = followers.value.next if followers.value else None
    return AuthorView(
        author=author,
        board=board,
        page=page,
        people=followers,
        followers=followers.value.total if followers.value else None,
        more=ask.url(cursor=more) if more else None,
    )


async def see_why(ask: Ask) -> WhyView:
    """Why a viewer sees a post or not."""
    viewer, post = (ask.query.text(name, most=128).strip() for name in ("viewer", "post"))
    is_asked = bool(viewer and post)
    why = await attempt(ask.service("feed").pages.why(viewer, post)) if is_asked else None
    return WhyView(viewer=viewer, post=post, why=why)


async def see_index(ask: Ask) -> IndexView:
    """How each shard of the index stands."""
    feed = ask.service("feed")
    return IndexView(
        shards=await attempt(feed.index.stats()),
        index_for_s=feed.config.index_for_s,
        keep_for_s=feed.config.keep_for_s,
    )


async def _people(feed: Any, viewer: str, board: str, *, cursor: str | None) -> People:
    """Raises: whatever the verb raises."""
    found: People
    if board == "following":
        found = await feed.follows.following(viewer, PEOPLE_SHOWN, cursor=cursor)
    else:
        kind = MuteOrBlock.MUTE if board == "muted" else MuteOrBlock.BLOCK
        found = await feed.follows.list_kind(viewer, kind, PEOPLE_SHOWN, cursor=cursor)
    return found
