"""What the routes of the feed share: counts of what changed, and where a list goes on."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from litestar import Request, Response


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """How many are new, or gone; what was so already is not counted."""

    changed: int


def link_of(path: str, *, limit: int, cursor: str, since: str | None = None) -> str:
    """The value of Link for the next page."""
    asked: dict[str, Any] = {"limit": limit, "cursor": cursor}
    if since is not None:
        asked["since"] = since
    return f'<{path}?{urlencode(asked)}>; rel="next"'


def with_link(
    request: Request[Any, Any, Any], answer: Any, *, limit: int, since: str | None = None
) -> Response[Any]:
    """An answer with a `next_cursor`, and the Link that says the same."""
    if answer.next_cursor is None:
        return Response(answer)
    path = quote(request.url.path, safe="/:@~")
    link = link_of(path, limit=limit, cursor=answer.next_cursor, since=since)
    return Response(answer, headers={"link": link})


def split_ids(text: str) -> list[str]:
    """The ids of `a,b,c`."""
    return text.split(",")
