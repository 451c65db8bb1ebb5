"""The fleet: table of queues, hosts, slot decisions and alerts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from headrace.console.history import board_of
from headrace.console.model import ROWS_SHOWN
from headrace.console.stored import attempt_or_last
from headrace.console.views import PanelData, ViewContext, attempt
from headrace.jobs.fleet.alerts import HOST_RULE, SHORT_OLDEST_S
from headrace.jobs.fleet.state import (
    FleetHost,
    FleetLoad,
    FleetState,
    PlanHead,
    QueueLoad,
)
from headrace.jobs.model import QueueStatus
from headrace.jobs.tasks.options import SLOTS_MAX

SORTS: Final = (
    *("load", "name", "importance", "waiting", "leased", "failed", "oldest", "wait", "slots"),
)
QUEUE_STATES: Final = ("active", "waiting", "paused", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A row of the fleet table; None is unknown."""

    status: QueueStatus
    load: float | None
    slots_mean: float = 0.0
    run_s: float | None = None
    """Slot time per job; None if none ran in a slot."""
    wait_s: float | None = None
    wait_max_s: float | None = None
    done_per_s: float = 0.0
    has_run: bool = False
    """Whether jobs ran in the span of the load figure."""
    is_floating: bool = False
    """It ran without an assigned slot, so its load is a share of no slots."""

    @property
    def state(self) -> str:
        """State in one or two words."""
        queue = self.status
        if queue.paused:
            return "paused"
        if not queue.is_known:
            return "for people" if queue.decisions else "no worker"
        if self.is_behind:
            return "behind"
        if queue.leased or (queue.ready and self.done_per_s):
            return "running"
        if queue.ready:
            return "waiting"
        return "caught up" if self.has_run else "idle"

    @property
    def is_behind(self) -> bool:
        """Whether it needs more slots than it has, and a job waits longer than a burst takes."""
        waits_s = self.status.oldest_ready_age_s or 0.0
        return self.load is not None and self.load > 1 and waits_s > SHORT_OLDEST_S

    @property
    def slots_limits(self) -> str:
        """Minimum and maximum of slots, as text."""
        least, most = self.status.slots_min, self.status.slots_max
        if most >= SLOTS_MAX:
            return f"at least {least}" if least else "any"
        return f"{least} to {most}"

    @property
    def is_on_floating(self) -> bool:
        """Whether jobs are in progress although no slot is assigned to the queue."""
        return self.status.is_known and self.status.leased > 0 and not self.status.slots

    @property
    def tone(self) -> str:
        """Tone of the state."""
        no_worker = "warn" if self.status.ready else ""
        tones = {"paused": "warn", "no worker": no_worker, "behind": "bad", "running": "good"}
        return tones.get(self.state, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRead:
    """All queues and their recent load, of one moment, so that cards and table agree."""

    queues: Sequence[QueueStatus]
    load: FleetLoad


async def read_fleet(context: ViewContext) -> FleetRead:
    """Read queues and load in one snapshot of the database."""
    async with context.house.engines.postgres.transaction(is_snapshot=True) as tx:
        queues = await context.jobs.queues.all(tx=tx)
        return FleetRead(queues=queues, load=await context.jobs.fleet.load(tx=tx))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """The cards of the fleet, computed from the rows of its table before they are filtered."""

    rows: Sequence[QueueRow]
    span_s: float

    @property
    def waiting(self) -> int:
        """Jobs that are due and not started, without those that people decide."""
        return sum(row.status.ready for row in self.rows if not row.status.decisions)

    @property
    def waiting_is_capped(self) -> bool:
        """Whether more of them wait than were counted."""
        return any(row.status.ready_is_capped for row in self.rows if not row.status.decisions)

    @property
    def waiting_for_people(self) -> int:
        """Jobs that are due and that people decide."""
        return sum(row.status.ready for row in self.rows if row.status.decisions)

    @property
    def waiting_for_people_is_capped(self) -> bool:
        """Whether more of them wait than were counted."""
        return any(row.status.ready_is_capped for row in self.rows if row.status.decisions)

    @property
    def leased(self) -> int:
        """Jobs in progress."""
        return sum(row.status.leased for row in self.rows)

    @property
    def failed(self) -> int:
        """Failed and quarantined jobs that are kept."""
        return sum(row.status.failed for row in self.rows)

    @property
    def failed_is_capped(self) -> bool:
        """Whether there are more than were counted."""
        return any(row.status.failed_is_capped for row in self.rows)

    @property
    def done_per_s(self) -> float:
        """Done jobs per second of the span."""
        return sum(row.done_per_s for row in self.rows)

    @property
    def slots(self) -> int:
        """Slots that belong to queues."""
        return sum(row.status.slots for row in self.rows)


async def view_fleet(context: ViewContext) -> dict[str, Any]:
    """Queues that match the filter, sorted.

    While PostgreSQL does not answer: the last queues that this console read, and the rate of this
    machine, whose roles write it to a folder.
    """
    q = context.query.text("q").strip()
    state = context.query.choice("state", QUEUE_STATES, "")
    sort = context.query.choice("sort", SORTS, "load")
    history, read = await asyncio.gather(
        board_of(context, "jobs"),
        attempt_or_last(context, "fleet", partial(read_fleet, context)),
    )
    fleet = read.map(
        lambda read: FleetFigures(rows=rows_of(read.queues, read.load), span_s=read.load.span_s)
    )
    here_per_s = None
    if fleet.error is not None:
        await context.rates.read()
        here_per_s = context.rates.rate_per_s("jobs_finished_total", 'outcome="done"')
    all_rows = () if fleet.value is None else fleet.value.rows
    rows = [row for row in all_rows if q.lower() in row.status.queue.lower() and _fits(row, state)]
    return {
        "history": history,
        "fleet": fleet,
        "here_per_s": here_per_s,
        "behind_s": SHORT_OLDEST_S,
        "rows": sorted(rows, key=lambda row: _key(row, sort)),
        "q": q,
        "state": state,
        "sort": sort,
    }


def rows_of(queues: Sequence[QueueStatus], load: FleetLoad) -> list[QueueRow]:
    """Queues joined with their recent load."""
    did: Mapping[str, QueueLoad] = {one.queue: one for one in load.queues}
    return [_queue_row(queue, did.get(queue.queue), load.span_s) for queue in queues]


def _queue_row(queue: QueueStatus, did: QueueLoad | None, span_s: float) -> QueueRow:
    if did is None:
        return QueueRow(status=queue, load=None if queue.ready else 0.0)
    return QueueRow(
        status=queue,
        slots_mean=did.slot_s / span_s,
        load=did.ratio(queue.ready),
        run_s=did.run_mean_s if did.calls else None,
        wait_s=did.wait_mean_s,
        wait_max_s=None if did.wait_mean_s is None else did.wait_max_s,
        done_per_s=did.done / span_s,
        has_run=did.run_s > 0 or did.calls > 0 or did.done > 0,
        is_floating=did.calls > 0 and not queue.slots,
    )


def _fits(row: QueueRow, state: str) -> bool:
    queue = row.status
    match state:
        case "active":
            return queue.ready + queue.leased > 0
        case "waiting":
            return queue.ready > 0
        case "paused":
            return queue.paused
        case "failed":
            return queue.failed > 0
        case _:
            return True


def _key(row: QueueRow, sort: str) -> tuple[float, str]:
    """Sort key: greatest value first, then by name."""
    queue = row.status
    # Waiting jobs without slots rank above any load, queues of floating slots below.
    load = float("inf") if row.load is None else row.load
    figures = {
        "name": 0.0,
        "load": -1.0 if row.is_floating and not row.is_behind else load,
        "importance": queue.importance,
        "waiting": queue.ready,
        "leased": queue.leased,
        "failed": queue.failed,
        "oldest": queue.oldest_ready_age_s or 0.0,
        "wait": row.wait_s or 0.0,
        "slots": queue.slots,
    }
    return -figures[sort], queue.queue


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGroup:
    """Slots of a host assigned to one queue, or floating; `planned` is the target number."""

    queue: str | None
    slots: int
    busy: int
    planned: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """A host with its slots by queue, largest group first."""

    host: FleetHost
    state: str
    busy: int
    groups: Sequence[SlotGroup]

    @property
    def bound(self) -> int:
        """Slots that belong to a queue."""
        return sum(group.slots for group in self.groups if group.queue is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsShown:
    """The hosts with the slot plan; those that are alive give the sums."""

    plan: PlanHead
    rows: Sequence[HostRow]

    @property
    def alive(self) -> Sequence[HostRow]:
        """Hosts that reported lately."""
        return [row for row in self.rows if not row.host.is_silent]

    @property
    def slots(self) -> int:
        """Slots of hosts that are alive."""
        return sum(len(row.host.slots) for row in self.alive)

    @property
    def bound(self) -> int:
        """Those that belong to a queue."""
        return sum(row.bound for row in self.alive)

    @property
    def busy(self) -> int:
        """Those that run a job."""
        return sum(row.busy for row in self.alive)

    @property
    def floating(self) -> int:
        """Those that serve any queue."""
        return self.slots - self.bound

    @property
    def leader_changes(self) -> int:
        """How often another process has become leader."""
        return self.plan.term - 1

    @property
    def capacity(self) -> int:
        """Assigned slots that hosts that are alive may have."""
        return sum(row.host.capacity for row in self.alive)


async def view_hosts(context: ViewContext) -> dict[str, Any]:
    """Every host, sorted by name; while PostgreSQL does not answer, as this console last saw it."""
    found = await attempt_or_last(context, "hosts", context.jobs.fleet.state)
    return {"hosts": found.map(_hosts_shown)}


def _hosts_shown(state: FleetState) -> HostsShown:
    hosts = sorted(state.hosts, key=lambda host: host.name)
    return HostsShown(plan=state.plan, rows=[_host_row(host) for host in hosts])


async def view_decisions(context: ViewContext) -> dict[str, Any]:
    """Slot decisions; `q` filters this page by queue or host."""
    before = context.query.number("before", 0)
    q = context.query.text("q").strip()
    found = await attempt(
        context.jobs.fleet.decisions, before=before or None, decisions_max=ROWS_SHOWN + 1
    )
    shown, next_url = context.cut(found.value or (), ROWS_SHOWN, before="id")
    decisions = [one for one in shown if q in one.queue or q in one.host]
    return {"decisions": PanelData(decisions, found.error), "q": q, "next_url": next_url}


RULE_NAMES: Final[Mapping[str, str]] = {
    "active_grows": "backlog grows",
    "leased_grows": "jobs in progress grow",
    "oldest_waits": "oldest job waits too long",
    "many_fail": "many jobs fail",
    "at_max": "maximum of slots reached",
    "fleet_short": "too few slots in the fleet",
    "below_min": "below its minimum of slots",
    HOST_RULE: "host does not report",
}
"""Rules of alerts, for people."""


async def view_alerts(context: ViewContext) -> dict[str, Any]:
    """The newest alerts; only open ones with `open`."""
    is_open = context.query.flag("open")
    alerts = await attempt(context.jobs.fleet.alerts, is_open=is_open)
    return {"alerts": alerts, "is_open": is_open, "rules": RULE_NAMES}


def _host_row(host: FleetHost) -> HostRow:
    total = Counter(slot.queue for slot in host.slots)
    busy = Counter(slot.queue for slot in host.slots if slot.busy_s > 0)
    queues = [*total, *(queue for queue in host.planned if queue not in total)]
    groups = [
        SlotGroup(
            queue=queue,
            slots=total[queue],
            busy=busy[queue],
            planned=None if queue is None else host.planned.get(queue, 0),
        )
        for queue in queues
    ]
    return HostRow(
        host=host,
        state=host.state,
        busy=busy.total(),
        groups=sorted(
            groups, key=lambda group: (group.queue is None, -group.slots, group.queue or "")
        ),
    )
