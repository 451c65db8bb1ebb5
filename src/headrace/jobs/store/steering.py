"""What a person does to jobs, one or many: each call is one statement, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engines.postgres import Runner
from headrace.jobs.store.sql import SQL


async def cancel_jobs(runner: Runner, ids: Sequence[int]) -> list[int]:
    """Cancel those of the jobs that wait; which they were."""
    return list(await runner.value(SQL.end_waiting, ids=list(ids), is_kept=True))


async def retry_jobs(
    runner: Runner, ids: Sequence[int], states: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Make those of the jobs ready that ended in `states`: which, and which stay since their key is taken."""
    row: Any = await runner.one(SQL.retry_jobs, ids=list(ids), states=list(states))
    return list(row["retried"] or ()), list(row["taken"] or ())


async def delete_jobs(runner: Runner, ids: Sequence[int], states: Sequence[str]) -> list[int]:
    """Remove those of the jobs for good that are in `states`, leased ones never; which they were."""
    return list(await runner.value(SQL.delete_jobs, ids=list(ids), states=list(states)))
