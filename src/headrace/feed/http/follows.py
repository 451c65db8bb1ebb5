"""Routes of follows, mutes and blocks.

A mute or block takes effect on the next read and leaves follows unchanged, so ending it restores
the posts.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from litestar import Request, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.feed.errors import InvalidFollow
from headrace.feed.http.posts import AUTHORS_MAX, READ, WRITE, Changed, with_link
from headrace.feed.model import FeedId, MuteOrBlock, People
from headrace.feed.service import Feed
from headrace.kernel.routes import PAGE_ROWS_MAX

FOLLOWS: Final = "/v1/feed/viewers/{viewer:str}/follows"
MEANINGS: Final = {
    MuteOrBlock.MUTE: "Mute authors: the viewer does not see their posts; they are not notified.",
    MuteOrBlock.BLOCK: "Block authors: neither side sees the posts of the other.",
}


@put(f"{FOLLOWS}/{{author:str}}", opt=WRITE)
async def follow(
    feed: NamedDependency[Feed], viewer: FromPath[str], author: FromPath[str]
) -> Changed:
    """Follow an author: the next page includes the author's posts, also earlier ones."""
    return Changed(changed=await feed.follow(viewer, author))


@delete(f"{FOLLOWS}/{{author:str}}", status_code=200, opt=WRITE)
async def unfollow(
    feed: NamedDependency[Feed], viewer: FromPath[str], author: FromPath[str]
) -> Changed:
    """Unfollow an author: the next page has none of the author's posts."""
    return Changed(changed=await feed.unfollow(viewer, author))


@post(FOLLOWS, status_code=200, opt={**WRITE, "items_max": AUTHORS_MAX})
async def follow_many(
    feed: NamedDependency[Feed], viewer: FromPath[str], data: JSONBody[list[FeedId]]
) -> Changed:
    """Follow up to 10,000 authors, all or none."""
    return Changed(changed=await feed.follow(viewer, data))


@delete(FOLLOWS, status_code=200, opt=WRITE)
async def unfollow_many(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    *,
    authors: FromQuery[str | None] = None,
    is_all: Annotated[bool, QueryParameter(name="all")] = False,
) -> Changed:
    """Unfollow `authors=a,b,c`, or everyone with `all=true`.

    An unfollow cannot be undone, so unknown or repeated parameters and a body are refused.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    has_body = bool(await request.body())
    is_clear = given in (["authors"], ["all"]) and (authors is not None or is_all)
    if has_body or not is_clear:
        what = "a body" if has_body else ", ".join(given) or "nothing"
        raise InvalidFollow(
            f"unfollow by viewer {viewer[:128]!r} has {what[:200]}: use ?authors=a,b,c once, or"
            " ?all=true for everyone; nothing was changed"
        )
    if authors is None:
        return Changed(changed=await feed.follows.unfollow_all(viewer))
    return Changed(changed=await feed.unfollow(viewer, authors.split(",")))


@get(FOLLOWS, opt=READ)
async def list_following(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    cursor: FromQuery[str | None] = None,
) -> Response[People]:
    """Followed authors, latest first, with their total; includes muted and blocked ones."""
    people = await feed.follows.following(viewer, limit, cursor=cursor)
    return with_link(request, people, limit=limit)


@get("/v1/feed/authors/{author:str}/followers", opt=READ)
async def list_followers(
    request: Request[Any, Any, Any],
    feed: NamedDependency[Feed],
    author: FromPath[str],
    *,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    cursor: FromQuery[str | None] = None,
) -> Response[People]:
    """Followers of an author, latest first, with their total."""
    people = await feed.follows.followers(author, limit, cursor=cursor)
    return with_link(request, people, limit=limit)


def routes_of(kind: MuteOrBlock) -> list[Any]:
    """The routes that set or end mutes or blocks."""
    name, meaning, path = kind.value, MEANINGS[kind], path_of(kind)

    @put(
        f"{path}/{{author:str}}",
        operation_id=name,
        summary=f"{name.title()} an author",
        description=meaning,
        opt=WRITE,
    )
    async def set_one(
        feed: NamedDependency[Feed], viewer: FromPath[str], author: FromPath[str]
    ) -> Changed:
        return Changed(changed=await feed.follows.set_kind(viewer, author, kind, is_set=True))

    @delete(
        f"{path}/{{author:str}}",
        operation_id=f"un{name}",
        summary=f"End the {name} of an author",
        status_code=200,
        opt=WRITE,
    )
    async def end_one(
        feed: NamedDependency[Feed], viewer: FromPath[str], author: FromPath[str]
    ) -> Changed:
        return Changed(changed=await feed.follows.set_kind(viewer, author, kind, is_set=False))

    @post(
        path,
        operation_id=f"{name}Many",
        summary=f"{name.title()} many authors",
        description=meaning,
        status_code=200,
        opt={**WRITE, "items_max": AUTHORS_MAX},
    )
    async def set_many(
        feed: NamedDependency[Feed], viewer: FromPath[str], data: JSONBody[list[FeedId]]
    ) -> Changed:
        return Changed(changed=await feed.follows.set_kind(viewer, data, kind, is_set=True))

    @delete(
        path,
        operation_id=f"un{name}Many",
        summary=f"End the {name} of `authors=a,b,c`",
        status_code=200,
        opt=WRITE,
    )
    async def end_many(
        feed: NamedDependency[Feed], viewer: FromPath[str], authors: FromQuery[str]
    ) -> Changed:
        return Changed(
            changed=await feed.follows.set_kind(viewer, authors.split(","), kind, is_set=False)
        )

    return [set_one, end_one, set_many, end_many]


def list_of(kind: MuteOrBlock) -> Any:
    """The route that lists mutes or blocks."""
    name = kind.value

    @get(path_of(kind), operation_id=f"list{name.title()}s", summary=f"List the {name}s", opt=READ)
    async def list_all(
        request: Request[Any, Any, Any],
        feed: NamedDependency[Feed],
        viewer: FromPath[str],
        *,
        limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[People]:
        people = await feed.follows.list_kind(viewer, kind, limit, cursor=cursor)
        return with_link(request, people, limit=limit)

    return list_all


def path_of(kind: MuteOrBlock) -> str:
    """The path of mutes or blocks."""
    return f"/v1/feed/viewers/{{viewer:str}}/{kind.value}s"


KIND_ROUTES: Final[list[Any]] = [
    route for kind in MuteOrBlock for route in (*routes_of(kind), list_of(kind))
]
