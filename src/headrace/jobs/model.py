"""Jobs as values: states and their moves, limits, settings, what callers give and get. No I/O.

`task` is the code, `job` is a row, `queue` is its backlog. What may change into what is the table MOVES;
everything else in the room keeps to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from headrace.kernel.config import (
    parse_count,
    parse_duration_s,
    parse_size_bytes,
    parse_url,
    setting,
)
from headrace.kernel.metrics import counter, gauge, histogram
from headrace.kernel.resilience import Backoff

JOBS_PER_CALL_MAX: Final = 10_000
BYTES_PER_CALL_MAX: Final = 16 * 1024 * 1024
AT_AWAY_S_MAX: Final = 366 * 86_400.0
NAME_CHARACTERS_MAX: Final = 128
"""Of a lane, a limiter and a unique key."""
PRIORITY_LAST: Final = 9
IMPORTANCE_LAST: Final = 9
VERSION_LAST: Final = 32_767
"""Of a payload's shape."""
JOB_ID_LAST: Final = 2**63 - 1
"""The greatest id that a row can have."""
WINDOW_S_MAX: Final = 31 * 86_400.0
WEIGHT_MAX: Final = 100
ERROR_CHARACTERS_MAX: Final = 2_000
TRACEBACK_CHARACTERS_MAX: Final = 8_000
STATES_BY_ENDING: Final = ("failed", "cancelled", "quarantined")


class JobState(StrEnum):
    """Where a job is in its life."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    GONE = "gone"
    """Ended and not kept: what a done job answers."""


MOVES: Final[dict[JobState, frozenset[JobState]]] = {
    JobState.SCHEDULED: frozenset({JobState.READY, JobState.CANCELLED}),
    JobState.READY: frozenset({JobState.LEASED, JobState.CANCELLED}),
    JobState.LEASED: frozenset(
        {
            JobState.DONE,
            JobState.READY,
            JobState.SCHEDULED,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.QUARANTINED,
        }
    ),
    JobState.DONE: frozenset({JobState.GONE}),
    JobState.FAILED: frozenset({JobState.READY, JobState.GONE}),
    JobState.CANCELLED: frozenset({JobState.READY, JobState.GONE}),
    JobState.QUARANTINED: frozenset({JobState.READY, JobState.GONE}),
    JobState.GONE: frozenset(),
}
"""`ready` out of a final state is a person's retry."""


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to enqueue. `payload` is anything msgspec encodes as JSON, up to 64 KiB encoded."""

    queue: str
    payload: Any = None
    at: datetime | None = None
    after_s: float | None = None
    priority: int = 5
    """0 first to 9 last."""
    unique: str | None = None
    """A key that one unfinished job of the queue may have; the id of that job is returned."""
    lane: str | None = None
    """A name inside the limiter of the queue's task."""
    spread_s: float | None = None
    """Run it at a random moment of so many seconds after it would be due."""
    version: int = 1
    """Of the payload's shape."""


class NewGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs with a callback: `on_done` is enqueued exactly once, when every member is final.

    Its payload is an object and gets the key `group` with `id`, `done`, `failed`, `cancelled`,
    `quarantined`. A group without members calls back at once. Members take no unique keys.
    """

    members: list[NewJob]
    on_done: NewJob


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it stands; a job that is gone has its id and state only."""

    id: int
    state: JobState
    queue: str | None = None
    priority: int | None = None
    run_at: datetime | None = None
    attempt: int = 0
    """Failed runs so far."""
    losses: int = 0
    """Runs whose process died."""
    lane: str | None = None
    unique: str | None = None
    group_id: int | None = None
    host: str | None = None
    """Which host holds its lease."""
    lease_id: int | None = None
    ended_at: datetime | None = None
    error: str | None = None
    traceback: str | None = None
    payload: Any = None
    result: Any = None
    """What its handler returned, where its queue keeps that."""
    progress: JobProgress | None = None
    """Of a leased job: how far it last said that it is."""


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a running job is, from 0 to 1, in its own words."""

    ratio: float
    text: str
    at: datetime


class JobFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which jobs are meant: those that fit all that is given. `q` is looked for in errors of ended jobs."""

    queue: str | None = None
    state: str | None = None
    lane: str | None = None
    q: str | None = None
    older_than_s: float | None = None
    """Since they ended; of others since they were due."""
    ids: list[int] | None = None


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs without payloads and tracebacks, newest id first; the next page is what comes before `next_before`."""

    jobs: list[Job]
    next_before: int | None
    """None: that was all. A page may be short, or empty, where the search was cut off."""


class BulkDone(msgspec.Struct, frozen=True, kw_only=True):
    """What one bounded step of a bulk action did; `more`: go on with what comes before `next_before`."""

    action: str
    dry_run: bool
    matched: int
    changed: int
    skipped: int
    """Matched, but not in a place for it any more, or to be retried while another job has the unique key."""
    more: bool
    next_before: int | None


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is where it is, in a code, a sentence and, where it is known, a moment of change."""

    job_id: int
    state: JobState
    reason: str
    text: str
    until_at: datetime | None = None


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a queue: what its code declares, and over it what a person set (`overridden`)."""

    queue: str
    limiter: str
    paused: bool
    importance: int
    slots_min: int
    slots_max: int
    retries: int
    batch: int
    timeout_s: float
    tag: str | None
    keep_done_s: float | None
    keep_result: bool
    needs_lane: bool
    """A job without a lane is refused."""
    aliases: list[str]
    overridden: dict[str, int]


class QueueStatus(QueueSettings, frozen=True, kw_only=True):
    """A queue with its backlog, counted up to a bound: a number that is capped may be more."""

    ready: int
    scheduled: int
    leased: int
    failed: int
    """Ended failed or quarantined, and kept."""
    oldest_ready_age_s: float | None
    ready_is_capped: bool
    scheduled_is_capped: bool
    failed_is_capped: bool
    slots: int
    """Slots of the fleet that are bound to it now; floating ones not counted."""
    is_known: bool
    """The code of a living host knows it."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """A lane of a limiter: its limits and what it is doing. None means no limit."""

    limiter: str
    lane: str
    starts_max: int | None
    window_s: float | None
    concurrency: int | None
    paused: bool
    weight: int
    waiting: int
    inflight: int
    starts_live: int
    """Starts that the current window still counts."""
    next_at: datetime | None
    """When the rate allows one more; None: now."""
    follows_limiter: bool = False
    """Its limits are its limiter's; else they were set for it alone."""


