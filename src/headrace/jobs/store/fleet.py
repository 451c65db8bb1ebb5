"""The fleet in PostgreSQL: reports of hosts, counts, the plan and its leader, alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Row, Runner, from_row
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.plan import Move
from headrace.jobs.fleet.state import (
    Decision,
    FleetHost,
    FleetLoad,
    FleetMinute,
    HostSlot,
    HostSnapshot,
    PlanHead,
    Planned,
    QueueCounts,
    QueueFailures,
    QueueLoad,
    QueueReading,
    QueueSnapshot,
    SlotRequest,
    by_host,
)
from headrace.jobs.sql import SQL

_SLOTS = msgspec.json.Decoder(list[HostSlot])
REPORTS_GAP_S: Final = 4.0
"""Two periods of a host's reports: after a longer pause they start a new series."""


async def report_host(
    runner: Runner,
    host_id: int,
    *,
    capacity: int,
    load_per_core: float,
    cpu_pressure: float = 0.0,
    slots: Sequence[Mapping[str, Any]],
) -> bool:
    """Store a host's capacity, load and slots (dicts of `HostSlot` fields).

    Return whether the host is still registered.
    """
    row = await runner.one(
        SQL.report_host,
        host=host_id,
        gap_s=REPORTS_GAP_S,
        capacity=capacity,
        load_per_core=load_per_core,
        cpu_pressure=cpu_pressure,
        slots=_json(slots),
    )
    return row is not None


async def add_counts(runner: Runner, host_id: int, counts: Sequence[QueueCounts]) -> None:
    """Add a host's counts since its last call and fold the counts of all hosts."""
    await runner.run(
        SQL.add_counts,
        host=host_id,
        ended=sum(count.ended for count in counts),
        counts=_json(counts),
    )


async def allow_slots(
    runner: Runner, host_id: int, call: int, requests: Sequence[SlotRequest]
) -> dict[int, int | None]:
    """Request slots of queues; return the allowance by queue id. None: no maximum.

    `call` grows with each call of the host.
    """
    rows = await runner.all(SQL.allow_slots, host=host_id, call=call, requests=_json(requests))
    return {row["queue"]: row["slots"] for row in rows}


async def planned_slots(runner: Runner, host_name: str) -> Planned | None:
    """A host's part of the plan, empty if it is unknown. None: there is no plan yet."""
    row = await runner.one(SQL.planned_slots, host=host_name)
    if row is None:
        return None
    slots = msgspec.json.decode(row["slots"], type=dict[str, int])
    return Planned(version=row["version"], slots=slots, is_draining=row["is_draining"])


async def fleet_hosts(runner: Runner, *, silent_s: float) -> list[HostSnapshot]:
    """The newest row of every handler host, by name.

    Silent: no report for `silent_s` in which other hosts or the leader wrote.
    """
    rows = await runner.all(SQL.fleet_hosts, silent_s=silent_s, gap_s=REPORTS_GAP_S)
    return [
        HostSnapshot(
            shown=_host(row), queue_ids=frozenset(row["queues"]), is_written=row["is_written"]
        )
        for row in rows
    ]


async def fleet_queues(
    runner: Runner, waiting: Mapping[int, tuple[int, float]]
) -> list[QueueSnapshot]:
    """Every queue by name with its totals and leased jobs; `waiting` from `fleet_waiting`."""
    rows = await runner.all(SQL.fleet_queues)
    return [
        from_row(
            QueueSnapshot,
            row,
            is_paused=row["paused"],
            waiting=waiting.get(row["id"], (0, 0.0))[0],
            oldest_age_s=waiting.get(row["id"], (0, 0.0))[1],
        )
        for row in rows
    ]


async def fleet_waiting(runner: Runner, *, count_max: int) -> dict[int, tuple[int, float]]:
    """Due jobs, counted up to `count_max`, and age of the oldest, by queue id.

    Paused queues are left out.
    """
    rows = await runner.all(SQL.fleet_waiting, count_max=count_max)
    return {row["queue"]: (row["jobs"], row["oldest_age_s"] or 0.0) for row in rows}


async def slot_map(runner: Runner) -> dict[str, dict[str, int]]:
    """The plan's map by host and queue name."""
    rows = await runner.all(SQL.slot_map)
    return by_host((row["host"], row["name"], row["slots"]) for row in rows)


async def find_plan(runner: Runner) -> PlanHead:
    """The plan's head: leader, term, version."""
    row = await runner.one(SQL.find_plan)
    assert row is not None, "fleet_plan has one row since its migration"
    return from_row(PlanHead, row)


