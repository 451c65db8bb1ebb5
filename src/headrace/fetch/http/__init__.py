"""HTTP API of fetch under `/v1/fetch`: each route parses, calls one method and responds."""

from __future__ import annotations

from typing import Any, Final

from headrace.fetch.http import catalogues, customers, moderation, runs, sellers
from headrace.kernel.routes import routes_in

ROUTES: Final[list[Any]] = routes_in(
    vars(customers), vars(catalogues), vars(runs), vars(sellers), vars(moderation)
)
