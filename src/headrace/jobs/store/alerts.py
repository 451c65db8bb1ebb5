"""Alerts in PostgreSQL: one row a time that a rule was broken."""

from __future__ import annotations

from headrace.engines.postgres import Runner
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.store.sql import SQL


async def raise_alert(runner: Runner, rule: str, subject: str, text: str) -> Alert | None:
    """Note that a rule is broken; None where that is noted already."""
    row = await runner.one(SQL.raise_alert, rule=rule, subject=subject, text=text)
    return Alert(rule=rule, subject=subject, text=text, **row) if row is not None else None


async def clear_alert(runner: Runner, rule: str, subject: str) -> Alert | None:
    """Note that a rule is kept again; None where it was not known as broken."""
    row = await runner.one(SQL.clear_alert, rule=rule, subject=subject)
    return Alert(rule=rule, subject=subject, **row) if row is not None else None


async def find_alerts(runner: Runner, *, is_open: bool, alerts_max: int) -> list[Alert]:
    """Alerts, newest first; with `is_open` only those not cleared."""
    rows = await runner.all(SQL.alerts, is_open=is_open, alerts_max=alerts_max)
    return [Alert(**row) for row in rows]


async def count_open_alerts(runner: Runner) -> int:
    """How many alerts are open."""
    [row] = await runner.all(SQL.count_open_alerts)
    return int(row["alerts"])


async def drop_alerts(runner: Runner, *, kept_s: float) -> int:
    """Forget cleared alerts that were kept long enough; how many."""
    return await runner.run(SQL.drop_alerts, kept_s=kept_s)


async def unsent_alerts(
    runner: Runner, *, age_s: float, alerts_max: int
) -> list[tuple[Alert, bool]]:
    """What the webhook has not taken yet, none older than `age_s`; true: that it was raised, else that it was cleared."""
    rows = await runner.all(SQL.unsent_alerts, age_s=age_s, alerts_max=alerts_max)
    found = []
    for row in rows:
        fields = dict(row)
        is_raise = not fields.pop("is_raise_sent")
        found.append((Alert(**fields), is_raise))
    return found


async def mark_sent(runner: Runner, alert_id: int, *, is_raise: bool) -> None:
    """Note that the webhook took it."""
    await runner.run(SQL.mark_sent, alert=alert_id, is_raise=is_raise)
