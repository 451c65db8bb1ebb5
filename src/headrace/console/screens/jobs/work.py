"""Jobs themselves: the list with its filters, and one job's page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headrace.console.seeing import Ask, Found, attempt
from headrace.jobs.errors import JobUnknown
from headrace.jobs.model import JOB_ID_LAST, STATES_BY_ENDING, Job, JobPage, JobState, Why

JOBS_SHOWN: Final = 100
STATES: Final = tuple(state.value for state in JobState if state is not JobState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsView:
    """A page of jobs that fit; `filter` is what bulk actions are given."""

    page: Found[JobPage]
    queues: Sequence[str]
    filter: dict[str, str]
    next_url: str | None
    first_url: str | None

    @property
    def is_narrow(self) -> bool:
        """Whether the filter means less than every job there is."""
        return any(self.filter[name] for name in ("queue", "state", "lane"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of a job's life; `at` None: it is not kept when."""

    at: datetime | None
    tone: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job's page."""

    job: Job
    why: Found[Why]
    moments: Sequence[Moment]
    is_retriable: bool
    is_waiting: bool


async def see_jobs(ask: Ask) -> JobsView:
    """Jobs that fit queue, state, lane and text of the address."""
    jobs = ask.service("jobs")
    wanted = {name: ask.query.text(name).strip() for name in ("queue", "state", "lane", "q")}
    before = ask.query.number("before", 0)
    given: dict[str, Any] = {name: text or None for name, text in wanted.items()}
    page, queues = await asyncio.gather(
        attempt(jobs.find(**given, before=before or None, jobs_max=JOBS_SHOWN)),
        attempt(jobs.queues.all()),
    )
    following = page.value.next_before if page.value is not None else None
    return JobsView(
        page=page,
        queues=[queue.queue for queue in queues.value or ()],
        filter=wanted,
        next_url=None if following is None else ask.url(before=following),
        first_url=ask.url(before=None) if before else None,
    )


async def see_job(ask: Ask) -> JobView:
    """A job in whatever state. Raises: JobUnknown."""
    jobs = ask.service("jobs")
    job = await jobs.job(job_number(ask.params["job"]))
    return JobView(
        job=job,
        why=await attempt(jobs.why(job.id)),
        moments=list(moments_of(job)),
        is_retriable=job.state.value in STATES_BY_ENDING,
        is_waiting=job.state in (JobState.READY, JobState.SCHEDULED),
    )


def job_number(text: str) -> int:
    """The id of a job in an address or a form. Raises: JobUnknown, where it can be none."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= JOB_ID_LAST):
        raise JobUnknown(text[:40])
    return int(text)


def moments_of(job: Job) -> list[Moment]:
    """What is known of a job's life, in order."""
    found = []
    if job.run_at is not None:
        is_later = job.state is JobState.SCHEDULED
        text = "will be due" if is_later else "due" if job.attempt == 0 else "due (again)"
        found.append(Moment(at=job.run_at, tone="warn" if is_later else "", text=text))
    if job.attempt:
        runs = "run" if job.attempt == 1 else "runs"
        found.append(Moment(at=None, tone="bad", text=f"{job.attempt} {runs} failed so far"))
    if job.losses:
        died = "once" if job.losses == 1 else f"{job.losses} times"
        found.append(Moment(at=None, tone="bad", text=f"its process died {died}"))
    if job.state is JobState.LEASED:
        found.append(
            Moment(at=None, tone="good", text=f"in hand: lease {job.lease_id} of host {job.host}")
        )
    if job.progress is not None:
        told = f"{job.progress.ratio * 100:.0f} %: {job.progress.text}"
        found.append(Moment(at=job.progress.at, tone="good", text=told))
    if job.ended_at is not None:
        tone = "good" if job.state is JobState.DONE else "bad"
        found.append(Moment(at=job.ended_at, tone=tone, text=f"ended {job.state.value}"))
    if job.state is JobState.GONE:
        found.append(Moment(at=None, tone="", text="ended and not kept"))
    return found
