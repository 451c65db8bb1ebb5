"""Counts of queues that a test makes up, as claims, settlements and hosts insert them."""

from __future__ import annotations

import json

from headrace.engines.postgres import Runner
from headrace.engines.sql import compile_query
from headrace.jobs.sql import SQL

COUNT = compile_query(
    "count",
    "-- Count what happened to jobs of a queue.\n"
    "INSERT INTO headrace.job_count SELECT r.* FROM jsonb_populate_record(NULL::headrace.job_count,"
    " jsonb_build_object('at', now(), 'queue', :queue::integer) || :counted::text::jsonb) r",
)


async def add_counts(postgres: Runner, queue_id: int, **counted: float) -> None:
    """Count jobs by fields of a minute such as `done`, and add them up as a sweep does."""
    await postgres.run(COUNT, queue=queue_id, counted=json.dumps(counted))
    await postgres.value(SQL.fold_counts, rows_max=100)
