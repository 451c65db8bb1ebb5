"""The state of the fleet as values, and the plan's input derived from it. No I/O.

Hosts report themselves and their counts. Waiting jobs are counted through an index up to a bound. A
queue may use the hosts whose code serves it and that have its tag; each such set of hosts, unless
it is all of them, is one tag to the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.plan import HostRoom, QueueNeed
from headrace.jobs.fleet.rates import HANDLER_S_DEFAULT, Rate, Reading

DECISIONS_SHOWN: Final = 50
CPU_PRESSURE_MAX: Final = 0.8
"""A host above it gets further slots only for the minimums of queues."""


class QueueCounts(msgspec.Struct, kw_only=True):
    """Counts of a host's slots for a queue that claims and settlements do not record."""

    queue_id: int
    ended: int = 0
    """Jobs done, failed, cancelled or quarantined: counted for the host, not for the queue."""
    calls: int = 0
    run_s: float = 0.0
    """Slot time of handler calls: call time divided by the concurrency of the slot."""
    slot_s: float = 0.0
    """Time for which slots belonged to the queue, busy or idle."""

    def add(self, other: QueueCounts) -> None:
        """Add counts whose report failed."""
        self.ended += other.ended
        self.calls += other.calls
        self.run_s += other.run_s
        self.slot_s += other.slot_s


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A host's part of the plan: slots by queue; the rest float."""

    version: int
    slots: dict[str, int]
    is_draining: bool = False


class SlotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A host's request for slots of a queue with a maximum."""

    queue_id: int
    used: int
    """Slots that work the queue now."""
    kept: int
    """Slots that the host does not exceed until an answer allows more."""
    wanted: int


class HostSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot as its host reports it."""

    queue: str | None = None
    """None: it floats."""
    pid: int = 0
    busy_s: float = 0.0
    """Slot time of the calls that run in it now; 0 where it is idle."""


class FleetHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host that runs handlers. Silent: it missed its reports and is not planned for.

    Reports that PostgreSQL could not take are not missed ones.
    """

    name: str
    kind: str
    tags: list[str]
    cores: int
    capacity: int
    load_per_core: float
    """Load of the whole machine; only displayed."""
    is_draining: bool
    is_silent: bool
    jobs_ended: int
    started_at: datetime
    reported_at: datetime | None
    slots: list[HostSlot]
    lost_at: datetime | None = None
    """Last report of a host whose lease expired without a clean stop; other hosts have its jobs."""
    cpu_pressure: float = 0.0
    """Share of the last minute in which processes waited for a core; 0 while slots use few."""
    planned: dict[str, int] = msgspec.field(default_factory=dict)
    """Slots by queue that the plan gives it."""

    @property
    def state(self) -> str:
        """`alive`, `draining`, `silent` for missed reports, or `lost` after its lease expired."""
        if self.lost_at is not None:
            return "lost"
        return "silent" if self.is_silent else "draining" if self.is_draining else "alive"


class PlanHead(msgspec.Struct, frozen=True, kw_only=True):
    """The leader and age of the plan. `version` grows with each change of the map."""

    leader: str | None
    term: int
    version: int
    planned_at: datetime | None
    is_led: bool


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a queue's slots on a host, with its reason."""

    id: int
    at: datetime
    version: int
    host: str
    queue: str
    before: int
    after: int
    code: str
    why: str


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet: hosts, plan, newest decisions and open alerts.

    `alerts` has the newest 100 of `alerts_open`.
    """

    hosts: list[FleetHost]
    plan: PlanHead
    decisions: list[Decision]
    alerts_open: int
    alerts: list[Alert]


class QueueWork(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a queue in a span of time."""

    done: int
    failed: int
    """Failed or quarantined."""
    cancelled: int = 0
    """Cancelled by its handler, or while it ran."""
    retried: int
    """Returned with a delay, or to another queue."""
    lost: int
    """Returned since their process died."""
    calls: int
    claimed: int
    run_s: float
    """Slot time of handler calls."""
    wait_s: float
    """From due to claimed, summed over the jobs claimed."""
    wait_max_s: float
    slot_s: float
    """Time for which slots belonged to the queue, busy or idle."""

    @property
    def wait_mean_s(self) -> float | None:
        """Mean time from due to claimed; None if nothing was claimed."""
        return self.wait_s / self.claimed if self.claimed else None


class QueueSpan(QueueWork, frozen=True, kw_only=True):
    """Counts of a queue in a span of time, and its backlog."""

    ready: int | None = None
    """Backlog, counted up to `jobs.count_max`; None if no scheduler led."""
    scheduled: int | None = None
    running: int | None = None
    failed_kept: int | None = None
    """Failed or quarantined jobs that are kept."""
    oldest_s: float | None = None
    """Age of the oldest ready job."""


