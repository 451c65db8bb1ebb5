"""The jobs room: job lists and pages, limiters and lanes, crons."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import structs

from headrace.console.model import ROWS_SHOWN
from headrace.console.screens.fleet import (
    view_alerts,
    view_decisions,
    view_fleet,
    view_hosts,
)
from headrace.console.screens.job_actions import JOB_ACTIONS, QUEUE_ACTIONS, job_number
from headrace.console.screens.lane_actions import CRON_ACTIONS, LANE_ACTIONS
from headrace.console.screens.moderation import MODERATION_ACTIONS, view_moderation
from headrace.console.screens.queue import view_queue
from headrace.console.views import Room, Screen, ViewContext, attempt
from headrace.jobs.model import STATES_BY_ENDING, Job, JobsConfig, JobState
from headrace.jobs.steps import Step
from headrace.jobs.tasks.options import WORKFLOW_PREFIX
from headrace.kernel.terminal import pluralize

TAKER: Final = "taker"
"""The host of leases of people and other programs."""
STATES: Final = tuple(state.value for state in JobState if state is not JobState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An entry of a job's timeline; without `at`, `when` is its place in it."""

    at: datetime | None
    tone: str
    text: str
    when: str = ""


@dataclass(frozen=True, slots=True)
class StepBar:
    """When a step ran: its begin and length in percent of the workflow's time."""

    begin: float
    length: float


async def view_jobs(context: ViewContext) -> dict[str, Any]:
    """Jobs that match the filter in the URL."""
    jobs = context.jobs
    wanted = {name: context.query.text(name).strip() for name in ("queue", "state", "lane", "q")}
    before = context.query.number("before", 0)
    given: dict[str, Any] = {name: text or None for name, text in wanted.items()}
    from_at, to_at = context.query.moment("from"), context.query.moment("to")
    wanted |= {name: context.query.text(name[:-3]).strip() for name in ("from_at", "to_at")}
    given |= {"from_at": from_at, "to_at": to_at}
    page, queues = await asyncio.gather(
        attempt(jobs.find, **given, cursor=before or None, jobs_max=ROWS_SHOWN),
        attempt(jobs.queues.all),
    )
    following = page.value.next_cursor if page.value is not None else None
    return {
        "page": page,
        "queues": [queue.queue for queue in queues.value or ()],
        "filter": wanted,
        "taker": TAKER,
        "kept_s": context.house.config.section(JobsConfig).failed_kept_s,
        "is_filtered": any(wanted.values()),
        "is_narrow": any(wanted[name] for name in ("queue", "state", "lane")),
        "next_url": None if following is None else context.url(before=following),
    }


async def view_job(context: ViewContext) -> dict[str, Any]:
    """The page of a job, in any state. Raises: JobUnknown."""
    jobs = context.jobs
    job = await jobs.job(job_number(context.params["job"]))
    is_workflow = (job.queue or "").startswith(WORKFLOW_PREFIX)
    workflow = await attempt(jobs.workflows.get, job.id) if is_workflow else None
    steps = workflow.value.steps if workflow is not None and workflow.value is not None else ()
    why = await attempt(jobs.why, job.id)
    if is_taken(job):
        text = f"a person or another program has taken it under lease {job.lease_id}"
        why = why.map(lambda found: structs.replace(found, text=text))
    return {
        "job": job,
        "why": why,
        "is_taken": is_taken(job),
        "has_error_above": bool(job.error and why.value and job.error in why.value.text),
        "moments": list(moments_of(job)),
        "is_retriable": job.state.value in STATES_BY_ENDING,
        "is_waiting": job.state in (JobState.READY, JobState.SCHEDULED),
        "workflow": workflow,
        "bars": step_bars(steps, datetime.now(UTC)),
    }


def step_bars(steps: Sequence[Step], now: datetime) -> list[StepBar]:
    """The bars of `steps`; one that has not ended reaches until now.

    Until all have ended, the whole time grows in steps of 10 %, so that the page changes seldom.
    """
    if not steps:
        return []
    first = min(step.begun_at for step in steps)
    ages_s = [
        ((step.begun_at - first).total_seconds(), ((step.ended_at or now) - first).total_seconds())
        for step in steps
    ]
    whole_s = max(0.001, *(end_s for _, end_s in ages_s))
    if any(step.ended_at is None for step in steps):
        whole_s = 1.1 ** math.ceil(math.log(whole_s, 1.1))
    bars = []
    for step, (begin_s, end_s) in zip(steps, ages_s, strict=True):
        length_s = (whole_s if step.ended_at is None else max(end_s, begin_s)) - begin_s
        bars.append(StepBar(round(begin_s / whole_s * 100, 2), round(length_s / whole_s * 100, 2)))
    return bars