async def lead_fleet(runner: Runner, leader: str, *, lead_s: float) -> int | None:
    """Become or stay leader for `lead_s`. Return the term; None while another leads."""
    term = await runner.value(SQL.lead_fleet, leader=leader, lead_s=lead_s)
    return None if term is None else int(term)


async def write_plan(
    runner: Runner,
    leader: str,
    term: int,
    *,
    slots: Mapping[str, Mapping[str, int]],
    queue_ids: Mapping[str, int],
    moves: Sequence[Move],
) -> int | None:
    """Replace the map and store its decisions. Return the version; None if no longer leading."""
    rows = [
        {"host": host, "queue": queue_ids[queue], "slots": count}
        for host, there in sorted(slots.items())
        for queue, count in sorted(there.items())
        if count > 0
    ]
    version = await runner.value(
        SQL.write_plan, leader=leader, term=term, slots=_json(rows), moves=_json(moves)
    )
    return None if version is None else int(version)


async def decisions(runner: Runner, *, before: int | None, decisions_max: int) -> list[Decision]:
    """Decisions, newest first."""
    rows = await runner.all(SQL.decisions, before=before, decisions_max=decisions_max)
    return [Decision(**row) for row in rows]


def _json(rows: Sequence[Any]) -> str:
    return msgspec.json.encode(rows).decode()


def _host(row: Row) -> FleetHost:
    return from_row(FleetHost, row, slots=_SLOTS.decode(row["slots"]))


async def record_backlog(runner: Runner, *, count_max: int) -> list[QueueReading]:
    """Store the backlog of each queue in the current minute. Return it with the totals."""
    rows = await runner.all(SQL.record_backlog, count_max=count_max)
    return [QueueReading(**row) for row in rows]


async def fleet_load(runner: Runner, *, minutes: int, minutes_shown: int) -> FleetLoad:
    """Counts of each queue in the last `minutes`, and of all in each of `minutes_shown`."""
    span_s = await runner.value(SQL.load_span, minutes=minutes)
    queues = await runner.all(SQL.queue_loads, minutes=minutes)
    shown = await runner.all(SQL.fleet_minutes, minutes=minutes_shown)
    return FleetLoad(
        span_s=span_s,
        queues=[QueueLoad(**row) for row in queues],
        minutes=[FleetMinute(**row) for row in shown],
    )


async def recent_failures(runner: Runner, *, span_s: float, jobs_max: int) -> list[QueueFailures]:
    """Causes with a failure in the last `span_s`; their jobs among the newest `jobs_max`."""
    rows = await runner.all(SQL.recent_failures, span_s=span_s, jobs_max=jobs_max)
    return [QueueFailures(**row) for row in rows]


async def recent_outcomes(runner: Runner, *, minutes: int) -> dict[int, tuple[int, int]]:
    """Done and otherwise ended jobs of the last minutes, by queue id."""
    rows = await runner.all(SQL.recent_outcomes, minutes=minutes)
    return {row["queue"]: (row["done"], row["failed"]) for row in rows}


async def raise_alert(runner: Runner, rule: str, subject: str, text: str) -> Alert | None:
    """Open an alert. None if it is open already."""
    row = await runner.one(SQL.raise_alert, rule=rule, subject=subject, text=text)
    return Alert(rule=rule, subject=subject, text=text, **row) if row is not None else None


async def clear_alert(runner: Runner, rule: str, subject: str) -> Alert | None:
    """Clear an alert. None if it is not open."""
    row = await runner.one(SQL.clear_alert, rule=rule, subject=subject)
    return Alert(rule=rule, subject=subject, **row) if row is not None else None


async def find_alerts(runner: Runner, *, is_open: bool, alerts_max: int) -> list[Alert]:
    """Alerts, newest first; with `is_open` only open ones."""
    rows = await runner.all(SQL.alerts, is_open=is_open, alerts_max=alerts_max)
    return [Alert(**row) for row in rows]


async def unsent_alerts(
    runner: Runner, *, age_s: float, alerts_max: int
) -> list[tuple[Alert, bool]]:
    """Events of the last `age_s` that the webhook has not accepted. True: a raise, else a clear."""
    rows = await runner.all(SQL.unsent_alerts, age_s=age_s, alerts_max=alerts_max)
    found = []
    for row in rows:
        fields = dict(row)
        is_raise = not fields.pop("is_raise_sent")
        found.append((Alert(**fields), is_raise))
    return found