class QueueMinute(QueueSpan, frozen=True, kw_only=True):
    """The minute that begins at `minute`; the backlog is the last count. Idle minutes have none."""

    minute: datetime


class QueueHour(QueueSpan, frozen=True, kw_only=True):
    """The hour that begins at `hour`; the backlog is the highest of its minutes."""

    hour: datetime


class QueueReading(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's backlog now and its totals since its creation."""

    queue: str
    ready: int
    scheduled: int
    running: int
    failed_kept: int
    quarantined: int
    oldest_s: float
    done: int
    failed: int
    """Failed or quarantined."""
    cancelled: int = 0
    retried: int
    lost: int
    run_s: float
    wait_s: float


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A queue in a snapshot; its counts are totals since its creation."""

    id: int
    name: str
    importance: int
    slots_min: int
    slots_max: int
    batch: int
    tag: str | None
    is_paused: bool
    done: int
    failed: int
    cancelled: int = 0
    retried: int
    calls: int
    """Handler calls; 0 if people or other programs take its jobs."""
    run_s: float
    waiting: int = 0
    """Due jobs, counted up to a bound."""
    leased: int = 0
    oldest_age_s: float = 0.0

    @property
    def active(self) -> int:
        """Due and running jobs."""
        return self.waiting + self.leased

    @property
    def finished(self) -> int:
        """Jobs that ever left `active`."""
        return self.done + self.failed + self.cancelled + self.retried


class HostSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A host in a snapshot, with the queues that its code serves."""

    shown: FleetHost
    queue_ids: frozenset[int]
    is_written: bool = True
    """Whether a host or the leader writes now. If not, PostgreSQL may just be back."""


class FleetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the fleet for one plan, without rates."""

    at_s: float
    """By this process's monotonic clock."""
    queues: Sequence[QueueSnapshot]
    hosts: Sequence[HostSnapshot]
    current: Mapping[str, Mapping[str, int]]
    """The map, by host and queue."""

    @property
    def loaded_queue_ids(self) -> frozenset[int]:
        """Queues of live hosts whose CPU pressure forbids further slots."""
        loaded = (h for h in self.hosts_alive if h.shown.cpu_pressure > CPU_PRESSURE_MAX)
        return frozenset(queue_id for host in loaded for queue_id in host.queue_ids)

    @property
    def hosts_alive(self) -> list[HostSnapshot]:
        """Live hosts with room and a recent report."""
        return [
            host
            for host in self.hosts
            if host.shown.reported_at is not None and not host.shown.is_silent
        ]


class PlanInput(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `plan`."""

    needs: list[QueueNeed]
    rooms: list[HostRoom]
    current: dict[str, dict[str, int]]
    without_code: list[tuple[str, str, int]]
    """Host, queue and slots of queues that no live host serves any more: they are dropped."""


def readings(facts: FleetSnapshot, before: Mapping[str, Reading]) -> dict[str, Reading]:
    """A reading of each queue, including the time of running calls.

    Counts and slots of a host are not read at one moment. A call that ended in between would be in
    neither, so the time never decreases below the reading `before`.
    """
    running_s: dict[str, float] = {}
    for host in facts.hosts_alive:
        for slot in host.shown.slots:
            if slot.queue is not None and slot.busy_s > 0:
                running_s[slot.queue] = running_s.get(slot.queue, 0.0) + slot.busy_s
    found = {}
    for queue in facts.queues:
        last = before.get(queue.name)
        run_s = queue.run_s + running_s.get(queue.name, 0.0)
        if last is not None and queue.finished >= last.finished:
            run_s = max(run_s, last.run_s)
        found[queue.name] = Reading(facts.at_s, queue.finished, queue.active, run_s)
    return found


def plan_input(facts: FleetSnapshot, rates: Mapping[str, Rate]) -> PlanInput:
    """Needs, rooms and the current map of the queues that live hosts serve."""
    alive = facts.hosts_alive
    everyone = frozenset(host.shown.name for host in alive)
    tags: dict[frozenset[str], str] = {}
    needs = []
    for queue in facts.queues:
        able = frozenset(host.shown.name for host in alive if _may_work(host, queue))
        if able:
            tag = None if able == everyone else tags.setdefault(able, f"hosts-{len(tags)}")
            needs.append(_need(queue, rates.get(queue.name), tag))
    known = {need.queue for need in needs}
    return PlanInput(
        needs=needs,
        rooms=[_room(host, tags, facts) for host in alive],
        current={
            host: {queue: slots for queue, slots in there.items() if queue in known}
            for host, there in facts.current.items()
        },
        without_code=[
            (host, queue, slots)
            for host, there in facts.current.items()
            for queue, slots in there.items()
            if queue not in known
        ],
    )


def by_host(rows: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    """Rows of host, queue and slots as a map."""
    found: dict[str, dict[str, int]] = {}
    for host, queue, slots in rows:
        found.setdefault(host, {})[queue] = slots
    return found


def _may_work(host: HostSnapshot, queue: QueueSnapshot) -> bool:
    is_tagged = queue.tag is None or queue.tag in host.shown.tags
    return is_tagged and queue.id in host.queue_ids


def _need(queue: QueueSnapshot, rate: Rate | None, tag: str | None) -> QueueNeed:
    return QueueNeed(
        queue=queue.name,
        importance=queue.importance,
        slots_min=0 if queue.is_paused else min(queue.slots_min, queue.slots_max),
        slots_max=queue.slots_max,
        batch=queue.batch,
        tag=tag,
        active=queue.active,
        rate_per_s=0.0 if rate is None or queue.is_paused else rate.rate_per_s,
        handler_s=HANDLER_S_DEFAULT if rate is None else rate.handler_s,
    )


def _minimum_room(seen: HostSnapshot, facts: FleetSnapshot) -> int:
    """This host's share of the minimums of all its queues, rounded up."""
    room = 0
    for queue in facts.queues:
        if queue.slots_min and not queue.is_paused and _may_work(seen, queue):
            able = sum(_may_work(host, queue) for host in facts.hosts_alive)
            room += -(-min(queue.slots_min, queue.slots_max) // able)
    return room


def _room(seen: HostSnapshot, tags: Mapping[frozenset[str], str], facts: FleetSnapshot) -> HostRoom:
    host = seen.shown
    capacity = host.capacity
    if host.cpu_pressure > CPU_PRESSURE_MAX:
        bound = sum(facts.current.get(host.name, {}).values())
        capacity = min(capacity, max(bound, _minimum_room(seen, facts)))
    return HostRoom(
        name=host.name,
        capacity=capacity,
        cpu_pressure=host.cpu_pressure,
        tags=frozenset(tag for able, tag in tags.items() if host.name in able),
        is_draining=host.is_draining,
    )


LOAD_MINUTES: Final = 5
"""Whole minutes over which load is measured, in addition to the current one."""
MINUTES_SHOWN: Final = 60
FAILURES_SPAN_S: Final = 3600.0
FAILURES_COUNTED_MAX: Final = 1000
"""At most so many failures are counted, the newest."""


class QueueLoad(QueueWork, frozen=True, kw_only=True):
    """Counts of a queue in the span of `FleetLoad.span_s`."""

    queue: str

    @property
    def run_mean_s(self) -> float | None:
        """Slot time per job; None if none ran."""
        ran = self.done + self.failed + self.cancelled + self.retried
        return self.run_s / ran if ran else None

    def ratio(self, waiting: int) -> float | None:
        """Slot time needed by finished and `waiting` jobs, relative to slot time available.

        Above 1 the queue falls behind. None: unknown, since it had no slots or no job ran.
        """
        mean_s = self.run_mean_s
        if not self.slot_s or (waiting and mean_s is None):
            return None
        return (self.run_s + waiting * (mean_s or 0.0)) / self.slot_s


class FleetMinute(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of all queues in the minute that begins at `minute`. Idle minutes have none."""

    minute: datetime
    done: int
    failed: int
    cancelled: int = 0
    retried: int
    run_s: float
    wait_max_s: float
    slot_s: float


class QueueStep(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a queue in the step that begins at `at`; the queue '' is all others."""

    at: datetime
    queue: str
    done: int
    failed: int
    cancelled: int
    retried: int
    lost: int
    ready: int
    """The highest count of waiting jobs."""


class QueueFailures(msgspec.Struct, frozen=True, kw_only=True):
    """Failed or quarantined jobs of a queue with one cause, the newest in FAILURES_SPAN_S."""

    queue: str
    state: str
    """`failed` or `quarantined`."""
    cause: str
    """The beginning of their errors, such as the class of an exception."""
    jobs: int
    jobs_is_capped: bool
    """Older failures were not counted: `jobs` may be too few, and `first_at` too late."""
    first_at: datetime
    last_at: datetime
    last_error: str
    """The beginning of the newest error."""


class FleetLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Recent counts of each queue, and of all queues per minute of the last hour."""

    span_s: float
    """Span of `queues`: LOAD_MINUTES and the current minute, or less in a new database."""
    queues: list[QueueLoad]
    minutes: list[FleetMinute]
