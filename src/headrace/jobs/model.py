"""Jobs as values: states and transitions, limits, settings, arguments and results. No I/O.

A `task` is the code, a `job` is a row, a `queue` is its backlog.
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
"""Length of the names of lanes, limiters and unique keys."""
PRIORITY_LAST: Final = 9
IMPORTANCE_LAST: Final = 9
VERSION_LAST: Final = 32_767
"""Greatest version of a payload."""
JOB_ID_LAST: Final = 2**63 - 1
"""The greatest id that a row can have."""
WINDOW_S_MAX: Final = 31 * 86_400.0
WEIGHT_MAX: Final = 100
ERROR_CHARACTERS_MAX: Final = 2_000
TRACEBACK_CHARACTERS_MAX: Final = 8_000
STATES_BY_ENDING: Final = ("failed", "cancelled", "quarantined")


class JobState(StrEnum):
    """The state of a job."""

    SCHEDULED = "scheduled"
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    GONE = "gone"
    """Ended and not kept, such as most done jobs."""


class JobToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to enqueue: `at` is a moment with time zone, `after_s` a delay; priority 0 is first."""

    payload: Any = None
    """Any JSON value, up to 64 KiB encoded."""
    at: datetime | None = None
    after_s: float | None = None
    priority: int = 5
    """0 is first, 9 last."""
    unique: str | None = None
    """A key that only one unfinished job of the queue has; enqueue returns that job's id."""
    lane: str | None = None
    """A lane of the queue's limiter."""
    spread_s: float | None = None
    """Delay it by a random time up to this."""
    version: int = 1
    """Version of the payload's shape."""
    retries: int | None = None
    """None: as its queue."""
    timeout_s: float | None = None
    """Time limit of a call; None: as its task."""
    expires_s: float | None = None
    """It is cancelled if it does not start within this time after it is due."""
    unique_for_s: float | None = None
    """With `unique`: keep the key for this time, also when the job is done."""
    chain: str | None = None
    """It starts when the jobs of its queue that were enqueued before with this chain have ended."""


class NewJob(JobToAdd, frozen=True, kw_only=True):
    """A job to enqueue, with its queue."""

    queue: str


class NewGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs with a callback: `on_done` is enqueued exactly once, when every member is final.

    Its payload is an object and gets the key `group` with `id`, `done`, `failed`, `cancelled`,
    `quarantined`. A group without members calls back at once. Members take no unique keys.
    """

    members: list[NewJob]
    on_done: NewJob


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job in its current state. A deleted job has only id and state."""

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
    """The host that holds its lease."""
    lease_id: int | None = None
    ended_at: datetime | None = None
    error: str | None = None
    traceback: str | None = None
    payload: Any = None
    result: Any = None
    """The return value of its handler, if its queue keeps results."""
    progress: JobProgress | None = None
    """The last reported progress of a leased job."""
    retries: int | None = None
    """Its own; None: as its queue."""
    timeout_s: float | None = None
    expires_at: datetime | None = None
    chain: str | None = None
    failure: JobFailure | None = None
    """Of a job that was retried after its end: how it had ended."""


class JobFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The last failure of a job before it was retried: when, and the begin of its error."""

    at: datetime
    error: str


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a running job: a ratio from 0 to 1 and a text."""

    ratio: float
    text: str
    at: datetime


class JobFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Criteria of jobs, all of which must match. `q` searches the errors of ended jobs."""

    queue: str | None = None
    state: str | None = None
    lane: str | None = None
    q: str | None = None
    older_than_s: float | None = None
    """Age since the end; for unfinished jobs since they were due."""
    from_at: datetime | None = None
    """Time of the end; for unfinished jobs, when they are due."""
    to_at: datetime | None = None
    """End of that time, not included."""
    ids: list[int] | None = None


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs without payloads and tracebacks, newest first; `next_cursor` continues."""

    jobs: list[Job]
    next_cursor: int | None
    """None: the last page. A page may be short or empty if the search was cut off."""


class BulkCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one bounded step of a bulk action."""

    action: str
    dry_run: bool
    matched: int
    changed: int
    skipped: int
    """Matched, but changed meanwhile, or not retried since another job has the unique key."""
    more: bool


class BulkDone(BulkCounts, frozen=True, kw_only=True):
    """The result of a bounded step of a bulk action; `more`: continue with `next_cursor`."""

    next_cursor: int | None


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is in its state: a code, a text and, if known, when that changes."""

    job_id: int
    state: JobState
    reason: str
    text: str
    until_at: datetime | None = None


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a queue: declared by code, with the overrides in `overridden`."""

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
    decisions: dict[str, str | None]
    """What people decide about its jobs, with the target queue; null: the job is done."""
    overridden: dict[str, Any]


class QueueStatus(QueueSettings, frozen=True, kw_only=True):
    """A queue with its backlog, counted up to a bound: a capped number may be more."""

    ready: int
    scheduled: int
    leased: int
    failed: int
    """Failed or quarantined jobs that are kept."""
    oldest_ready_age_s: float | None
    ready_is_capped: bool
    scheduled_is_capped: bool
    failed_is_capped: bool
    slots: int
    """Slots bound to it now, without floating ones."""
    is_known: bool
    """A live host serves it."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """A lane of a limiter: its limits and current counts. None means no limit."""

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
    """Its limits are those of its limiter, not its own."""


class Limiter(msgspec.Struct, frozen=True, kw_only=True):
    """A limiter: the limits of its lanes without limits of their own. None means no limit."""

    limiter: str
    starts_max: int | None
    window_s: float | None
    slack_s: float
    """Time after the claim in which a job may start; a start counts for window and slack."""
    concurrency: int | None
    is_set: bool
    """Set by an operator: declarations do not change them."""
    queues: list[str]


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs taken under a lease by other code or a person; none: nothing was due."""

    lease_id: int | None
    jobs: list[TakenJob]
    expires_at: datetime | None
    """When they return to the queue unless acked or extended."""


