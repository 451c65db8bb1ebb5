"""The HTTP API of jobs: each route parses, calls one verb and answers."""

from __future__ import annotations

from typing import Any, Final

from headrace.jobs.http import bulk, crons, fleet, jobs, lanes, queues, takes

ROUTES: Final[list[Any]] = [
    *jobs.ROUTES,
    *bulk.ROUTES,
    *takes.ROUTES,
    *queues.ROUTES,
    *lanes.ROUTES,
    *fleet.ROUTES,
    *crons.ROUTES,
]
