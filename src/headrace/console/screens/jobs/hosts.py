"""Hosts with the map of their slots, why slots moved, and alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.console.seeing import Ask
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.state import Decision, FleetHost, PlanHead

DECISIONS_SHOWN: Final = 100
FLOATING: Final = "floating"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGroup:
    """Slots of a host that are bound to one queue, or float; `planned` is what the plan wants."""

    queue: str | None
    slots: int
    busy: int
    planned: int | None
    busiest_s: float
    """The longest call in them now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """A host with its slots by queue, the most first."""

    host: FleetHost
    state: str
    busy: int
    groups: Sequence[SlotGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsView:
    """All hosts and the plan over them."""

    plan: PlanHead
    rows: Sequence[HostRow]
    slots: int
    bound: int
    """Those of queues; the others float, and take no room."""
    busy: int
    capacity: int
    alive: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsView:
    """A page of decisions, newest first."""

    decisions: Sequence[Decision]
    q: str
    next_url: str | None
    first_url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsView:
    """The newest alerts."""

    alerts: Sequence[Alert]
    is_open: bool


async def see_hosts(ask: Ask) -> HostsView:
    """Every host, by name."""
    state = await ask.service("jobs").fleet.state()
    rows = [_row(host) for host in sorted(state.hosts, key=lambda host: host.name)]
    alive = [row for row in rows if not row.host.is_silent]
    return HostsView(
        plan=state.plan,
        rows=rows,
        slots=sum(len(row.host.slots) for row in alive),
        bound=sum(slot.queue is not None for row in alive for slot in row.host.slots),
        busy=sum(row.busy for row in alive),
        capacity=sum(row.host.capacity for row in alive),
        alive=len(alive),
    )


async def see_decisions(ask: Ask) -> DecisionsView:
    """Why slots moved; `q` is looked for in queue and host of this page's decisions."""
    before = ask.query.number("before", 0)
    q = ask.query.text("q").strip()
    found = await ask.service("jobs").fleet.decisions(
        before=before or None, decisions_max=DECISIONS_SHOWN + 1
    )
    has_more = len(found) > DECISIONS_SHOWN
    shown = found[:DECISIONS_SHOWN]
    return DecisionsView(
        decisions=[one for one in shown if q in one.queue or q in one.host],
        q=q,
        next_url=ask.url(before=shown[-1].id) if has_more else None,
        first_url=ask.url(before=None) if before else None,
    )


async def see_alerts(ask: Ask) -> AlertsView:
    """The newest alerts; with `open` those not cleared."""
    is_open = ask.query.flag("open")
    return AlertsView(
        alerts=await ask.service("jobs").fleet.alerts(is_open=is_open), is_open=is_open
    )


def _row(host: FleetHost) -> HostRow:
    total = Counter(slot.queue for slot in host.slots)
    busy = Counter(slot.queue for slot in host.slots if slot.busy_s > 0)
    queues = [*total, *(queue for queue in host.planned if queue not in total)]
    groups = [
        SlotGroup(
            queue=queue,
            slots=total[queue],
            busy=busy[queue],
            planned=None if queue is None else host.planned.get(queue, 0),
            busiest_s=max((s.busy_s for s in host.slots if s.queue == queue), default=0.0),
        )
        for queue in queues
    ]
    state = "silent" if host.is_silent else "draining" if host.is_draining else "alive"
    return HostRow(
        host=host,
        state=state,
        busy=busy.total(),
        groups=sorted(
            groups, key=lambda group: (group.queue is None, -group.slots, group.queue or "")
        ),
    )
