"""The HTTP API of the feed: each route parses, calls one verb and answers.

Pages are asked thousands of times a second, so they carry a fast path (`kernel.hot`) that answers plain requests without
Litestar; both ways go through the same verb and encode the same value. Viewers and authors are numbers or names, as text in a
path and as either in a body.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.feed.http import bars, follows, live, pages, posts, upkeep

ROUTES: Final[list[Any]] = [
    *pages.ROUTES,
    *live.ROUTES,
    *posts.ROUTES,
    *follows.ROUTES,
    *bars.ROUTES,
    *upkeep.ROUTES,
]
