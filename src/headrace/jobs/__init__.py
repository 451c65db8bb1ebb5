"""Jobs: a durable, fair queue on PostgreSQL, and the workers that drain it.

    queue ---- job_ready --claim--> job_lease --settle--> (deleted) | job_ready | job_failed
      lanes: lane_job + lane_event (journal) --fold, claim--> the same leases

**Promise.** An enqueue that returned, or whose transaction committed, is never lost. Moving out of a lease
happens exactly once (whoever removes the job from its lease row settles it), and so does a group's callback.
A handler's body may repeat: after a lost lease, a raised call, or an ack whose answer was lost. A dead
worker's jobs are ready again in at most 35 s. A lane never starts more than its limit in any window, as
measured at handler start.

**Everything is in PostgreSQL**, whose clock alone decides what is due and expired. The shape (two tables a
state, a lease row a batch, a scan watermark, lanes with a journal) was measured best of seven: 118,000 jobs/s
with one consumer, 97,000/s beside a 24 s transaction (PostgreSQL 18, 2 cores shared with the clients).

**Limits**: `model.py`. **Files**: hearts `tasks/` (what code declares), `inhand.py` and `handling.py` (what a handler
holds and says), `slots/` (running handlers), `intake.py` (the checks at the door), `fitting.py` (payloads against known tasks), `leases.py` (a host's desk) with
`scans.py` (how far its claims came) and `settling.py` (what is not yet recorded), `agent/` (processes and who works what), `fleet/` (the plan), `hints.py`
(coalesced NOTIFY), `refs.py` and `bridge.py` (what enqueue returns; sync code), `reasons.py` (why a job waits);
then `model`, `errors`, `worker` and the folders `store` + `sql`, `service`, `http`, `cli`.
"""

from __future__ import annotations

from headrace.engines.caller_transaction import Transaction
from headrace.jobs.crons import Cron, NewCron
from headrace.jobs.errors import (
    BatchTooLarge,
    CronExists,
    CronFixed,
    CronUnknown,
    GroupClosed,
    HostUnknown,
    InvalidCron,
    InvalidFilter,
    InvalidJob,
    InvalidSetting,
    InvalidSpan,
    InvalidTake,
    InvalidTask,
    JobFailed,
    JobNotEnded,
    JobNotWaiting,
    JobUnknown,
    KeyTaken,
    LaneExhausted,
    LaneUnknown,
    LeaseLost,
    LimiterUnknown,
    NoCurrentJob,
    NoResultKept,
    PayloadTooLarge,
    QueueUnknown,
    ResultGone,
    ResultLate,
)
from headrace.jobs.fleet.facts import FleetState, QueueMinute
from headrace.jobs.handling import Cancel, Fail, Retry, Snooze
from headrace.jobs.inhand import Batch, JobInHand, LaneInHand, current_job
from headrace.jobs.model import (
    BulkDone,
    Job,
    JobFilter,
    JobPage,
    JobProgress,
    JobsConfig,
    JobState,
    Lane,
    Limiter,
    NewGroup,
    NewJob,
    QueueSettings,
    QueueStatus,
    Sweep,
    Taken,
    TakenJob,
    TakenOutcome,
    Why,
)
from headrace.jobs.refs import JobRef
from headrace.jobs.service import Jobs
from headrace.jobs.service.groups import Group
from headrace.jobs.tasks import Call, Queue, Registry, Task

__all__ = [
    "Batch",
    "BatchTooLarge",
    "BulkDone",
    "Call",
    "Cancel",
    "Cron",
    "CronExists",
    "CronFixed",
    "CronUnknown",
    "Fail",
    "FleetState",
    "Group",
    "GroupClosed",
    "HostUnknown",
    "InvalidCron",
    "InvalidFilter",
    "InvalidJob",
    "InvalidSetting",
    "InvalidSpan",
    "InvalidTake",
    "InvalidTask",
    "Job",
    "JobFailed",
    "JobFilter",
    "JobInHand",
    "JobNotEnded",
    "JobNotWaiting",
    "JobPage",
    "JobProgress",
    "JobRef",
    "JobState",
    "JobUnknown",
    "Jobs",
    "JobsConfig",
    "KeyTaken",
    "Lane",
    "LaneExhausted",
    "LaneInHand",
    "LaneUnknown",
    "LeaseLost",
    "Limiter",
    "LimiterUnknown",
    "NewCron",
    "NewGroup",
    "NewJob",
    "NoCurrentJob",
    "NoResultKept",
    "PayloadTooLarge",
    "Queue",
    "QueueMinute",
    "QueueSettings",
    "QueueStatus",
    "QueueUnknown",
    "Registry",
    "ResultGone",
    "ResultLate",
    "Retry",
    "Snooze",
    "Sweep",
    "Taken",
    "TakenJob",
    "TakenOutcome",
    "Task",
    "Transaction",
    "Why",
    "current_job",
]
