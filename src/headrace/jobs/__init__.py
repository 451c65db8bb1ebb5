"""Jobs: a durable, fair queue on PostgreSQL, and the workers that drain it.

    queue ---- job_ready --claim--> job_lease --settle--> (deleted) | job_ready | job_failed
      lanes: lane_job + lane_event (journal) --fold, claim--> the same leases

**Promise.** A job whose enqueue returned, or whose transaction committed, is never lost. A job
leaves its lease exactly once, and a group calls back exactly once. A handler may run more than
once: after a lost lease, an error, or an ack without an answer. A dead worker's jobs are ready
again within 35 s. A lane never starts more than its limit in any window, measured at handler start.

**Everything is in PostgreSQL**, whose clock alone decides what is due and expired: two tables for
waiting jobs, one lease row per batch, a claim cursor, and lanes with a journal.

**The life of a job**: `tasks/` (declare, enqueue), `validation.py`, `service/jobs.py` and
`store/jobs.py` (insert), `sql/migrations/` (claim and settle), `leases.py` (claims and acks of a
host), `agent/` and `slots/` (processes that run handlers). `handle.py` is what enqueue returns, and
the bridge for sync code, `workflow.py` replays handlers of several steps through
`workflow_context.py` and `steps.py`, `explain.py` explains waits, `fleet/` plans slots. `model.py`
has values and limits.
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
    HostRuns,
    HostUnknown,
    InvalidCron,
    InvalidFilter,
    InvalidJob,
    InvalidSetting,
    InvalidStep,
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
    WorkflowUnknown,
)
from headrace.jobs.fleet.state import FleetState, QueueHour, QueueMinute
from headrace.jobs.handle import Group, JobRef
from headrace.jobs.job_context import Batch, JobContext, JobLane, current_job
from headrace.jobs.model import (
    BulkDone,
    Job,
    JobFailure,
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
from headrace.jobs.outcomes import Cancel, Fail, Retry, Snooze
from headrace.jobs.service import Jobs
from headrace.jobs.steps import JobResult, Step, WorkflowRun
from headrace.jobs.tasks import Call, Queue, Registry, Task
from headrace.jobs.workflow import Workflow
from headrace.jobs.workflow_context import (
    BlockingWorkflowContext,
    EventLate,
    StepFailed,
    WorkflowContext,
)

__all__ = [
    "Batch",
    "BatchTooLarge",
    "BlockingWorkflowContext",
    "BulkDone",
    "Call",
    "Cancel",
    "Cron",
    "CronExists",
    "CronFixed",
    "CronUnknown",
    "EventLate",
    "Fail",
    "FleetState",
    "Group",
    "GroupClosed",
    "HostRuns",
    "HostUnknown",
    "InvalidCron",
    "InvalidFilter",
    "InvalidJob",
    "InvalidSetting",
    "InvalidStep",
    "InvalidTake",
    "InvalidTask",
    "Job",
    "JobContext",
    "JobFailed",
    "JobFailure",
    "JobFilter",
    "JobLane",
    "JobNotEnded",
    "JobNotWaiting",
    "JobPage",
    "JobProgress",
    "JobRef",
    "JobResult",
    "JobState",
    "JobUnknown",
    "Jobs",
    "JobsConfig",
    "KeyTaken",
    "Lane",
    "LaneExhausted",
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
    "QueueHour",
    "QueueMinute",
    "QueueSettings",
    "QueueStatus",
    "QueueUnknown",
    "Registry",
    "ResultGone",
    "ResultLate",
    "Retry",
    "Snooze",
    "Step",
    "StepFailed",
    "Sweep",
    "Taken",
    "TakenJob",
    "TakenOutcome",
    "Task",
    "Transaction",
    "Why",
    "Workflow",
    "WorkflowContext",
    "WorkflowRun",
    "WorkflowUnknown",
    "current_job",
]
