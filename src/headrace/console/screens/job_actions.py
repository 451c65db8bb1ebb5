"""Actions on jobs, queues and hosts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.console.actions import Action, Done, Field
from headrace.console.model import PREFIX
from headrace.console.views import ViewContext, row_id
from headrace.jobs.errors import InvalidFilter, JobUnknown
from headrace.jobs.model import (
    AT_AWAY_S_MAX,
    IMPORTANCE_LAST,
    PRIORITY_LAST,
    JobFilter,
    NewJob,
)
from headrace.jobs.tasks.options import RETRIES_MAX, SLOTS_MAX
from headrace.kernel.config import parse_as, parse_moment
from headrace.kernel.terminal import pluralize

JOB: Final = Field("job", "Job", kind="fixed")
FILTER: Final = ("queue", "state", "lane", "q", "from_at", "to_at")
MOMENTS: Final = ("from_at", "to_at")
BULK_S: Final = 20.0
"""Time limit of a bulk action; running it again continues."""
DONE_WORDS: Final = {"retry": "queued again", "cancel": "cancelled", "delete": "deleted"}


async def cancel_workflow(context: ViewContext, values: dict[str, Any]) -> str:
    """Cancel a workflow and all jobs that it started."""
    running = await context.jobs.workflows.cancel(job_number(values["job"]))
    text = f"workflow {values['job']} is cancelled with its jobs"
    return f"{text}; {pluralize(len(running), 'job')} still run" if running else text


def bulk(action: str) -> Callable[[ViewContext, dict[str, Any]], Awaitable[str]]:
    """The function that applies `action` to all matching jobs in batches."""

    async def run(context: ViewContext, values: dict[str, Any]) -> str:
        jobs, ends_s = context.jobs, time.monotonic() + BULK_S
        changed = skipped = 0
        cursor: int | None = None
        while True:
            done = await jobs.bulk(action, _filter(values), cursor=cursor)
            changed, skipped = changed + done.changed, skipped + done.skipped
            cursor = done.next_cursor
            if not done.more:
                break
            if time.monotonic() >= ends_s:
                break
        text = f"{pluralize(changed, 'job is', 'jobs are')} {DONE_WORDS[action]}"
        if done.more:
            return f"{text}; more jobs match: run the action again to continue"
        return f"{text}, {skipped:,} changed state meanwhile" if skipped else text

    return run


def count_first(action: str) -> Callable[[ViewContext, dict[str, Any]], Awaitable[str]]:
    """The function that counts the jobs that `action` would change."""

    async def count(context: ViewContext, values: dict[str, Any]) -> str:
        found = await context.jobs.bulk(action, _filter(values), dry_run=True)
        more = "more than " if found.more else ""
        text = pluralize(found.matched, "job matches", "jobs match")
        return f"{more}{text} now"

    return count


def job_number(text: str) -> int:
    """The job id in a URL or form. Raises: JobUnknown."""
    if not (job_id := row_id(text)):
        raise JobUnknown(text[:40])
    return job_id


def _filter(values: dict[str, Any]) -> JobFilter:
    given: dict[str, Any] = {name: values.get(name) or None for name in FILTER}
    moments = {
        name: parse_as(parse_moment, name, given[name], InvalidFilter)
        for name in MOMENTS
        if given[name]
    }
    return JobFilter(**{**given, **moments})


def _bulk_action(action: str, title: str, what: str, *, is_danger: bool) -> Action:
    def body(values: dict[str, Any]) -> dict[str, Any]:
        given = {name: values.get(name) for name in FILTER}
        return {"action": action, "filter": {k: v for k, v in given.items() if v}}

    return Action(
        name=f"jobs.bulk_{action}",
        title=title,
        what=what,
        command=f"headrace jobs bulk {action} [--queue {{queue}}] [--state {{state}}] [--lane"
        f" {{lane}}] [-q {{q}}] [--from {{from_at}}] [--to {{to_at}}]",
        http="POST /v1/jobs/bulk",
        body=body,
        fields=tuple(
            Field(
                name,
                label,
                kind="moment" if name in MOMENTS else "text",
                required=False,
                hint="ready: waiting; leased: in progress." if name == "state" else "",
            )
            for name, label in (
                ("queue", "Queue"),
                ("state", "State"),
                ("lane", "Lane"),
                ("q", "Error contains"),
                ("from_at", "Ended or due from (UTC)"),
                ("to_at", "Ended or due before (UTC)"),
            )
        ),
        is_danger=is_danger,
        run=bulk(action),
        preview=count_first(action),
    )


JOB_ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.retry_job",
        title="Retry job",
        what="Queues job {job} again with all its retries.",
        command="headrace jobs retry {job}",
        http="POST /v1/jobs/{job}/retry",
        fields=(JOB,),
        run=lambda context, given: context.jobs.retry(job_number(given["job"])),
        done="job {job} is queued again with all its retries",
    ),
    Action(
        name="jobs.cancel_job",
        title="Cancel job",
        what="Cancels job {job}. It is kept as cancelled and can be retried.",
        command="headrace jobs cancel {job}",
        http="DELETE /v1/jobs/{job}",
        fields=(JOB,),
        is_danger=True,
        run=lambda context, given: context.jobs.cancel(job_number(given["job"])),
        done="job {job} is cancelled",
    ),
    Action(
        name="jobs.cancel_workflow",
        title="Cancel workflow",
        what="Cancels workflow {job} and all jobs that it started. Running ones end soon.",
        command="headrace workflows cancel {job}",
        http="DELETE /v1/workflows/{job}",
        fields=(JOB,),
        is_danger=True,
        run=cancel_workflow,
    ),
    Action(
        name="jobs.delete_job",
        title="Delete job",
        what="Deletes job {job}. This cannot be undone.",
        command="headrace jobs rm {job}",
        http="DELETE /v1/jobs/{job}?keep=false",
        fields=(JOB,),
        is_danger=True,
        run=lambda context, given: context.jobs.delete(job_number(given["job"])),
        done="job {job} is deleted",
    ),
    _bulk_action(
        "retry",
        "Retry all matching",
        "Queues all matching failed, cancelled or quarantined jobs again.",
        is_danger=False,
    ),
    _bulk_action(
        "cancel",
        "Cancel all matching",
        "Cancels all matching jobs that are scheduled or waiting.",
        is_danger=True,
    ),
    _bulk_action(
        "delete",
        "Delete all matching",
        "Deletes all matching jobs that are not in progress. This cannot be undone.",
        is_danger=True,
    ),
)


QUEUE: Final = Field("queue", "Queue", kind="fixed")
HOST: Final = Field("host", "Host", kind="fixed")
BOUNDS: Final = ("importance", "slots_min", "slots_max", "retries")


async def _remove_queue(context: ViewContext, name: str) -> Done:
    await context.jobs.queues.remove(name)
    return Done(f"queue {name} is removed", f"{PREFIX}/jobs")


def _bounds(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values.get(name) for name in BOUNDS}


def _job(values: dict[str, Any]) -> dict[str, Any]:
    given = {name: values.get(name) for name in ("after_s", "priority", "lane", "unique")}
    rest = {name: value for name, value in given.items() if value is not None}
    return {"payload": values.get("payload"), **rest}


QUEUE_ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.pause_queue",
        title="Pause queue",
        what="Starts no further jobs of queue {queue}. Running jobs continue, waiting jobs stay.",
        command="headrace queues pause {queue}",
        http="PUT /v1/queues/{queue}",
        body=lambda _: {"paused": True},
        fields=(QUEUE,),
        run=lambda context, given: context.jobs.queues.pause(given["queue"]),
        done="queue {queue} is paused: running jobs continue, no new jobs start",
    ),
    Action(
        name="jobs.resume_queue",
        title="Resume queue",
        what="Starts jobs of queue {queue} again.",
        command="headrace queues resume {queue}",
        http="PUT /v1/queues/{queue}",
        body=lambda _: {"paused": False},
        fields=(QUEUE,),
        run=lambda context, given: context.jobs.queues.resume(given["queue"]),
        done="queue {queue} is resumed",
    ),
    Action(
        name="jobs.set_queue",
        title="Override settings",
        what="Overrides the settings that code declares for queue {queue}. Empty fields follow"
        " the code.",
        command="headrace queues set {queue} --importance {importance|none} --slots-min"
        " {slots_min|none}"
        " --slots-max {slots_max|none} --retries {retries|none}",
        http="PUT /v1/queues/{queue}",
        body=_bounds,
        fields=(
            QUEUE,
            Field(
                "importance",
                "Importance",
                kind="number",
                required=False,
                hint=f"0 (first) to {IMPORTANCE_LAST} (last), when slots are scarce.",
                numbers=(0, IMPORTANCE_LAST),
            ),
            *(
                Field(name, label, kind="number", required=False, numbers=(0, SLOTS_MAX))
                for name, label in (("slots_min", "Minimum slots"), ("slots_max", "Maximum slots"))
            ),
            Field(
                "retries",
                "Retries",
                kind="number",
                required=False,
                hint="Number of retries of a failed job.",
                numbers=(0, RETRIES_MAX),
            ),
        ),
        run=lambda context, given: context.jobs.queues.set(given["queue"], **_bounds(given)),
        done="queue {found.queue}: importance {found.importance}, {found.slots_min} to"
        " {found.slots_max} slots, {found.retries} retries",
    ),
    Action(
        name="jobs.remove_queue",
        title="Remove queue",
        what="Removes queue {queue}. It must have no jobs, no cron and no code that runs it.",
        command="headrace queues rm {queue}",
        http="DELETE /v1/queues/{queue}",
        fields=(QUEUE,),
        run=lambda context, given: _remove_queue(context, given["queue"]),
        is_danger=True,
    ),
    Action(
        name="jobs.add_job",
        title="Enqueue job",
        what="Enqueues one job into queue {queue}.",
        command="headrace jobs add {queue} {payload} [--after {after_s}s] [--priority {priority}]"
        " [--lane {lane}] [--unique {unique}]",
        http="POST /v1/queues/{queue}/jobs",
        body=_job,
        fields=(
            QUEUE,
            Field("payload", "Payload, as JSON", kind="json", default="null"),
            Field(
                "after_s",
                "Delay in seconds",
                kind="number",
                required=False,
                numbers=(0, int(AT_AWAY_S_MAX)),
            ),
            Field(
                "priority",
                "Priority",
                kind="number",
                required=False,
                hint=f"0 (first) to {PRIORITY_LAST} (last); default 5.",
                numbers=(0, PRIORITY_LAST),
            ),
            Field("lane", "Lane", required=False),
            Field(
                "unique",
                "Unique key",
                required=False,
                hint="At most one unfinished job of the queue has this key.",
            ),
        ),
        run=lambda context, given: context.jobs.enqueue(
            NewJob(queue=given["queue"], **_job(given))
        ),
        done="job {found} is in queue {queue}",
    ),
    Action(
        name="jobs.drain_host",
        title="Drain host",
        what="Host {host} finishes its jobs and accepts no new ones, until its agent restarts or"
        " the host is used again.",
        command="headrace fleet drain {host}",
        http="POST /v1/fleet/hosts/{host}/drain",
        fields=(HOST,),
        is_danger=True,
        run=lambda context, given: context.jobs.fleet.drain(given["host"]),
        done="host {host} is draining: running jobs finish, no new jobs start",
    ),
    Action(
        name="jobs.undrain_host",
        title="Use host again",
        what="Host {host} accepts jobs again. The plan assigns its slots within seconds.",
        command="headrace fleet undrain {host}",
        http="POST /v1/fleet/hosts/{host}/undrain",
        fields=(HOST,),
        run=lambda context, given: context.jobs.fleet.undrain(given["host"]),
        done="host {host} accepts jobs again",
    ),
)