class TakenJob(msgspec.Struct, frozen=True, kw_only=True):
    """A taken job."""

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
    """Outcome of a taken job: `done`, `retry`, `fail`, `snooze`, `cancel`, `send_to`, `return`."""

    outcome: str = "done"
    after_s: float | None = None
    """Delay of a retry (default: backoff) or a snooze."""
    why: str = ""
    queue: str | None = None
    """Target queue of `send_to`."""
    result: Any = None
    """Result of `done`, if the queue keeps results."""
    decision: str | None = None
    """A decision that the queue declares, in place of a result: the job moves to its queue, or is
    done with the result `{"decision": ..., "by": ...}`.
    """
    by: str = ""
    """Who decided."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one bounded step of maintenance; `more`: call again at once."""

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
        "30s",
        "Time without a heartbeat after which the running jobs of a host return to their queues.",
        parse_duration_s,
    )
    heartbeat_s: float = setting("10s", "How often a host renews its leases.", parse_duration_s)
    poll_s: float = setting(
        "1s", "Longest wait before an idle worker polls for jobs.", parse_duration_s
    )
    sweep_every_s: float = setting(
        "3s", "How often jobs of dead hosts are returned to their queues.", parse_duration_s
    )
    grace_s: float = setting(
        "8s", "How long a stopping worker lets its handlers finish.", parse_duration_s
    )
    losses_max: int = setting(
        "3",
        "A job whose process died this many times is quarantined: set aside for a person.",
        parse_count,
    )
    retry_first_s: float = setting("2s", "Delay before the first retry.", parse_duration_s)
    retry_max_s: float = setting("1h", "Longest delay before a retry.", parse_duration_s)
    failed_kept_s: float = setting(
        "14d", "How long failed jobs are kept for inspection.", parse_duration_s
    )
    events_kept_s: float = setting(
        "30d",
        "How long events of workflows and results of groups of jobs are kept.",
        parse_duration_s,
    )
    lanes_per_claim: int = setting(
        "100", "Maximum of lanes from which one claim takes jobs.", parse_count
    )
    lane_quantum: int = setting(
        "10", "Maximum of jobs that one claim takes from a lane of weight 1.", parse_count
    )
    host_silent_s: float = setting(
        "10s",
        "A host that has not reported for so long gets no slots (worker processes).",
        parse_duration_s,
    )
    plan_every_s: float = setting(
        "5s",
        "How often the scheduler shares the slots of all hosts among the queues.",
        parse_duration_s,
    )
    count_max: int = setting(
        "20000", "Waiting jobs of a queue are counted up to this number.", parse_count
    )
    cron_every_s: float = setting(
        "1s", "How often the jobs of due crons are enqueued.", parse_duration_s
    )
    minutes_kept_s: float = setting(
        "8d", "How long statistics per minute are kept.", parse_duration_s
    )
    hours_kept_s: float = setting("90d", "How long statistics per hour are kept.", parse_duration_s)
    backlog_every_s: float = setting(
        "15s", "How often the backlog of each queue is counted for charts.", parse_duration_s
    )
    decisions_kept_s: float = setting(
        "7d",
        "How long changes of slots with their reasons, and cleared alerts, are kept.",
        parse_duration_s,
    )
    alert_active_min: int = setting(
        "1000",
        "A growing queue raises an alert only from this number of active jobs on.",
        parse_count,
    )
    alert_oldest_s: float = setting(
        "15m", "A job that is due and waits longer raises an alert.", parse_duration_s
    )
    alert_failed_percent: int = setting(
        "50", "Percentage of failed jobs that raises an alert.", parse_count
    )
    alerts_webhook_url: str | None = setting(
        None,
        "Where alerts are sent by POST.",
        parse_url("http", "https", takes_user=False),
        secret=True,
    )

    floats: int = setting(
        "0",
        "Slots of an agent that serve any queue (floating slots); 0: two per core.",
        parse_count,
    )
    slots_per_core: int = setting("64", "Maximum of slots of an agent per core.", parse_count)
    memory_reserve_bytes: int = setting(
        "256MiB",
        "Memory of the machine that an agent's slots leave free for other programs.",
        parse_size_bytes,
    )
    slot_private_max_bytes: int = setting(
        "256MiB",
        "A slot with more private memory is replaced after its current work.",
        parse_size_bytes,
    )
    slot_silent_max_s: float = setting(
        "10m", "A slot whose event loop is blocked for this long is killed.", parse_duration_s
    )

    @property
    def backoff(self) -> Backoff:
        """The backoff of retries."""
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
    "jobs_finished_total", "Jobs that this process settled, by outcome.", outcome=OUTCOMES
)
JOB_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0, 10_800.0, 43_200.0, 86_400.0),
)
"""Jobs wait for hours under a backlog, and run for hours if their timeout permits."""
jobs_run_seconds = histogram(
    "jobs_run_seconds", "Run time of handler calls.", buckets_s=JOB_BUCKETS_S
)
jobs_wait_seconds = histogram(
    "jobs_wait_seconds",
    "From due to claimed, of the first job of each lease.",
    buckets_s=JOB_BUCKETS_S,
)
leases_lost = counter(
    "jobs_leases_lost_total", "Leases that no longer existed when this process acked."
)
agent_slots = gauge("agent_slots", "Slots of this agent.")
SLOT_ENDS: Final = ("left", "overtime", "killed", "crashed", "exited", "died")
"""`killed`: by SIGKILL, by hand, a program, or Linux if memory is short; `crashed`: by another
signal; `exited`: by its own code; `died`: the exit status is unknown.
"""
slots_ended = counter(
    "agent_slots_ended_total", "Slots (worker processes) that ended, by cause.", how=SLOT_ENDS
)
