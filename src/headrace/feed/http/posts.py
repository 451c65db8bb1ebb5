"""Routes of posts: add, show, remove."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.feed.http.scopes import POSTS_MAX, READ, WRITE
from headrace.feed.model import FeedId, NewPost, Post
from headrace.feed.service import Feed


class PostToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A post: an id of the caller's, its author, its moment (now if left out; a later one waits), what goes to handlers."""

    author: FeedId
    id: str
    at: datetime | None = None
    ref: str | None = None


@post(
    "/v1/feed/posts",
    operation_id="addPosts",
    summary="Add one post or many",
    opt={**WRITE, "items_max": POSTS_MAX},
)
async def add_posts(
    feed: NamedDependency[Feed], data: JSONBody[PostToAdd | list[PostToAdd]]
) -> list[Post]:
    """Add a post or up to 1,000, all or none; from the answer on they are in the feeds of all followers.

    One that is there already stays as it is, so a call may be repeated. `at` may lie in the past (imports) or ahead:
    then it is shown at that moment.
    """
    given = data if isinstance(data, list) else [data]
    return await feed.posts([NewPost(**msgspec.structs.asdict(one)) for one in given])


@get(
    "/v1/feed/posts/{id:str}",
    operation_id="getFeedPost",
    summary="Show a post",
    opt=READ,
)
async def get_post(
    feed: NamedDependency[Feed],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
) -> Post:
    """A post as it is kept, also one that waits for its moment."""
    return await feed.find(id)


@delete(
    "/v1/feed/posts/{id:str}",
    operation_id="deletePost",
    summary="Remove a post",
    opt=WRITE,
)
async def delete_post(
    feed: NamedDependency[Feed],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
) -> None:
    """Remove a post: no page shows it from the answer on, and handlers of deletions are told. Gone already is as well."""
    await feed.delete(id)


ROUTES: Final[list[Any]] = [add_posts, get_post, delete_post]
