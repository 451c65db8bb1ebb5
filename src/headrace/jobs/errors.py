"""Errors of jobs, each with a code and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.kernel.errors import (
    Conflict,
    InvalidInput,
    LimitExceeded,
    NotFound,
    TooLarge,
    Unavailable,
    did_you_mean,
)

LIMITERS_NAMED_MAX: Final = 10


class QueueUnknown(NotFound):
    """The queue is neither declared by running code nor stored."""

    code = "jobs.queue_unknown"

    def __init__(self, queue: str, known: Iterable[str] = ()) -> None:
        """`known` are the names of other queues, one of which may be meant."""
        meant = did_you_mean(queue, known)
        super().__init__(
            f"queue {queue[:160]!r} is not known{f'{meant} Otherwise' if meant else ':'} declare it"
            f" with @app.task({queue[:40]!r}) and"
            " start that app once, create one without code with `headrace queues set NAME --create`"
            " (PUT /v1/queues/NAME?create=true), or list the names with `headrace queues ls`"
        )


class JobUnknown(NotFound):
    """The id was never assigned to a job."""

    code = "jobs.job_unknown"

    def __init__(self, job_id: int | str) -> None:
        super().__init__(f"job {str(job_id)[:40]} does not exist: use an id that enqueue returned")


class LaneUnknown(NotFound):
    """The lane was never set or used."""

    code = "jobs.lane_unknown"

    def __init__(self, limiter: str, lane: str) -> None:
        super().__init__(
            f"lane {lane[:160]!r} of limiter {limiter[:160]!r} does not exist: set it with"
            f" `headrace lanes set`, or enqueue a job into it"
        )


class LimiterUnknown(NotFound):
    """The limiter was never set, and no queue names it."""

    code = "jobs.limiter_unknown"

    def __init__(self, limiter: str, known: Sequence[str] = (), *, may_create: bool = True) -> None:
        created = (
            "set it with `headrace lanes limiter`, or its lane with --create (?create=true), or "
        )
        named = ", ".join(known[:LIMITERS_NAMED_MAX]) or "none"
        if len(known) > LIMITERS_NAMED_MAX:
            named += f" and {len(known) - LIMITERS_NAMED_MAX} more"
        super().__init__(
            f"limiter {limiter[:160]!r} does not exist{did_you_mean(limiter, known)}"
            f" (known: {named}): {created if may_create else ''}list them with"
            " `headrace lanes limiters`"
        )


class InvalidTake(InvalidInput):
    """A take or an ack is invalid; nothing was leased or settled."""

    code = "jobs.invalid_take"


class InvalidJob(InvalidInput):
    """A job, group or lane is invalid; nothing was enqueued or changed."""

    code = "jobs.invalid_job"


class InvalidTask(InvalidInput):
    """A task cannot be declared as written."""

    code = "jobs.invalid_task"


class PayloadTooLarge(TooLarge):
    """A payload exceeds the limit; nothing was enqueued."""

    code = "jobs.payload_too_large"


class BatchTooLarge(TooLarge):
    """One call has too many jobs or bytes; nothing was enqueued."""

    code = "jobs.batch_too_large"


class LeaseLost(Conflict):
    """Another worker may hold these jobs now; drop the result, do not retry the write."""

    code = "jobs.lease_lost"

    def __init__(self, lease_id: int | str) -> None:
        super().__init__(
            f"lease {str(lease_id)[:40]} is over: its jobs were returned or settled, and this"
            " result was not recorded; undo its effects or let the next run repeat them"
        )


class JobNotWaiting(Conflict):
    """The job no longer waits."""

    code = "jobs.not_waiting"


class JobNotEnded(Conflict):
    """The job has not ended failed, cancelled or quarantined."""

    code = "jobs.not_ended"


class InvalidFilter(InvalidInput):
    """A filter, a page or a span is invalid or does not suit the action; nothing was changed."""

    code = "jobs.invalid_filter"


class KeyTaken(Conflict):
    """Another unfinished job has the unique key."""

    code = "jobs.key_taken"


class LimiterFixed(Conflict):
    """A queue with lanes cannot change its limiter."""

    code = "jobs.limiter_fixed"


class QueueInUse(Conflict):
    """A queue that has jobs, a cron or a worker cannot be removed."""

    code = "jobs.queue_in_use"

    def __init__(self, queue: str, uses: Sequence[str]) -> None:
        super().__init__(
            f"queue {queue[:160]!r} cannot be removed: it has {', '.join(uses)}. Only a queue that"
            " no code runs is removed: let its jobs end, delete them with"
            f" `headrace jobs bulk delete --queue {queue[:160]}`, and remove its crons"
        )


class LimiterInUse(Conflict):
    """A limiter that code declares, or that has queues or jobs, cannot be removed."""

    code = "jobs.limiter_in_use"

    def __init__(self, limiter: str, uses: Sequence[str]) -> None:
        super().__init__(
            f"limiter {limiter[:160]!r} cannot be removed: it has {', '.join(uses)}. Remove"
            " its queues with `headrace queues rm`, and let its jobs end"
        )


class LaneExhausted(LimitExceeded):
    """A lane cannot start so much within the wait. If the handler does not catch this, its job
    runs later.
    """

    code = "jobs.lane_exhausted"

    def __init__(self, lane: str, starts: int, wait_max_s: float) -> None:
        super().__init__(
            f"lane {lane[:160]!r} cannot start {starts} more within {wait_max_s:g} s: wait longer;"
            " or do not catch this error: the job then runs later, and no attempt is counted",
            retry_after_s=wait_max_s,
        )


class SlotHookFailed(InvalidInput):
    """A start hook raised, so this slot takes no work."""

    code = "jobs.slot_hook_failed"


class NoCurrentJob(Conflict):
    """There is no single current job: outside of a handler, or in a batch."""

    code = "jobs.no_current_job"


class InvalidCron(InvalidInput):
    """A cron has an invalid schedule, time zone or name, or never fires."""

    code = "jobs.invalid_cron"


class CronUnknown(NotFound):
    """No cron has this name."""

    code = "jobs.cron_unknown"

    def __init__(self, name: str) -> None:
        super().__init__(f"cron {name[:160]!r} does not exist: see `headrace crons ls`")


class CronExists(Conflict):
    """A cron of this name exists."""

    code = "jobs.cron_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"cron {name[:160]!r} exists already: change it, or take another name")


class CronFixed(Conflict):
    """The cron is declared by code, so only code changes it."""

    code = "jobs.cron_fixed"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"cron {name[:160]!r} is declared in code: change it there; here it can only be paused"
        )


class HostUnknown(NotFound):
    """No host of this name runs handlers."""

    code = "jobs.host_unknown"

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host[:160]!r} is not known: see `headrace fleet show`")


class HostRuns(Conflict):
    """A running host cannot be removed from the fleet."""

    code = "jobs.host_runs"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"host {host[:160]!r} is running: stop its agent; only a lost host can be removed"
        )


class PayloadNewer(Conflict):
    """The payload's version is newer than this code; the job is returned."""

    code = "jobs.payload_newer"

    def __init__(self, queue: str, version: int, known: int) -> None:
        super().__init__(
            f"task {queue!r}: the payload has version {version}, this code supports {known}: start"
            " the newer code, which runs it"
        )


