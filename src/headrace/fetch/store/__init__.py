"""The truth of fetch in PostgreSQL: one function a named query, values in, values out.

Takes whatever runs a query, the pool or a caller's transaction; begins no transaction itself.
"""

from __future__ import annotations

from headrace.fetch.store import (
    customers,
    links,
    photos,
    problems,
    results,
    runs,
    schemas,
    sources,
    speeds,
    webhooks,
)

__all__ = [
    "customers",
    "links",
    "photos",
    "problems",
    "results",
    "runs",
    "schemas",
    "sources",
    "speeds",
    "webhooks",
]
