"""Queues, limiters, lanes and crons in PostgreSQL, whose clock alone decides when a cron is due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from headrace.engines.postgres import Row, Runner, from_row
from headrace.jobs.crons import Cron, NewCron
from headrace.jobs.errors import QueueUnknown
from headrace.jobs.model import Lane, Limiter, QueueSettings, QueueStatus
from headrace.jobs.sql import SQL
from headrace.jobs.tasks.options import QueueDeclared
from headrace.jobs.validation import is_storable


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A stored queue, under its name or an alias."""

    id: int
    name: str
    limiter: str
    is_alias: bool = False
    needs_lane: bool = False


async def declare_queues(runner: Runner, declared: Sequence[QueueDeclared]) -> None:
    """Store the queues that code declares. Renames come first, so that waiting jobs follow."""
    pairs = [(alias, queue.name) for queue in declared for alias in queue.aliases]
    olds, names = [old for old, _ in pairs], [name for _, name in pairs]
    if pairs:
        await runner.run(SQL.rename_queues, olds=olds, names=names)
    await runner.run(SQL.declare_queues, queues=msgspec.json.encode(declared).decode())
    if pairs:
        await runner.run(SQL.declare_aliases, olds=olds, names=names)


async def find_queues(runner: Runner, names: list[str] | None = None) -> list[QueueRow]:
    """The stored queues among `names`, aliases included, or every queue."""
    rows = await runner.all(SQL.find_queues, names=names)
    return [QueueRow(**row) for row in rows]


async def require_queue(runner: Runner, name: str) -> QueueRow:
    """The stored queue of that name or alias. Raises: QueueUnknown."""
    found = await find_queues(runner, [name]) if is_storable(name) else []
    if not found:
        raise QueueUnknown(name, [row.name for row in await find_queues(runner)])
    return found[0]


async def find_settings(runner: Runner, queue: str) -> QueueSettings | None:
    """The settings of the queue with that name or alias."""
    row = await runner.one(SQL.queue_settings, queue=queue)
    return None if row is None else _settings_of(row)


async def queue_statuses(
    runner: Runner, queue: str | None = None, *, count_max: int
) -> list[QueueStatus]:
    """Every queue, or the one called `queue`, with its backlog counted up to `count_max`."""
    rows = await runner.all(SQL.queue_statuses, queue=queue, count_max=count_max)
    return [
        from_row(
            QueueStatus,
            row,
            **msgspec.structs.asdict(_settings_of(row)),
            ready=min(row["ready"], count_max),
        )
        for row in rows
    ]


def _settings_of(row: Row) -> QueueSettings:
    override = msgspec.json.decode(row["override"] or "{}")
    own = {k: value for k, value in override.items() if k != "queue" and value is not None}
    if "decisions" in own:
        own["decisions"] = msgspec.json.decode(own["decisions"])
    decisions = msgspec.json.decode(row["decisions"])
    return from_row(QueueSettings, row, queue=row["name"], overridden=own, decisions=decisions)


async def find_lanes(
    runner: Runner, limiter: str, *, lane: str | None = None, after: str = "", lanes_max: int = 1
) -> list[Lane]:
    """Lanes of the limiter by name, that were set or used: those after `after`, or `lane`."""
    rows = await runner.all(
        SQL.find_lanes, limiter=limiter, lane=lane, after=after, lanes_max=lanes_max
    )
    return [
        from_row(
            Lane,
            row,
            lane=row["name"],
            waiting=int(row["waiting"]),
            follows_limiter=not row["is_own"],
        )
        for row in rows
    ]


async def find_limiters(runner: Runner, limiter: str | None = None) -> list[Limiter]:
    """Every limiter by name, or the one called `limiter`."""
    rows = await runner.all(SQL.find_limiters, limiter=limiter)
    return [from_row(Limiter, row, limiter=row["name"]) for row in rows]


async def find_crons(runner: Runner, name: str | None = None) -> list[Cron]:
    """Every cron by name, or the one called `name`."""
    return [_cron(row) for row in await runner.all(SQL.crons, name=name)]


async def lock_due_cron(
    runner: Runner, *, forgotten_s: float, idle_s_max: float
) -> tuple[NewCron, datetime] | None:
    """Lock a due cron until the transaction ends; return it, and the moment after which it is next.

    The server ends the transaction after `idle_s_max` without a statement.
    """
    await runner.one(SQL.bound_idle, milliseconds=str(int(idle_s_max * 1000)))
    row = await runner.one(SQL.lock_due_cron, forgotten_s=forgotten_s)
    if row is None:
        return None
    return from_row(NewCron, row, payload=msgspec.json.decode(row["payload"])), row["after_at"]


def cron_fields(cron: NewCron) -> dict[str, object]:
    """The arguments of a statement that writes a cron."""
    return {
        "name": cron.name,
        "spec": cron.spec,
        "tz": cron.tz,
        "queue": cron.queue,
        "payload": msgspec.json.encode(cron.payload),
        "priority": cron.priority,
    }


def _cron(row: Row) -> Cron:
    return from_row(Cron, row, payload=msgspec.json.decode(row["payload"]))