class VersionMissing(PayloadNewer):
    """No code here has this version of the workflow; the job is returned."""

    code = "jobs.workflow_version_missing"

    def __init__(self, workflow: str, version: int, known: list[int]) -> None:
        Conflict.__init__(
            self,
            f"workflow {workflow!r}: it began with version {version}, this code has"
            f" {', '.join(map(str, known))}: start code that has it, or keep it with"
            f" @{workflow}.older({version})",
        )


class WorkflowUnknown(NotFound):
    """The id is not that of a workflow, or no workflow has the name."""

    code = "jobs.workflow_unknown"

    def __init__(self, subject: int | str) -> None:
        super().__init__(
            f"workflow {str(subject)[:160]!r} is not known: see `headrace workflows ls`"
        )


class InvalidStep(InvalidInput):
    """A step of a workflow, or an event, has an invalid name, time or value."""

    code = "jobs.invalid_step"


class Nondeterministic(Conflict):
    """The code of a workflow calls other steps than its recorded run; it is quarantined."""

    code = "jobs.nondeterministic"


class JobFailed(Conflict):
    """The job whose result was requested did not end as done."""

    code = "jobs.job_failed"

    def __init__(self, job_id: int, state: str, error: str) -> None:
        super().__init__(f"job {job_id} ended {state}: {error or 'without an error'}")
        self.error = error


