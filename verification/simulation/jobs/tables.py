"""The tables of the jobs room in the model of PostgreSQL, with the indexes that statements use.

A row is a frozen struct. An index has the rows of open transactions too; `get` leaves out those of
other sessions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.engines.sql import Query
from verification.simulation.postgres import PostgresModel, Table

Value = TypeVar("Value")
NEVER: Final = datetime.max.replace(tzinfo=UTC)
"""PostgreSQL's `infinity`."""
ALWAYS: Final = datetime.min.replace(tzinfo=UTC)
PARKED_AT: Final = datetime(9999, 1, 1, tzinfo=UTC)
"""`run_at` of a job that waits for the one before it in its chain."""
UNLIMITED: Final = 100_000
ENDS: Final = frozenset({"done", "fail", "cancel", "quarantined"})


def seconds(number: float) -> timedelta:
    """An interval, in whole microseconds as PostgreSQL has it."""
    return timedelta(seconds=number)


class Job(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A row of job_ready or lane_job."""

    id: int
    queue: int
    run_at: datetime
    group_id: int | None = None
    priority: int = 5
    attempt: int = 0
    losses: int = 0
    version: int = 1
    lane: str | None = None
    unique_key: str | None = None
    headers: str | None = None
    last_error: str | None = None
    payload: bytes = b"null"


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """A row of queue; nothing is overridden."""

    id: int
    name: str
    limiter: str
    paused: bool = False
    needs_lane: bool = False
    importance: int = 5
    slots_min: int = 0
    slots_max: int = UNLIMITED
    batch: int = 1
    retries: int = 5
    timeout_s: float = 7200.0
    tag: str | None = None
    keep_done_s: float | None = None
    keep_result: bool = False
    decisions: str = "{}"
    is_removed: bool = False


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A row of host."""

    id: int
    name: str
    queues: tuple[int, ...]
    kind: str
    tags: tuple[str, ...]
    cores: int
    started_at: datetime
    expires_at: datetime
    capacity: int = 0
    load_per_core: float = 0.0
    cpu_pressure: float = 0.0
    is_draining: bool = False
    slots: str = "[]"
    jobs_ended: int = 0
    reported_at: datetime | None = None
    reports_from: datetime | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A row of job_lease."""

    id: int
    host: int
    queue: int
    jobs: tuple[Job, ...]
    is_plain: bool
    granted_at: datetime
    limiter: str | None = None
    is_counted: bool = False
    settled: frozenset[int] = frozenset()

    @property
    def open_jobs(self) -> list[Job]:
        """Jobs without an outcome."""
        return [job for job in self.jobs if job.id not in self.settled]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a limiter or a lane."""

    starts_max: int | None = None
    window_s: float | None = None
    slack_s: float = 0.25
    concurrency: int | None = None


class Limiter(msgspec.Struct, frozen=True, kw_only=True):
    """A row of limiter."""

    name: str
    limits: Limits = Limits()
    is_set: bool = False
    is_spread: bool = True
    declared: Limits | None = None


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """A row of lane; `starts` are its entries (at, n) in order."""

    limiter: str
    name: str
    limits: Limits
    weight: int = 1
    paused: bool = False
    is_own: bool = False
    inflight: int = 0
    uncounted: int = 0
    counted_from: int = 0
    free_at: datetime = ALWAYS
    started_at: datetime | None = None
    starts: tuple[tuple[datetime, int], ...] = ()

    @property
    def span(self) -> timedelta:
        """How long a start counts."""
        return seconds((self.limits.window_s or 0.0) + self.limits.slack_s)

    def next_at(self, now: datetime) -> datetime:
        """When a claim should look at it."""
        at_once = self.limits.concurrency
        if self.paused or (at_once is not None and self.inflight >= at_once):
            return NEVER
        if at_once is not None and self.inflight + self.uncounted >= at_once:
            return now + seconds(1)
        return max(self.free_at, now)


class LaneQueue(msgspec.Struct, frozen=True, kw_only=True):
    """A row of lane_queue."""

    waiting: int = 0
    credit: int = 0
    ready_at: datetime = NEVER


class LaneEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A row of lane_event."""

    limiter: str
    lane: str
    queue: int
    k: int


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A row of job_group; `callback` is the job to enqueue, without id and moment."""

    id: int
    pending: int
    callback: Job
    delay_s: float | None = None
    run_at: datetime | None = None
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    quarantined: int = 0
    opened_at: datetime | None = None


class Unique(msgspec.Struct, frozen=True, kw_only=True):
    """A row of job_unique."""

    job_id: int
    kept_until: datetime | None = None
    is_done: bool = False


class ReadyTable(Table[int, Job]):
    """job_ready, with the index of claims and that of lanes' due jobs."""

    def __init__(self, model: PostgresModel) -> None:
        super().__init__(model)
        self.order: dict[tuple[int, int], list[tuple[datetime, int]]] = defaultdict(list)
        """By queue and priority: (run_at, id)."""
        self.laned: list[tuple[datetime, int]] = []

    def note_change(self, key: int, before: Job | None, after: Job | None) -> None:
        """See `Table`."""
        if before is not None:
            _remove(self.order[before.queue, before.priority], (before.run_at, key))
            if before.lane is not None:
                _remove(self.laned, (before.run_at, key))
        if after is not None:
            insort(self.order[after.queue, after.priority], (after.run_at, key))
            if after.lane is not None:
                insort(self.laned, (after.run_at, key))

    def due(
        self, queue: int, priority: int, after: tuple[datetime, int], now: datetime
    ) -> Iterator[Job]:
        """Due jobs that no other session holds, after a mark, in order of their moment."""
        order = self.order.get((queue, priority))
        if order:
            first = bisect_right(order, after)
            for at, key in order[first : bisect_right(order, (now, 2**63))]:
                job = None if self.is_locked(key) else self.get(key)
                if job is not None and job.run_at == at:
                    yield job

    def first_at(self, queue: int, since: datetime) -> datetime | None:
        """The earliest moment of a queue's jobs since a moment."""
        found = []
        for priority in range(10):
            order = self.order.get((queue, priority))
            if order and (first := bisect_left(order, (since, 0))) < len(order):
                found.append(order[first][0])
        return min(found, default=None)

    def count(self, queue: int, now: datetime) -> tuple[int, int, datetime | None]:
        """How many jobs are due and how many are not, and the oldest moment."""
        due = later = 0
        oldest = None
        for priority in range(10):
            order = self.order.get((queue, priority))
            if order:
                here = bisect_right(order, (now, 2**63))
                due, later = due + here, later + len(order) - here
                if here and (oldest is None or order[0][0] < oldest):
                    oldest = order[0][0]
        return due, later, oldest


class LaneJobs(Table[int, Job]):
    """lane_job, with the index of claims."""

    def __init__(self, model: PostgresModel) -> None:
        super().__init__(model)
        self.order: dict[tuple[int, str | None], list[tuple[int, int]]] = defaultdict(list)
        """By queue and lane: (priority, id)."""

    def note_change(self, key: int, before: Job | None, after: Job | None) -> None:
        """See `Table`."""
        if before is not None:
            order = self.order[before.queue, before.lane]
            _remove(order, (before.priority, key))
            if not order:
                del self.order[before.queue, before.lane]
        if after is not None:
            insort(self.order[after.queue, after.lane], (after.priority, key))

    def first(self, queue: int, lane: str, jobs_max: int) -> list[Job]:
        """The first jobs of a lane that no other session holds."""
        found: list[Job] = []
        for _, key in self.order.get((queue, lane), ()):
            if len(found) >= jobs_max:
                break
            job = None if self.is_locked(key) else self.get(key)
            if job is not None:
                found.append(job)
        return found


class Grouped(Table[Any, Value]):
    """A table with an index of keys by some part of the row."""

    def __init__(self, model: PostgresModel, part: str) -> None:
        super().__init__(model)
        self._part = part
        self.keys_of: dict[Any, dict[Any, None]] = defaultdict(dict)
        """Keys by that part, in order of their insertion."""

    def note_change(self, key: Any, before: Value | None, after: Value | None) -> None:
        """See `Table`."""
        was = None if before is None else getattr(before, self._part)
        now = None if after is None else getattr(after, self._part)
        if was != now:
            if was is not None:
                self.keys_of[was].pop(key, None)
            if now is not None:
                self.keys_of[now][key] = None

    def of(self, part: Any) -> list[tuple[Any, Value]]:
        """Keys and rows of a part."""
        found = self.keys_of.get(part)
        if not found:
            return []
        rows = ((key, self.get(key)) for key in list(found))
        return [(key, row) for key, row in rows if row is not None]


class Keyed(Table[tuple[Any, ...], Value]):
    """A table with an index of keys by their first and by their last part."""

    def __init__(self, model: PostgresModel) -> None:
        super().__init__(model)
        self.by_first: dict[Any, dict[tuple[Any, ...], None]] = defaultdict(dict)
        self.by_last: dict[Any, dict[tuple[Any, ...], None]] = defaultdict(dict)

    def note_change(self, key: tuple[Any, ...], before: Value | None, after: Value | None) -> None:
        """See `Table`."""
        if after is None:
            self.by_first[key[:-1]].pop(key, None)
            self.by_last[key[-1]].pop(key, None)
        elif before is None:
            self.by_first[key[:-1]][key] = None
            self.by_last[key[-1]][key] = None

    def at_first(self, part: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Value]]:
        """Keys and rows whose key begins with these parts, all but the last."""
        return self._rows_of(self.by_first.get(part))

    def at_last(self, part: Any) -> list[tuple[tuple[Any, ...], Value]]:
        """Keys and rows whose key ends with this part."""
        return self._rows_of(self.by_last.get(part))

    def _rows_of(
        self, keys: dict[tuple[Any, ...], None] | None
    ) -> list[tuple[tuple[Any, ...], Value]]:
        if not keys:
            return []
        rows = ((key, self.get(key)) for key in list(keys))
        return [(key, row) for key, row in rows if row is not None]


