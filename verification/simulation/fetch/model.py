"""The model of what the fetch room has in PostgreSQL: its tables, and a function per statement."""

from __future__ import annotations

from functools import partial

from verification.simulation.fetch import photos, results, runs, staged
from verification.simulation.fetch.tables import STATEMENTS, FetchTables
from verification.simulation.jobs.tables import JobsTables
from verification.simulation.postgres import PostgresModel

PARTS = (runs, staged, photos, results)
"""The modules whose import declares the statements."""


def add_fetch(model: PostgresModel, jobs: JobsTables) -> FetchTables:
    """Add the tables and the modelled statements of the fetch room to a server."""
    tables = FetchTables(model, jobs)
    for query, contract in STATEMENTS:
        model.on(query)(partial(contract, tables))
    return tables
