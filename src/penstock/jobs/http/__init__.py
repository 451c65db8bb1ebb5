"""The HTTP API of jobs: each route parses, calls one verb and answers."""

from __future__ import annotations

from typing import Any, Final

from penstock.jobs.http import jobs, lanes, queues

ROUTES: Final[list[Any]] = [*jobs.ROUTES, *queues.ROUTES, *lanes.ROUTES]
