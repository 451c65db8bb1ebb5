"""Minute statistics of queues in PostgreSQL.

Claims and settlements insert the counts of their jobs in their own transaction, so these are exact. Hosts add handler
time and slot time every 2 s: up to 2 s of a killed host's are missing. Folding adds all of it to minutes and totals.
"""

from __future__ import annotations

from datetime import datetime

from headrace.engines.postgres import Runner
from headrace.jobs.fleet.facts import QueueMinute
from headrace.jobs.fleet.load import FleetLoad, FleetMinute, QueueFailures, QueueLoad
from headrace.jobs.store.sql import SQL


async def queue_minutes(
    runner: Runner, queue_id: int, *, from_at: datetime, to_at: datetime, minutes_max: int
) -> list[QueueMinute]:
    """What the queue did from `from_at` up to before `to_at`, oldest minute first; idle minutes have no row."""
    rows = await runner.all(
        SQL.queue_minutes, queue=queue_id, from_at=from_at, to_at=to_at, minutes_max=minutes_max
    )
    return [QueueMinute(**row) for row in rows]


async def fleet_load(runner: Runner, *, minutes: int, minutes_shown: int) -> FleetLoad:
    """What each queue did in the last `minutes`, and all of them in each of the last `minutes_shown`."""
    span_s = await runner.value(SQL.load_span, minutes=minutes)
    queues = await runner.all(SQL.queue_loads, minutes=minutes)
    shown = await runner.all(SQL.fleet_minutes, minutes=minutes_shown)
    return FleetLoad(
        span_s=span_s,
        queues=[QueueLoad(**row) for row in queues],
        minutes=[FleetMinute(**row) for row in shown],
    )


async def recent_failures(runner: Runner, *, span_s: float, jobs_max: int) -> list[QueueFailures]:
    """Failures of the last `span_s`, the newest `jobs_max`, by queue and state."""
    rows = await runner.all(SQL.recent_failures, span_s=span_s, jobs_max=jobs_max)
    return [QueueFailures(**row) for row in rows]


async def recent_outcomes(runner: Runner, *, minutes: int) -> dict[int, tuple[int, int]]:
    """By id of queue how many jobs ended done, and otherwise, in the last minutes."""
    rows = await runner.all(SQL.recent_outcomes, minutes=minutes)
    return {row["queue"]: (row["done"], row["failed"]) for row in rows}


async def fold_counts(runner: Runner, *, rows_max: int) -> int:
    """Add counts that are not yet added up to minutes and totals, the oldest first; how many rows."""
    return int(await runner.value(SQL.fold_counts, rows_max=rows_max))


async def drop_minutes(runner: Runner, *, kept_s: float, rows_max: int) -> int:
    """Forget minutes that were kept long enough; how many."""
    return await runner.run(SQL.drop_minutes, kept_s=kept_s, rows_max=rows_max)
