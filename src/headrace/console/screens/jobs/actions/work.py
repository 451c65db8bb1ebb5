"""What can be done to jobs, one or all that fit a filter."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.console import shown
from headrace.console.actions import Action, Field
from headrace.console.screens.jobs.work import job_number
from headrace.console.seeing import Ask
from headrace.jobs.model import JobFilter

WRITE: Final = "jobs:write"
JOB: Final = Field(name="job", label="Job", kind="fixed")
FILTER: Final = ("queue", "state", "lane", "q")
BULK_S: Final = 20.0
"""A bulk action of many steps stops after so long and says so; sending it again goes on."""
DONE_WORDS: Final = {"retry": "ready again", "cancel": "cancelled", "delete": "gone"}


async def retry_job(ask: Ask, values: dict[str, Any]) -> str:
    """Give it another life."""
    await ask.service("jobs").retry(job_number(values["job"]))
    return f"job {values['job']} is ready again, with all its retries"


async def cancel_job(ask: Ask, values: dict[str, Any]) -> str:
    """Cancel a job that waits."""
    await ask.service("jobs").cancel(job_number(values["job"]))
    return f"job {values['job']} is cancelled"


async def delete_job(ask: Ask, values: dict[str, Any]) -> str:
    """Remove a job for good."""
    await ask.service("jobs").delete(job_number(values["job"]))
    return f"job {values['job']} is gone for good"


def bulk(action: str) -> Callable[[Ask, dict[str, Any]], Awaitable[str]]:
    """The verb that does `action` to all jobs that fit, step by step."""

    async def run(ask: Ask, values: dict[str, Any]) -> str:
        jobs, ends_s = ask.service("jobs"), time.monotonic() + BULK_S
        changed = skipped = 0
        before: int | None = None
        while True:
            done = await jobs.bulk(action, _filter(values), before=before)
            changed, skipped = changed + done.changed, skipped + done.skipped
            before = done.next_before
            if not done.more:
                break
            if time.monotonic() >= ends_s:
                break
        told = f"{shown.counted(changed, 'job is', 'jobs are')} {DONE_WORDS[action]}"
        if done.more:
            return f"{told}; there are more: do it again to go on"
        return f"{told}, {skipped:,} had moved on meanwhile" if skipped else told

    return run


def count_first(action: str) -> Callable[[Ask, dict[str, Any]], Awaitable[str]]:
    """Says how many jobs `action` would change now."""

    async def count(ask: Ask, values: dict[str, Any]) -> str:
        found = await ask.service("jobs").bulk(action, _filter(values), dry_run=True)
        more = "more than " if found.more else ""
        told = shown.counted(found.matched, "job fits", "jobs fit")
        return f"{more}{told} now and would be changed"

    return count


def _filter(values: dict[str, Any]) -> JobFilter:
    return JobFilter(**{name: values.get(name) or None for name in FILTER})


def _bulk_action(action: str, title: str, what: str, *, is_danger: bool) -> Action:
    def body(values: dict[str, Any]) -> dict[str, Any]:
        given = {name: values.get(name) for name in FILTER}
        return {"action": action, "filter": {k: v for k, v in given.items() if v}}

    return Action(
        name=f"jobs.bulk_{action}",
        title=title,
        scope=WRITE,
        what=what,
        command=f"headrace jobs bulk {action} [--queue {{queue}}] [--state {{state}}] [--lane {{lane}}] [-q {{q}}]",
        method="POST",
        path="/v1/jobs/bulk",
        body=body,
        fields=tuple(
            Field(name=name, label=label, required=False)
            for name, label in (
                ("queue", "Queue"),
                ("state", "State"),
                ("lane", "Lane"),
                ("q", "Text in the error"),
            )
        ),
        is_danger=is_danger,
        run=bulk(action),
        preview=count_first(action),
    )


ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        name="jobs.retry_job",
        title="Retry job",
        scope=WRITE,
        what="Makes job {job} ready again, with all its retries.",
        command="headrace jobs retry {job}",
        method="POST",
        path="/v1/jobs/{job}/retry",
        fields=(JOB,),
        run=retry_job,
    ),
    Action(
        name="jobs.cancel_job",
        title="Cancel job",
        scope=WRITE,
        what="Cancels job {job}; it is kept as cancelled and can be retried.",
        command="headrace jobs cancel {job}",
        method="DELETE",
        path="/v1/jobs/{job}",
        fields=(JOB,),
        is_danger=True,
        run=cancel_job,
    ),
    Action(
        name="jobs.delete_job",
        title="Delete job",
        scope=WRITE,
        what="Removes job {job} for good.",
        command="headrace jobs rm {job}",
        method="DELETE",
        path="/v1/jobs/{job}?keep=false",
        fields=(JOB,),
        is_danger=True,
        run=delete_job,
    ),
    _bulk_action(
        "retry",
        "Retry all that fit",
        "Makes every failed, cancelled or quarantined job ready again that fits what is given here.",
        is_danger=False,
    ),
    _bulk_action(
        "cancel",
        "Cancel all that fit",
        "Cancels every scheduled or ready job that fits what is given here.",
        is_danger=True,
    ),
    _bulk_action(
        "delete",
        "Delete all that fit",
        "Removes every job for good that fits what is given here and is not in hand.",
        is_danger=True,
    ),
)
