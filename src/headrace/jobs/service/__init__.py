"""The services of jobs by topic. `Jobs` has the verbs of jobs; the topics are its attributes."""

from __future__ import annotations

from headrace.jobs.service.jobs import Jobs

__all__ = ["Jobs"]
