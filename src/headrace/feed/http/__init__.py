"""HTTP API of the feed. Each route parses, calls one verb and answers.

Pages also have a fast path (`kernel.routes`), which answers plain requests without Litestar. Both
paths call the same verb and encode the same value. Viewers and authors are numbers or text: text
in a path, either one in a body.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.feed.http import follows, posts
from headrace.kernel.routes import routes_in

ROUTES: Final[list[Any]] = [*routes_in(vars(posts), vars(follows)), *follows.KIND_ROUTES]
