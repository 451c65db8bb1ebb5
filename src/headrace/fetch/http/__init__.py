"""The HTTP API of fetch, under `/v1/fetch`: each route parses, calls one verb and answers."""

from __future__ import annotations

from typing import Any, Final

from headrace.fetch.http import (
    catalogues,
    consumers,
    customers,
    hosts,
    items,
    reports,
    results,
    runs,
    schemas,
    urls,
    webhooks,
)

ROUTES: Final[list[Any]] = [
    *customers.ROUTES,
    *catalogues.ROUTES,
    *runs.ROUTES,
    *schemas.ROUTES,
    *reports.ROUTES,
    *items.ROUTES,
    *hosts.ROUTES,
    *results.ROUTES,
    *consumers.ROUTES,
    *webhooks.ROUTES,
    *urls.ROUTES,
]
