"""Shared parts of the routes: scopes, limits, the number of changes, links to the next page."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec
from litestar import Request, Response

from headrace.feed.errors import TooManyAtOnce
from headrace.feed.model import AT_ONCE_MAX, POSTS_PER_CALL_MAX
from headrace.kernel.routes import ItemsMax

READ: Final = {"scope": "feed:read"}
WRITE: Final = {"scope": "feed:write"}
AUTHORS_MAX: Final = ItemsMax(
    AT_ONCE_MAX, lambda count: TooManyAtOnce("authors", count, AT_ONCE_MAX)
)
POSTS_MAX: Final = ItemsMax(
    POSTS_PER_CALL_MAX, lambda count: TooManyAtOnce("posts", count, POSTS_PER_CALL_MAX)
)


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """Number of entries that changed, without those already in the requested state."""

    changed: int


def link_of(path: str, *, limit: int, cursor: str, since: str | None = None) -> str:
    """The Link header of the next page."""
    query: dict[str, Any] = {"limit": limit, "cursor": cursor}
    if since is not None:
        query["since"] = since
    return f'<{path}?{urlencode(query)}>; rel="next"'


def with_link(
    request: Request[Any, Any, Any], answer: Any, *, limit: int, since: str | None = None
) -> Response[Any]:
    """A response with the Link header that matches its `next_cursor`."""
    if answer.next_cursor is None:
        return Response(answer)
    path = quote(request.url.path, safe="/:@~")
    link = link_of(path, limit=limit, cursor=answer.next_cursor, since=since)
    return Response(answer, headers={"link": link})
