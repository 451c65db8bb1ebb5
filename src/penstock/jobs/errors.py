"""What can go wrong with jobs, each with its code and what to do about it."""

from __future__ import annotations

from penstock.kernel.errors import Conflict, InvalidInput, NotFound, TooLarge


class QueueUnknown(NotFound):
    """No running code declared this queue and none is stored under its name."""

    code = "jobs.queue_unknown"

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue[:160]!r} is not known: declare it with @app.task({queue[:40]!r}) and"
            " start that app once, or see `penstock queues ls` for the names there are"
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
            f" `penstock lanes set`, or enqueue a job into it"
        )


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

    def __init__(self, lease_id: int) -> None:
        super().__init__(
            f"lease {lease_id} is over: its jobs were given back or settled, and this result was"
            " not recorded; undo its effects or let the next run repeat them"
        )


class JobNotWaiting(Conflict):
    """The job is past the state that this needs."""

    code = "jobs.not_waiting"


class JobNotEnded(Conflict):
    """Only a job that ended failed, cancelled or quarantined can be retried by hand."""

    code = "jobs.not_ended"


class KeyTaken(Conflict):
    """Another unfinished job has the unique key of this one."""

    code = "jobs.key_taken"


class LimiterFixed(Conflict):
    """A queue with lanes stays with its limiter."""

    code = "jobs.limiter_fixed"