def is_taken(job: Job) -> bool:
    """Whether a person or another program holds the job's lease, instead of a host of the fleet."""
    return job.host == TAKER


def moments_of(job: Job) -> list[Moment]:
    """Known events of a job, in order."""
    found = []
    if job.failure is not None:
        text = f"failed, then retried: {job.failure.error or 'no error text'}"
        found.append(Moment(at=job.failure.at, tone="bad", text=text))
    # The last run of a failed job is its end, which has a time.
    before = job.attempt - (job.state is JobState.FAILED)
    if before > 0:
        text = f"{pluralize(before, 'run')} failed"
        found.append(Moment(at=None, tone="bad", text=text, when="earlier"))
    if job.losses:
        text = f"{pluralize(job.losses, 'run')} cut off: the worker died, or the lease ended"
        found.append(Moment(at=None, tone="bad", text=text, when="earlier"))
    if job.run_at is not None:
        is_later = job.state is JobState.SCHEDULED
        text = "due for retry" if before > 0 else "scheduled" if is_later else "due"
        found.append(Moment(at=job.run_at, tone="warn" if is_later else "", text=text))
    if job.state is JobState.LEASED:
        where = "taken by a person or another program" if is_taken(job) else f"on host {job.host}"
        text = f"in progress: lease {job.lease_id}, {where}"
        found.append(Moment(at=None, tone="good", text=text, when="now"))
    if job.progress is not None:
        progress = f"{job.progress.ratio * 100:.0f} %: {job.progress.text}"
        found.append(Moment(at=job.progress.at, tone="good", text=progress))
    if job.ended_at is not None:
        tone = "good" if job.state is JobState.DONE else "bad"
        text = job.state.value
        if job.state is JobState.FAILED and job.attempt > 1:
            text = f"run {job.attempt} failed"
        found.append(Moment(at=job.ended_at, tone=tone, text=text))
    if job.state is JobState.GONE:
        found.append(Moment(at=None, tone="", text="ended and not kept, or not committed"))
    return found


async def view_limiters(context: ViewContext) -> dict[str, Any]:
    """Every limiter, sorted by name."""
    return {"limiters": await attempt(context.jobs.lanes.limiters)}


async def view_limiter(context: ViewContext) -> dict[str, Any]:
    """A limiter with its lanes after the name in the URL. Raises: LimiterUnknown."""
    lanes = context.jobs.lanes
    limiter = await lanes.get_limiter(context.params["limiter"])
    after = context.query.text("after")
    found = await lanes.list(limiter.limiter, after=after, lanes_max=ROWS_SHOWN + 1)
    shown, next_url = context.cut(found, ROWS_SHOWN, after="lane")
    return {"limiter": limiter, "lanes": shown, "next_url": next_url}


async def view_crons(context: ViewContext) -> dict[str, Any]:
    """Every cron, sorted by name."""
    return {"crons": await attempt(context.jobs.crons.all)}


READ: Final = "jobs:read"

ROOM: Final = Room(
    name="jobs",
    title="Jobs",
    key="j",
    scope=READ,
    screens=(
        Screen("/jobs", "Fleet", "jobs/fleet.html", view_fleet, tab="Fleet"),
        Screen("/jobs/hosts", "Hosts", "jobs/hosts.html", view_hosts, tab="Hosts"),
        Screen(
            "/jobs/decisions",
            "Slot decisions",
            "jobs/decisions.html",
            view_decisions,
            tab="Slot decisions",
        ),
        Screen("/jobs/jobs", "Jobs", "jobs/jobs.html", view_jobs, tab="Jobs", live=False),
        Screen(
            "/jobs/lanes", "Limiters and lanes", "jobs/limiters.html", view_limiters, tab="Limiters"
        ),
        Screen("/jobs/crons", "Crons", "jobs/crons.html", view_crons, tab="Crons"),
        Screen("/jobs/alerts", "Alerts", "jobs/alerts.html", view_alerts, tab="Alerts"),
        Screen("/jobs/queues/{queue:str}", "Queue", "jobs/queue.html", view_queue),
        Screen(
            "/jobs/queues/{queue:str}/moderate",
            "Moderation",
            "jobs/moderate.html",
            view_moderation,
            scope="jobs:write",
            live=False,
        ),
        Screen("/jobs/jobs/{job:str}", "Job", "jobs/job.html", view_job),
        Screen("/jobs/lanes/{limiter:str}", "Limiter", "jobs/limiter.html", view_limiter),
    ),
    actions=(*QUEUE_ACTIONS, *JOB_ACTIONS, *LANE_ACTIONS, *CRON_ACTIONS, *MODERATION_ACTIONS),
)
