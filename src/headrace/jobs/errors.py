"""What can go wrong with jobs, each with its code and what to do about it."""

from __future__ import annotations

from headrace.kernel.errors import (
    Conflict,
    InvalidInput,
    LimitExceeded,
    NotFound,
    TooLarge,
    Unavailable,
)


class QueueUnknown(NotFound):
    """No running code declared this queue and none is stored under its name."""

    code = "jobs.queue_unknown"

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue[:160]!r} is not known: declare it with @app.task({queue[:40]!r}) and"
            " start that app once, make one without code with `headrace queues set NAME --create`"
            " (PUT /v1/queues/NAME?create=true), or see `headrace queues ls` for the names there are"
        )


class JobUnknown(NotFound):
    """An id that was never given to a job."""

    code = "jobs.job_unknown"

    def __init__(self, job_id: int | str) -> None:
        super().__init__(f"job {str(job_id)[:40]} does not exist: use an id that enqueue returned")


class LaneUnknown(NotFound):
    """No lane of that name was set or used."""

    code = "jobs.lane_unknown"

    def __init__(self, limiter: str, lane: str) -> None:
        super().__init__(
            f"lane {lane[:160]!r} of limiter {limiter[:160]!r} does not exist: set it with"
            f" `headrace lanes set`, or enqueue a job into it"
        )


class LimiterUnknown(NotFound):
    """No limiter of that name was set, and no queue names it."""

    code = "jobs.limiter_unknown"

    def __init__(self, limiter: str) -> None:
        super().__init__(
            f"limiter {limiter[:160]!r} does not exist: set it with `headrace lanes limiter`, or its lane"
            " with --create (?create=true); `headrace lanes limiters` names those there are"
        )


class InvalidTake(InvalidInput):
    """A take or its ack that means nothing valid; nothing was handed out or settled."""

    code = "jobs.invalid_take"


class InvalidJob(InvalidInput):
    """A job, group or lane that means nothing valid; nothing was enqueued."""

    code = "jobs.invalid_job"


class InvalidTask(InvalidInput):
    """A task that cannot be declared as written."""

    code = "jobs.invalid_task"


class PayloadTooLarge(TooLarge):
    """A payload over the bound; nothing was enqueued."""

    code = "jobs.payload_too_large"


class BatchTooLarge(TooLarge):
    """Too many jobs or bytes in one call; nothing was enqueued."""

    code = "jobs.batch_too_large"


class LeaseLost(Conflict):
    """Another worker may hold these jobs now; drop the result, do not retry the write."""

    code = "jobs.lease_lost"

    def __init__(self, lease_id: int | str) -> None:
        super().__init__(
            f"lease {str(lease_id)[:40]} is over: its jobs were given back or settled, and this result was"
            " not recorded; undo its effects or let the next run repeat them"
        )


class JobNotWaiting(Conflict):
    """The job is past the state that this needs."""

    code = "jobs.not_waiting"


class JobNotEnded(Conflict):
    """Only a job that ended failed, cancelled or quarantined can be retried by hand."""

    code = "jobs.not_ended"


class InvalidFilter(InvalidInput):
    """A filter of jobs that means nothing valid, or nothing that the action could do; nothing was done."""

    code = "jobs.invalid_filter"


class KeyTaken(Conflict):
    """Another unfinished job has the unique key of this one."""

    code = "jobs.key_taken"


class LimiterFixed(Conflict):
    """A queue with lanes stays with its limiter."""

    code = "jobs.limiter_fixed"


class LaneExhausted(LimitExceeded):
    """A lane could give no further starts in time; a handler that lets this pass is snoozed."""

    code = "jobs.lane_exhausted"

    def __init__(self, lane: str, starts: int, wait_max_s: float) -> None:
        super().__init__(
            f"lane {lane[:160]!r} has no {starts} further starts within {wait_max_s:g} s: wait longer,"
            " or let this error pass and the job runs again later, without an attempt",
            retry_after_s=wait_max_s,
        )


class SlotHookFailed(InvalidInput):
    """A start hook raised: this slot can take no work."""

    code = "jobs.slot_hook_failed"


