"""Crons in PostgreSQL. Its clock alone decides when a cron is due."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec

from headrace.engines.postgres import Row, Runner
from headrace.jobs.crons import Cron, NewCron
from headrace.jobs.sql import SQL


@dataclass(frozen=True, slots=True)
class DueCron:
    """A due, locked cron with the time of the database."""

    cron: NewCron
    due_at: datetime
    now_at: datetime


async def find_crons(runner: Runner, name: str | None = None) -> list[Cron]:
    """Every cron by name, or the one called `name`."""
    return [_cron(row) for row in await runner.all(SQL.crons, name=name)]


async def database_now(runner: Runner) -> datetime:
    """The database time, which decides what is due."""
    now_at: datetime = await runner.value(SQL.database_now)
    return now_at


async def add_cron(runner: Runner, cron: NewCron, next_at: datetime) -> bool:
    """Store a cron. Return whether the name was free."""
    return await runner.one(SQL.add_cron, **_fields(cron), next_at=next_at) is not None


async def declare_cron(runner: Runner, cron: NewCron, next_at: datetime) -> None:
    """Store a cron declared by code. An unchanged schedule keeps its next moment."""
    await runner.run(SQL.declare_cron, **_fields(cron), next_at=next_at)


async def change_cron(runner: Runner, cron: NewCron, next_at: datetime, *, is_paused: bool) -> bool:
    """Replace an API cron. Return whether it existed."""
    row = await runner.one(SQL.change_cron, **_fields(cron), next_at=next_at, is_paused=is_paused)
    return row is not None


async def pause_cron(runner: Runner, name: str, *, error: str | None = None) -> bool:
    """Pause a cron, with `error` if it pauses itself. Return whether it existed."""
    return await runner.one(SQL.pause_cron, name=name, error=error) is not None


async def resume_cron(runner: Runner, name: str, next_at: datetime) -> bool:
    """Resume a paused cron at `next_at`. Return whether it was paused."""
    return await runner.one(SQL.resume_cron, name=name, next_at=next_at) is not None


async def remove_cron(runner: Runner, name: str, *, forgotten_s: float) -> bool:
    """Delete a cron that no running code declares. Return whether it existed."""
    return await runner.one(SQL.remove_cron, name=name, forgotten_s=forgotten_s) is not None


async def drop_undeclared(runner: Runner, *, kept_s: float) -> int:
    """Delete crons that no running code has declared for `kept_s`. Return how many."""
    return await runner.run(SQL.drop_undeclared, kept_s=kept_s)


async def lock_due_cron(runner: Runner, *, forgotten_s: float, idle_s_max: float) -> DueCron | None:
    """Lock a due cron until the transaction ends.

    The server ends the transaction after `idle_s_max` without a statement.
    """
    await runner.one(SQL.bound_idle, milliseconds=str(int(idle_s_max * 1000)))
    row = await runner.one(SQL.lock_due_cron, forgotten_s=forgotten_s)
    if row is None:
        return None
    cron = NewCron(
        name=row["name"],
        spec=row["spec"],
        tz=row["tz"],
        queue=row["queue"],
        payload=msgspec.json.decode(row["payload"]),
        priority=row["priority"],
    )
    return DueCron(cron, row["next_at"], row["now_at"])


async def move_cron(runner: Runner, name: str, *, job_id: int, next_at: datetime) -> None:
    """Record the job of this moment and the next moment."""
    await runner.run(SQL.move_cron, name=name, job=job_id, next_at=next_at)


async def note_cron_job(runner: Runner, name: str, job_id: int) -> None:
    """Record a job that an operator started."""
    await runner.run(SQL.note_cron_job, name=name, job=job_id)


def _fields(cron: NewCron) -> dict[str, object]:
    return {
        "name": cron.name,
        "spec": cron.spec,
        "tz": cron.tz,
        "queue": cron.queue,
        "payload": msgspec.json.encode(cron.payload),
        "priority": cron.priority,
    }


def _cron(row: Row) -> Cron:
    return Cron(
        name=row["name"],
        spec=row["spec"],
        tz=row["tz"],
        queue=row["queue"],
        payload=msgspec.json.decode(row["payload"]),
        priority=row["priority"],
        next_at=row["next_at"],
        last_at=row["last_at"],
        last_job=row["last_job"],
        paused=row["paused"],
        source=row["source"],
        error=row["error"],
    )