class ResultGone(NotFound):
    """The job has ended and its result is no longer kept."""

    code = "jobs.result_gone"

    def __init__(self, job_id: int) -> None:
        super().__init__(
            f"job {job_id} ended and its result is no longer kept: read it sooner, or let its task"
            ' keep results longer with keep_result="24h"'
        )


class NoResultKept(InvalidInput):
    """The task keeps no results."""

    code = "jobs.no_result_kept"

    def __init__(self, job_id: int) -> None:
        super().__init__(
            f"job {job_id}: its task keeps no results: declare it with keep_result=True"
        )


class ResultLate(Unavailable, TimeoutError):
    """Timed out; the job is still running. Call again to keep waiting."""

    code = "jobs.result_late"

    def __init__(self, job_id: int, timeout_s: float) -> None:
        super().__init__(
            f"job {job_id} did not end within {timeout_s:g} s: it is still running, call again"
        )


class GroupClosed(Conflict):
    """The group is closed, or this transaction cannot see it."""

    code = "jobs.group_closed"

    def __init__(self, group_id: int) -> None:
        super().__init__(
            f"group {group_id} is closed: enqueue its jobs inside its `async with` block, with the"
            " same `tx`"
        )


class ApplicationBroken(InvalidInput):
    """The application cannot be imported, or its declarations contradict the stored ones."""

    code = "jobs.application_broken"

    def __init__(self, text: str, exit_code: int = InvalidInput.exit_code) -> None:
        super().__init__(f"the application cannot be run, fix it and try again:\n{text}")
        self.exit_code = exit_code  # type: ignore[misc]  # the exit code of the application's error


class NotDeclared(Unavailable):
    """The application's queues could not be stored yet."""

    code = "jobs.not_declared"

    def __init__(self, text: str) -> None:
        super().__init__(f"the application's queues are not declared yet: {text}", retry_after_s=1)


class AgentRuns(Conflict):
    """Another agent of this host name runs, on this machine or elsewhere."""

    code = "jobs.agent_runs"

    def __init__(self, name: str, where: str) -> None:
        super().__init__(
            f"an agent of host {name!r} runs already, {where}: end it, or start this one"
            " under another name with --name"
        )


class HostNameHeld(Unavailable):
    """Another agent, which may have died, has the host name; this one waits until that lease
    expires.
    """

    code = "jobs.host_name_held"

    def __init__(self, name: str, left_s: float) -> None:
        super().__init__(
            f"an agent of host {name!r} from another data folder or machine holds this name for"
            f" {left_s:.0f} s more: this agent waits, and ends if that lease is renewed"
        )


class InvalidSetting(InvalidInput):
    """A setting of a queue is invalid; nothing was changed."""

    code = "jobs.invalid_setting"


class AgentSilent(Unavailable):
    """The slot's agent did not answer; the outcome of the call is unknown."""

    code = "jobs.agent_silent"

    def __init__(self) -> None:
        super().__init__(
            "the agent of this slot has ended or does not respond, so the outcome of this call is"
            " unknown: let the job end with this error, and its next run repeats the call",
            retry_after_s=1,
        )
