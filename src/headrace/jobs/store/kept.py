"""Done jobs that their queues keep, with results; and how far running ones are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headrace.engines.postgres import Row, Runner
from headrace.jobs.messages import Progress
from headrace.jobs.outcomes import bounded_text
from headrace.jobs.store.sql import SQL

PROGRESS_CHARACTERS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """What a job last said of itself."""

    ratio: float
    text: str
    at: datetime


async def find_done(runner: Runner, job_id: int) -> Row | None:
    """The fields of a done job that is kept, as `lookup.job_from_row` takes them, and its `result`."""
    return await runner.one(SQL.find_done, job=job_id)


async def tend_kept(runner: Runner) -> int:
    """Make partitions ahead of need and drop old ones whole; how many of both."""
    return int(await runner.value(SQL.tend_kept))


async def drop_kept(runner: Runner, *, jobs_max: int) -> int:
    """Forget jobs that are kept in no partition of their own and whose time is over; how many."""
    return await runner.run(SQL.drop_kept, jobs_max=jobs_max)


async def tell_progress(runner: Runner, told: Sequence[tuple[int, Progress]]) -> None:
    """Write how far jobs are, each once in `told`, with its lease; nothing for one that is settled."""
    await runner.run(
        SQL.tell_progress,
        leases=[lease_id for lease_id, _ in told],
        ids=[one.job_id for _, one in told],
        ratios=[one.ratio for _, one in told],
        texts=[bounded_text(one.text, PROGRESS_CHARACTERS_MAX) for _, one in told],
    )


async def find_progress(runner: Runner, job_id: int) -> ProgressRow | None:
    """How far the job said that it is."""
    row: Any = await runner.one(SQL.find_progress, job=job_id)
    return None if row is None else ProgressRow(row["ratio"], row["text"], row["at"])
