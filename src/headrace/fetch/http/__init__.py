"""HTTP API of fetch under `/v1/fetch`: each route parses, calls one method and responds."""

from __future__ import annotations

from typing import Any, Final

from headrace.fetch.http import catalogues, customers, items, runs

ROUTES: Final[list[Any]] = [
    *customers.ROUTES,
    *catalogues.ROUTES,
    *runs.ROUTES,
    *items.ROUTES,
]
