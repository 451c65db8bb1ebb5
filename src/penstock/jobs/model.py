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

from penstock.kernel.backoff import Backoff
from penstock.kernel.config import parse_count, parse_duration_s, setting
from penstock.kernel.metrics import counter, histogram

JOBS_PER_CALL_MAX: Final = 10_000
BYTES_PER_CALL_MAX: Final = 16 * 1024 * 1024
AT_AWAY_S_MAX: Final = 366 * 86_400.0
NAME_CHARACTERS_MAX: Final = 128
"""Of a lane, a limiter and a unique key."""
PRIORITY_LAST: Final = 9
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


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is where it is, in a code, a sentence and, where it is known, a moment of change."""

    job_id: int
    state: JobState
    reason: str
    text: str
    until_at: datetime | None = None


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's backlog; `failed` counts jobs that ended failed or quarantined and are kept."""

    queue: str
    limiter: str
    paused: bool
    ready: int
    scheduled: int
    leased: int
    failed: int
    oldest_ready_age_s: float | None


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


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What one bounded step of tidying did; `more`: call again at once."""

    leases_returned: int
    jobs_returned: int
    lane_jobs_moved: int
    failed_dropped: int
    hosts_dropped: int
    more: bool


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
    lanes_per_claim: int = setting("50", "Lanes that one claim visits at most.", parse_count)
    lane_quantum: int = setting(
        "10", "Jobs that a lane of weight 1 gives in one claim at most.", parse_count
    )

    @property
    def backoff(self) -> Backoff:
        """When to retry."""
        return Backoff(self.retry_first_s, self.retry_max_s)


jobs_enqueued = counter("jobs_enqueued_total", "Jobs that this process enqueued.")
OUTCOMES: Final = ("done", "retry", "fail", "snooze", "unstarted", "returned")
jobs_finished = counter(
    "jobs_finished_total", "Jobs that this process gave back, by outcome.", outcome=OUTCOMES
)
jobs_run_seconds = histogram("jobs_run_seconds", "Run time of handler calls.")
jobs_wait_seconds = histogram("jobs_wait_seconds", "From due to claimed.")
leases_lost = counter("jobs_leases_lost_total", "Leases that were gone when this process acked.")