class Limiter(msgspec.Struct, frozen=True, kw_only=True):
    """A limiter: the limits of its lanes that have none of their own. None means no limit."""

    limiter: str
    starts_max: int | None
    window_s: float | None
    slack_s: float
    """How long after its claim was sent a job may start; a start counts for window and slack."""
    concurrency: int | None
    is_set: bool
    """A person set them: what code declares does not change them."""
    queues: list[str]


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs handed to other code or a person under a lease of their own; none: there was nothing."""

    lease_id: int | None
    jobs: list[TakenJob]
    expires_at: datetime | None
    """When they go back unless they are acked or the lease is extended."""


class TakenJob(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    id: int
    payload: Any
    priority: int
    run_at: datetime
    attempt: int
    """Which run this is, from 1."""
    lane: str | None = None
    traceparent: str | None = None
    version: int = 1


class TakenOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a taken job: `done`, `retry`, `fail`, `snooze`, `cancel`, `send_to` or `return`."""

    outcome: str = "done"
    after_s: float | None = None
    """Of a retry (else the usual backoff) and a snooze."""
    why: str = ""
    queue: str | None = None
    """Where `send_to` sends it."""
    result: Any = None
    """Of `done`, where the queue keeps results."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What one bounded step of tidying did; `more`: call again at once."""

    leases_returned: int
    jobs_returned: int
    lane_jobs_moved: int
    failed_dropped: int
    hosts_dropped: int
    more: bool
    lanes_removed: int = 0
    """Idle ones that follow their limiter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig:
    """Section `jobs`."""

    lease_s: float = setting(
        "30s", "A host that was silent so long has lost its jobs.", parse_duration_s
    )
    heartbeat_s: float = setting("10s", "How often a host says that it lives.", parse_duration_s)
    poll_s: float = setting(
        "1s", "Longest wait before an idle worker looks again.", parse_duration_s
    )
    sweep_every_s: float = setting(
        "3s", "How often leases of dead hosts are looked for.", parse_duration_s
    )
    grace_s: float = setting(
        "8s", "How long a stopping worker lets its handlers finish.", parse_duration_s
    )
    losses_max: int = setting("3", "A job whose process died so often is quarantined.", parse_count)
    retry_first_s: float = setting("2s", "Delay before the first retry.", parse_duration_s)
    retry_max_s: float = setting("1h", "Longest delay before a retry.", parse_duration_s)
    failed_kept_s: float = setting(
        "14d", "How long failed jobs are kept for inspection.", parse_duration_s
    )
    lanes_per_claim: int = setting("100", "Lanes that one claim visits at most.", parse_count)
    lane_quantum: int = setting(
        "10", "Jobs that a lane of weight 1 gives in one claim at most.", parse_count
    )
    host_silent_s: float = setting(
        "10s", "A host without a report for so long gets no slots.", parse_duration_s
    )
    plan_every_s: float = setting("5s", "How often the fleet is planned.", parse_duration_s)
    count_max: int = setting(
        "20000", "Waiting jobs of a queue that a plan counts at most.", parse_count
    )
    cron_every_s: float = setting("1s", "How often due crons are looked for.", parse_duration_s)
    minutes_kept_s: float = setting("8d", "How long minute statistics are kept.", parse_duration_s)
    decisions_kept_s: float = setting(
        "7d", "How long decisions of the plan and cleared alerts are kept.", parse_duration_s
    )
    alert_active_min: int = setting(
        "1000", "Growth of a queue with fewer active jobs is no alert.", parse_count
    )
    alert_oldest_s: float = setting(
        "15m", "A due job that waits longer is an alert.", parse_duration_s
    )
    alert_failed_percent: int = setting(
        "50", "An alert where so many of the last jobs failed.", parse_count
    )
    alerts_webhook_url: str | None = setting(
        None,
        "Where alerts are sent by POST.",
        parse_url("http", "https", takes_user=False),
        secret=True,
    )

    floats: int = setting(
        "0", "Slots of an agent that no plan binds to a queue; 0: two a core.", parse_count
    )
    slots_per_core: int = setting("64", "Slots of an agent at most, a core.", parse_count)
    memory_reserve_bytes: int = setting(
        "256MiB", "Memory that an agent's slots leave to others.", parse_size_bytes
    )
    slot_private_max_bytes: int = setting(
        "256MiB",
        "A slot that alone holds more memory is replaced after the work in hand.",
        parse_size_bytes,
    )
    slot_silent_max_s: float = setting(
        "10m", "A slot whose event loop stood still so long is killed.", parse_duration_s
    )

    @property
    def backoff(self) -> Backoff:
        """When to retry."""
        return Backoff(self.retry_first_s, self.retry_max_s)


jobs_enqueued = counter("jobs_enqueued_total", "Jobs that this process enqueued.")
OUTCOMES: Final = (
    "done",
    "retry",
    "fail",
    "snooze",
    "cancel",
    "moved",
    "unstarted",
    "returned",
    "lost",
    "quarantined",
)
jobs_finished = counter(
    "jobs_finished_total", "Jobs that this process gave back, by outcome.", outcome=OUTCOMES
)
jobs_run_seconds = histogram("jobs_run_seconds", "Run time of handler calls.")
jobs_wait_seconds = histogram(
    "jobs_wait_seconds", "From due to claimed, of the first job of each lease."
)
leases_lost = counter("jobs_leases_lost_total", "Leases that were gone when this process acked.")
agent_slots = gauge("agent_slots", "Slots of this agent.")
SLOT_ENDS: Final = ("left", "died", "overtime")
slots_ended = counter("agent_slots_ended_total", "Slots that ended, by how.", how=SLOT_ENDS)
