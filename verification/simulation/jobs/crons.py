"""The contracts of crons: each moment enqueues one job."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from headrace.jobs.sql import SQL
from verification.simulation.jobs.tables import JobsTables, seconds, statement


@statement(SQL.declare_cron)
def declare_cron(t: JobsTables, *, name: str, next_at: datetime, **given: Any) -> int:
    old = t.cron.get(name)
    is_same = old is not None and all(old[one] == given[one] for one in ("spec", "tz"))
    row = {
        "name": name,
        "last_at": None,
        "last_job": None,
        "paused": False,
        "error": None,
        **(old or {}),
        **given,
        "source": "code",
        "declared_at": t.now(),
        "next_at": old["next_at"] if old is not None and is_same else next_at,
    }
    t.cron.put(name, row | {"paused": row["paused"] and row["error"] is None, "error": None})
    return 1


@statement(SQL.lock_due_cron)
def lock_due_cron(t: JobsTables, *, forgotten_s: float) -> list[Any]:
    due = [
        (row["next_at"], name)
        for name, row in t.cron.items()
        if not row["paused"]
        and row["next_at"] <= t.now()
        and not t.cron.is_locked(name)
        and row["declared_at"] > t.now() - seconds(forgotten_s)
    ]
    if not due:
        return []
    name = min(due)[1]
    t.cron.lock(name)
    row = t.cron.get(name)
    assert row is not None, "it was just read"
    return [row | {"after_at": max(row["next_at"], t.now())}]


@statement(SQL.move_cron)
def move_cron(t: JobsTables, *, name: str, job: int, next_at: datetime) -> int:
    row = t.cron.get(name)
    assert row is not None, "the transaction has locked it"
    moment = (name, row["next_at"])
    before = t.fired.get(moment)
    t.fired.put(moment, job if before is None else -1)
    t.cron.put(name, row | {"last_at": t.now(), "last_job": job, "next_at": next_at})
    return 1


@statement(SQL.pause_cron)
def pause_cron(t: JobsTables, *, name: str, error: str | None) -> list[Any]:
    row = t.cron.get(name)
    if row is None:
        return []
    t.cron.put(name, row | {"paused": True, "error": error})
    return [{"name": name}]


statement(SQL.drop_undeclared)(lambda t, kept_s: 0)
