"""The HTTP API of views: each route parses, calls one verb and answers.

Single hits and reads of totals are asked thousands of times a second, so these two carry a fast path (`kernel.hot`) that
answers plain requests without Litestar; both ways go through the same verbs and encode the same values.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.views.http import hits, reads, upkeep

ROUTES: Final[list[Any]] = [*hits.ROUTES, *reads.ROUTES, *upkeep.ROUTES]
