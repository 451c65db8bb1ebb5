"""Scopes of the routes of views, and what requests of web pages may say."""

from __future__ import annotations

from typing import Any, Final

from headrace.views.errors import InvalidHit
from headrace.views.model import VIEWS_OF_HIT_MAX

HIT: Final = {"scope": "views:hit", "for_pages": True}
"""A publishable key (`?k=`) will do."""
READ: Final = {"scope": "views:read"}
WRITE: Final = {"scope": "views:write"}


def is_from_page(request: Any) -> bool:
    """Whether the request came with a key that all can read."""
    return bool(getattr(request.scope.get("auth"), "is_publishable", False))


def event_of(event: str | None, *, from_page: bool) -> str | None:
    """An event's id; those that pages send are apart, since anybody could send the one a server is about to use."""
    return f"page:{event}" if from_page and event else event


def is_whole(text: str) -> bool:
    """Whether that is a whole number as people write one; Python and JSON know others, such as `1e3`."""
    return text.isascii() and text.isdecimal()


def require_whole(n: str | None) -> None:
    """Refuse a weight that is no whole number, as it was written. Raises: InvalidHit."""
    if n is not None and not is_whole(n):
        raise InvalidHit("n", n, f"a whole number from 1 to {VIEWS_OF_HIT_MAX}")


def require_weight(n: int, *, from_page: bool) -> int:
    """`n`, unless a page anybody can write asks for more than one view a hit. Raises: InvalidHit."""
    if from_page and n != 1:
        raise InvalidHit(
            "n", n, "1 with a publishable key: only a secret token may give a hit weight"
        )
    return n
