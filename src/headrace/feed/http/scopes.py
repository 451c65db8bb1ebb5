"""Scopes of the routes of the feed."""

from __future__ import annotations

from typing import Final

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
