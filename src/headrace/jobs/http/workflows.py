"""Routes of workflows: start, show with steps, cancel, send an event.

Lists are those of jobs: `GET /v1/jobs?queue=workflow.NAME`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.jobs.http.jobs import READ, WRITE, JobAdded
from headrace.jobs.model import JobToAdd
from headrace.jobs.service import Jobs
from headrace.jobs.steps import WorkflowRun, parse_workflow_id
from headrace.kernel.routes import Idempotency

STARTED: Final = 202


class WorkflowToStart(JobToAdd, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow to start, with the options of a job."""

    version: int | None = None  # type: ignore[assignment]
    """None: the newest of the code that the API runs with."""


class EventToSend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event for every workflow that waits for its name and key."""

    name: str
    key: str | int
    payload: Any = None


class EventSent(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the event is the first of its name and key; a later one has no effect."""

    is_first: bool


class WorkflowCancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that still run and end soon; the others are cancelled."""

    running: list[int]


@post("/v1/workflows/{name:str}/start", status_code=STARTED, opt={**WRITE, "idempotent": True})
async def start_workflow(
    jobs: NamedDependency[Jobs],
    idempotency: NamedDependency[Idempotency],
    name: FromPath[str],
    data: JSONBody[WorkflowToStart],
) -> JobAdded:
    """Start a workflow by name."""

    async def start(tx: Any) -> JobAdded:
        options = msgspec.structs.asdict(data)
        return JobAdded(id=await jobs.workflows.start(name, tx=tx, **options))

    return await idempotency.run(start)


@get("/v1/workflows/{workflow_id:str}", opt=READ)
async def get_workflow(jobs: NamedDependency[Jobs], workflow_id: FromPath[str]) -> WorkflowRun:
    """Show a workflow with its steps."""
    return await jobs.workflows.get(parse_workflow_id(workflow_id))


@delete("/v1/workflows/{workflow_id:str}", status_code=200, opt=WRITE)
async def cancel_workflow(
    jobs: NamedDependency[Jobs], workflow_id: FromPath[str]
) -> WorkflowCancelled:
    """Cancel a workflow and all jobs that it started."""
    running = await jobs.workflows.cancel(parse_workflow_id(workflow_id))
    return WorkflowCancelled(running=running)


@post("/v1/workflows/events", status_code=200, opt=WRITE)
async def send_event(jobs: NamedDependency[Jobs], data: JSONBody[EventToSend]) -> EventSent:
    """Send an event to every workflow that waits for it, now or later."""
    is_first = await jobs.workflows.send_event(data.name, data.key, data.payload)
    return EventSent(is_first=is_first)
