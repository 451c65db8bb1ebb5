"""The verbs of jobs, by what they are about. `Jobs` is the door to all of them."""

from __future__ import annotations

from headrace.jobs.service.jobs import Jobs

__all__ = ["Jobs"]