class NoCurrentJob(Conflict):
    """Code outside a handler, or one of a batch, asked which job it runs."""

    code = "jobs.no_current_job"


class InvalidCron(InvalidInput):
    """A cron whose spec, time zone or name means nothing valid, or that never comes."""

    code = "jobs.invalid_cron"


class CronUnknown(NotFound):
    """No cron of that name is stored."""

    code = "jobs.cron_unknown"

    def __init__(self, name: str) -> None:
        super().__init__(f"cron {name[:160]!r} does not exist: see `headrace crons ls`")


class CronExists(Conflict):
    """A cron of that name is stored already."""

    code = "jobs.cron_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"cron {name[:160]!r} exists already: change it, or take another name")


class CronFixed(Conflict):
    """Code declares this cron, so code alone changes it."""

    code = "jobs.cron_fixed"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"cron {name[:160]!r} is declared in code: change it there; here it can be paused"
        )


class InvalidSpan(InvalidInput):
    """A span of time that ends before it begins, or is longer than one call may ask for."""

    code = "jobs.invalid_span"


class HostUnknown(NotFound):
    """No host of that name runs handlers."""

    code = "jobs.host_unknown"

    def __init__(self, host: str) -> None:
        super().__init__(f"host {host[:160]!r} is not known: see `headrace fleet show`")


class PayloadNewer(Conflict):
    """The payload is of a shape that only newer code knows: the job goes back for that."""

    code = "jobs.payload_newer"

    def __init__(self, queue: str, version: int, known: int) -> None:
        super().__init__(
            f"task {queue!r}: the payload is of version {version} and this code knows {known}: start"
            " the newer code, which takes it"
        )


class JobFailed(Conflict):
    """The job whose result was asked for ended otherwise than done."""

    code = "jobs.job_failed"

    def __init__(self, job_id: int, state: str, error: str) -> None:
        super().__init__(f"job {job_id} ended {state}: {error or 'without an error'}")
        self.error = error


class ResultGone(NotFound):
    """The job ended and what it returned is kept no more."""

    code = "jobs.result_gone"

    def __init__(self, job_id: int) -> None:
        super().__init__(
            f"job {job_id} ended and its result is kept no more: ask sooner, or let its task keep"
            ' results longer with keep_result="24h"'
        )


class NoResultKept(InvalidInput):
    """The task keeps no results."""

    code = "jobs.no_result_kept"

    def __init__(self, job_id: int) -> None:
        super().__init__(
            f"job {job_id}: its task keeps no results: declare it with keep_result=True"
        )


class ResultLate(Unavailable, TimeoutError):
    """The job did not end in time; it goes on, and may be asked again."""

    code = "jobs.result_late"

    def __init__(self, job_id: int, timeout_s: float) -> None:
        super().__init__(
            f"job {job_id} did not end within {timeout_s:g} s: it goes on, ask again later"
        )


class GroupClosed(Conflict):
    """The group takes no members any more, or this transaction does not see it."""

    code = "jobs.group_closed"

    def __init__(self, group_id: int) -> None:
        super().__init__(
            f"group {group_id} takes no members: enqueue them inside its block, with the same `tx`"
        )


class ApplicationBroken(InvalidInput):
    """The application cannot be imported, or what it declares contradicts what is stored."""

    code = "jobs.application_broken"

    def __init__(self, text: str, exit_code: int = InvalidInput.exit_code) -> None:
        super().__init__(f"the application cannot be run, mend it and try again:\n{text}")
        self.exit_code = exit_code  # type: ignore[misc]  # the process ends as the application's own error says


class NotDeclared(Unavailable):
    """The queues of the application could not be stored yet."""

    code = "jobs.not_declared"

    def __init__(self, text: str) -> None:
        super().__init__(f"the application's queues are not declared yet: {text}", retry_after_s=1)


class AgentRuns(Conflict):
    """An agent of this host name runs on this machine already."""

    code = "jobs.agent_runs"

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(
            f"an agent of host {name!r} runs already, as process {pid}: end it, or start this one"
            " under another name with --name"
        )


class InvalidSetting(InvalidInput):
    """A setting of a queue that means nothing valid; nothing was changed."""

    code = "jobs.invalid_setting"
