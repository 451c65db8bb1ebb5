"""The model of what the jobs room has in PostgreSQL: its tables, and a function per statement."""

from __future__ import annotations

from functools import partial

from verification.simulation.jobs import claim, crons, enqueue, fleet, lanes, settle
from verification.simulation.jobs.tables import STATEMENTS, JobsTables
from verification.simulation.postgres import PostgresModel

PARTS = (enqueue, lanes, settle, claim, crons, fleet)
"""The modules whose import declares the statements."""


def add_jobs(model: PostgresModel) -> JobsTables:
    """Add the tables and statements of the jobs room to a server."""
    tables = JobsTables(model)
    for query, contract in STATEMENTS:
        model.on(query)(partial(contract, tables))
    return tables
