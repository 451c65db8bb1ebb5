"""The truth of jobs in PostgreSQL: one function a named query, rows in, model out.

Takes whatever runs a query, the pool or a caller's transaction; begins no transaction itself. The moves that
must hold together are functions of the database (see `sql/migrations`), so each is one round trip.
"""

from __future__ import annotations

from headrace.jobs.store import (
    alerts,
    backlog,
    crons,
    fleet,
    groups,
    hosts,
    kept,
    lanes,
    leases,
    lookup,
    minutes,
    queues,
    results,
    steering,
)

__all__ = [
    "alerts",
    "backlog",
    "crons",
    "fleet",
    "groups",
    "hosts",
    "kept",
    "lanes",
    "leases",
    "lookup",
    "minutes",
    "queues",
    "results",
    "steering",
]
