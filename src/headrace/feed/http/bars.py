"""Routes of mutes and blocks, which are alike: whom a viewer does not want to see.

Both take effect at the next read and both leave the follow as it is, so ending them brings the posts back.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from litestar import Request, Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.feed.http.scopes import AUTHORS_MAX, READ, WRITE
from headrace.feed.http.shown import Changed, split_ids, with_link
from headrace.feed.model import Bar, FeedId
from headrace.feed.service import Feed
from headrace.feed.shown import PeopleShown, people_shown
from headrace.kernel.routes import PAGE_ROWS_MAX

MEANINGS: Final = {
    Bar.MUTE: "The viewer does not see the author's posts; the author is not told and sees all.",
    Bar.BLOCK: "Neither sees the posts of the other.",
}


def routes_of(bar: Bar) -> list[Any]:
    """The routes of one kind that change something."""
    name, meaning, path = bar.value, MEANINGS[bar], path_of(bar)

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
        return Changed(changed=await feed.bar(viewer, author, bar, is_set=True))

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
        return Changed(changed=await feed.bar(viewer, author, bar, is_set=False))

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
        return Changed(changed=await feed.bar(viewer, data, bar, is_set=True))

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
        return Changed(changed=await feed.bar(viewer, split_ids(authors), bar, is_set=False))

    return [set_one, end_one, set_many, end_many]


def list_of(bar: Bar) -> Any:
    """The route that lists one kind."""
    name = bar.value

    @get(path_of(bar), operation_id=f"list{name.title()}s", summary=f"List the {name}s", opt=READ)
    async def list_all(
        request: Request[Any, Any, Any],
        feed: NamedDependency[Feed],
        viewer: FromPath[str],
        *,
        limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PeopleShown]:
        people = await feed.barred(viewer, bar, limit, cursor=cursor)
        return with_link(request, people_shown(people), limit=limit)

    return list_all


def path_of(bar: Bar) -> str:
    """Where one kind is."""
    return f"/v1/feed/viewers/{{viewer:str}}/{bar.value}s"


ROUTES: Final[list[Any]] = [route for bar in Bar for route in (*routes_of(bar), list_of(bar))]
