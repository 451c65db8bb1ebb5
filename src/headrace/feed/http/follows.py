"""Routes of follows: one, many, all; and who follows whom."""

from __future__ import annotations

from typing import Annotated, Any, Final

from litestar import Request, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.feed.errors import UnclearUnfollow
from headrace.feed.http.scopes import AUTHORS_MAX, READ, WRITE
from headrace.feed.http.shown import Changed, split_ids, with_link
from headrace.feed.model import FeedId
from headrace.feed.service import Feed
from headrace.feed.shown import PeopleShown, people_shown
from headrace.kernel.routes import PAGE_ROWS_MAX

FOLLOWS: Final = "/v1/feed/viewers/{viewer:str}/follows"


@put(f"{FOLLOWS}/{{author:str}}", operation_id="follow", summary="Follow an author", opt=WRITE)
async def follow(
    feed: NamedDependency[Feed], viewer: FromPath[str], author: FromPath[str]
) -> Changed:
    """Follow an author: his posts, also earlier ones, are on the next page."""
    return Changed(changed=await feed.follow(viewer, author))


@delete(
    f"{FOLLOWS}/{{author:str}}",
    operation_id="unfollow",
    summary="Unfollow an author",
    status_code=200,
    opt=WRITE,
)
async def unfollow(
    feed: NamedDependency[Feed], viewer: FromPath[str], author: FromPath[str]
) -> Changed:
    """Unfollow an author: none of his posts is on the next page."""
    return Changed(changed=await feed.unfollow(viewer, author))


@post(
    FOLLOWS,
    operation_id="followMany",
    summary="Follow many authors",
    status_code=200,
    opt={**WRITE, "items_max": AUTHORS_MAX},
)
async def follow_many(
    feed: NamedDependency[Feed], viewer: FromPath[str], data: JSONBody[list[FeedId]]
) -> Changed:
    """Follow up to 10,000 authors, all or none."""
    return Changed(changed=await feed.follow(viewer, data))


@delete(
    FOLLOWS,
    operation_id="unfollowMany",
    summary="Unfollow many authors, or all",
    status_code=200,
    opt=WRITE,
)
async def unfollow_many(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    *,
    authors: FromQuery[str | None] = None,
    is_all: Annotated[bool, QueryParameter(name="all")] = False,
) -> Changed:
    """Unfollow `authors=a,b,c`, or with `all=true` everyone.

    Follows do not come back: a misspelt parameter, a repeated one or a body is refused, not taken for all.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    has_body = bool(await request.body())
    is_clear = given in (["authors"], ["all"]) and (authors is not None or is_all)
    if has_body or not is_clear:
        what = "a body" if has_body else ", ".join(given) or "nothing"
        raise UnclearUnfollow(
            f"whom viewer {viewer[:128]!r} unfollows is not clear from {what[:200]}: give ?authors=a,b,c once, or"
            " ?all=true for everyone; nothing was changed"
        )
    if authors is None:
        return Changed(changed=await feed.unfollow_all(viewer))
    return Changed(changed=await feed.unfollow(viewer, split_ids(authors)))


@get(FOLLOWS, operation_id="listFollowing", summary="List whom a viewer follows", opt=READ)
async def list_following(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    cursor: FromQuery[str | None] = None,
) -> Response[PeopleShown]:
    """Whom a viewer follows, latest first, and how many they are; muted and blocked ones included."""
    people = await feed.following(viewer, limit, cursor=cursor)
    return with_link(request, people_shown(people), limit=limit)


@get(
    "/v1/feed/authors/{author:str}/followers",
    operation_id="listFollowers",
    summary="List who follows an author",
    opt=READ,
)
async def list_followers(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    author: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    cursor: FromQuery[str | None] = None,
) -> Response[PeopleShown]:
    """Who follows an author, latest first, and how many they are."""
    people = await feed.followers(author, limit, cursor=cursor)
    return with_link(request, people_shown(people), limit=limit)


ROUTES: Final[list[Any]] = [
    follow,
    unfollow,
    follow_many,
    unfollow_many,
    list_following,
    list_followers,
]