Contract: TypeAlias = Callable[..., Any]
STATEMENTS: Final[list[tuple[Query, Contract]]] = []
"""All statements of the room, with the functions that model them."""


def statement(query: Query) -> Callable[[Contract], Contract]:
    """Decorate the model of a statement: the tables, and the query's parameters by name."""

    def add(contract: Contract) -> Contract:
        STATEMENTS.append((query, contract))
        return contract

    return add


class JobsTables:
    """All tables of the room."""

    def __init__(self, model: PostgresModel) -> None:
        self.model = model
        self.now = model.now
        self.queue: Table[int, Queue] = Table(model)
        self.queue_by_name: Table[str, int] = Table(model)
        self.ready = ReadyTable(model)
        self.laned = LaneJobs(model)
        self.unique: Table[tuple[int, str], Unique] = Table(model)
        self.chain: Keyed[tuple[int, datetime]] = Keyed(model)
        """By queue, chain and number: job and due moment."""
        self.group: Table[int, Group] = Table(model)
        self.host: Table[int, Host] = Table(model)
        self.lease: Grouped[Lease] = Grouped(model, "host")
        self.failed: Table[int, tuple[str, Job, str]] = Table(model)
        """State, job and error."""
        self.ended: Table[int, str] = Table(model)
        """The outcome of every ended job; of the model alone, for the checks."""
        self.limiter: Table[str, Limiter] = Table(model)
        self.lane: Table[tuple[str, str], Lane] = Table(model)
        self.lane_queue: Keyed[LaneQueue] = Keyed(model)
        """By limiter, lane and queue."""
        self.lane_event: Grouped[LaneEvent] = Grouped(model, "queue")
        self.count: Table[int, tuple[datetime, int, dict[str, float]]] = Table(model)
        """Moment, queue and counts."""
        self.minute: Table[tuple[int, datetime], dict[str, float]] = Table(model)
        self.total: Table[int, dict[str, float]] = Table(model)
        self.plan: Table[int, dict[str, Any]] = Table(model)
        self.slot: Table[tuple[str, int], int] = Table(model)
        self.allowance: Keyed[tuple[int, bool, int]] = Keyed(model)
        """By host and queue: slots, whether it requested more, and the number of the call."""
        self.alert: Table[tuple[str, str], dict[str, Any]] = Table(model)
        self.cron: Table[str, dict[str, Any]] = Table(model)
        self.cancel: Table[int, datetime] = Table(model)
        self.progress: Table[int, int] = Table(model)
        self.host_of: Table[int, int] = Table(model)
        """The host of every lease; of the model alone, for the checks."""
        self.written: Table[int, tuple[str, int, str, int]] = Table(model)
        """Writer and its term, leader and its term of each written plan; for the checks."""
        self.fired: Table[tuple[str, datetime], int] = Table(model)
        """The job of each fired moment of a cron; of the model alone, for the checks."""

    def add_count(self, queue: int, **counts: float) -> None:
        """Insert a row of job_count."""
        number = self.model.next_id("job_count")
        self.count.put(number, (self.now(), queue, counts))

    def notify_queue(self, queue: int) -> None:
        """Notify the workers of a queue."""
        self.model.notify("headrace_jobs", str(queue))

    def is_live(self, host_id: int) -> bool:
        """Whether the leases of a host hold."""
        host = self.host.get(host_id)
        return host is not None and host.expires_at > self.now()

    def end_job(self, job_id: int, outcome: str) -> None:
        """Note the outcome of a job, which must be its first."""
        before = self.ended.get(job_id)
        self.ended.put(job_id, outcome if before is None else f"{before}, {outcome}")

    def put_lane(self, lane: Lane, **changes: Any) -> Lane:
        """Replace a lane's row."""
        changed = replace(lane, **changes)
        self.lane.put((lane.limiter, lane.name), changed)
        return changed


def _remove(order: list[Any], key: Any) -> None:
    place = bisect_left(order, key)
    if place < len(order) and order[place] == key:
        del order[place]
