"""Queues in PostgreSQL: who is known, where its lanes belong, what waits."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engines.postgres import Runner
from penstock.jobs.model import QueueStatus
from penstock.jobs.store.sql import SQL


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue as it is stored."""

    id: int
    name: str
    limiter: str


async def declare_queues(runner: Runner, names: list[str], limiters: list[str]) -> None:
    """Store queues that are not yet stored; existing ones stay as they are."""
    await runner.run(SQL.declare_queues, names=names, limiters=limiters)


async def find_queues(runner: Runner, names: list[str] | None = None) -> list[QueueRow]:
    """The stored ones of `names`, or every queue."""
    rows = await runner.all(SQL.find_queues, names=names)
    return [QueueRow(row["id"], row["name"], row["limiter"]) for row in rows]


async def change_limiter(runner: Runner, queue_id: int, limiter: str) -> bool:
    """Whether the queue could be given `limiter`: not once jobs of it were in lanes."""
    return await runner.value(SQL.change_limiter, queue=queue_id, limiter=limiter) is not None


async def queue_statuses(runner: Runner, queue: str | None = None) -> list[QueueStatus]:
    """Every queue with its backlog, or the one of that name."""
    rows = await runner.all(SQL.queue_statuses, queue=queue)
    return [
        QueueStatus(
            queue=row["name"],
            limiter=row["limiter"],
            paused=row["paused"],
            ready=row["ready"],
            scheduled=row["scheduled"],
            leased=row["leased"],
            failed=row["failed"],
            oldest_ready_age_s=row["oldest_ready_age_s"],
        )
        for row in rows
    ]


async def set_paused(runner: Runner, queue: str, *, is_paused: bool) -> bool:
    """Whether there is such a queue."""
    return await runner.one(SQL.set_paused, queue=queue, is_paused=is_paused) is not None


async def hint_queue(runner: Runner, queue_id: int) -> None:
    """Wake workers that listen."""
    await runner.run(SQL.hint_queue, queue=str(queue_id))
