"""The model of what the jobs room has in PostgreSQL: its tables, and a function per statement."""

from __future__ import annotations

from verification.simulation.jobs import claim, enqueue, fleet, lanes, settle
from verification.simulation.jobs.tables import JobsTables
from verification.simulation.postgres import PostgresModel


def add_jobs(model: PostgresModel) -> JobsTables:
    """Add the tables and statements of the jobs room to a server."""
    tables = JobsTables(model)
    for part in (enqueue, lanes, settle, claim, fleet):
        part.register(tables)
    return tables
