"""What handlers returned, and how jobs ended that returned nothing."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engines.postgres import Runner
from headrace.jobs.store.sql import SQL


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended: `done` with a result, if there was one, or otherwise with an error."""

    state: str
    error: str
    result: bytes | None


async def find_ending(runner: Runner, job_id: int) -> Ending | None:
    """How the job ended, if it did and that is kept."""
    row = await runner.one(SQL.find_ending, job=job_id)
    return None if row is None else Ending(row["state"], row["error"], row["result"])
