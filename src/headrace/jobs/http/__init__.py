"""The HTTP API of jobs. Each route parses its input, calls one verb and returns the result."""

from __future__ import annotations

from typing import Any, Final

from headrace.jobs.http import fleet, jobs, queues, workflows
from headrace.kernel.routes import routes_in

ROUTES: Final[list[Any]] = routes_in(vars(jobs), vars(queues), vars(fleet), vars(workflows))
