"""Scopes of the routes of views, and what requests of web pages may say."""

from __future__ import annotations

from typing import Any, Final

from penstock.views.errors import InvalidHit

HIT: Final = {"scope": "views:hit", "for_pages": True}
"""A publishable key (`?k=`) will do."""
READ: Final = {"scope": "views:read"}
WRITE: Final = {"scope": "views:write"}


def is_from_page(request: Any) -> bool:
    """Whether the request came with a key that all can read."""
    return bool(getattr(request.scope.get("auth"), "is_publishable", False))


def require_weight(n: int, *, from_page: bool) -> int:
    """`n`, unless a page anybody can write asks for more than one view a hit. Raises: InvalidHit."""
    if from_page and n != 1:
        raise InvalidHit(
            "n", n, "1 with a publishable key: only a secret token may give a hit weight"
        )
    return n
