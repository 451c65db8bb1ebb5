"""The HTTP API of jobs. Each route parses its input, calls one verb and returns the result."""

from __future__ import annotations

from typing import Any, Final

from headrace.jobs.http import fleet, jobs, queues

ROUTES: Final[list[Any]] = [*jobs.ROUTES, *queues.ROUTES, *fleet.ROUTES]
