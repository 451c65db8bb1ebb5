"""Pages and lists as HTTP and `--json` show them: posts with names for their parts, cursors by their name."""

from __future__ import annotations

from datetime import datetime

import msgspec

from headrace.feed.model import FeedId, Page, PagePost, People, Person


class PostShown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A post on a page, and its moment in the feed."""

    id: str
    author: FeedId
    at: datetime


class PageShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Posts, newest first; no `next_cursor`: that was all.

    `newest` is the place of the first one, for `since` and the read marker. `is_slow`: read from PostgreSQL, since Valkey
    is away or being filled, or has no posts of that age.
    """

    posts: list[PostShown]
    next_cursor: str | None = None
    newest: str | None = None
    is_slow: bool = False


class PeopleShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a list, latest first, and how long the list is; no `next_cursor`: that was all."""

    people: list[Person]
    total: int
    next_cursor: str | None = None


def post_shown(post: PagePost) -> PostShown:
    """A post as it is answered."""
    return PostShown(id=post.id, author=post.author, at=post.at)


def page_shown(page: Page) -> PageShown:
    """A page as it is answered."""
    return PageShown(
        posts=[post_shown(post) for post in page.posts],
        next_cursor=page.next,
        newest=page.newest,
        is_slow=page.is_slow,
    )


def people_shown(people: People) -> PeopleShown:
    """A list as it is answered."""
    return PeopleShown(people=people.people, total=people.total, next_cursor=people.next)
