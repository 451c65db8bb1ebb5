"""Jobs in PostgreSQL: the named queries whose arguments or rows need a conversion.

Each function takes a pool or a caller's transaction and begins no transaction itself. Changes that
belong together are functions of the database (`sql/migrations`), so each is one round trip.
"""

from __future__ import annotations

from headrace.jobs.store import fleet, jobs, leases, queues, workflows

__all__ = ["fleet", "jobs", "leases", "queues", "workflows"]
