"""Commands `headrace workflows ...`."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from headrace.jobs.cli.jobs import PAYLOAD, duration, first_line, moment
from headrace.jobs.service import Jobs
from headrace.jobs.service.bulk import LISTED
from headrace.jobs.steps import Step, WorkflowRun
from headrace.kernel.terminal import (
    CommandGroup,
    Lines,
    Terminal,
    listing,
    paged,
    pluralize,
    table,
)


@click.group("workflows", cls=CommandGroup)
def workflows() -> None:
    """Workflows: start, show, list, cancel, send events."""


@workflows.command("start", short_help="Start a workflow.")
@click.argument("name")
@click.argument("payload", default="null", type=PAYLOAD)
@duration("--after", "Delay such as 30s or 2h.")
@click.option(
    "--unique",
    default=None,
    help="Key of at most one unfinished workflow; if one has it, print its id.",
)
@click.option("--version", default=None, type=int, help="Version; default: 1.")
def start(terminal: Terminal, /, name: str, payload: Any, **options: Any) -> None:
    """Start workflow NAME; PAYLOAD is JSON."""
    workflow_id = terminal.run(Jobs, lambda jobs: jobs.workflows.start(name, payload, **options))
    terminal.show({"id": workflow_id}, f"workflow {workflow_id}")


@workflows.command("show", short_help="Show a workflow with its steps.")
@click.argument("workflow_id", type=int)
def show(terminal: Terminal, workflow_id: int) -> None:
    """Show workflow WORKFLOW_ID with its steps."""
    found = terminal.run(Jobs, lambda jobs: jobs.workflows.get(workflow_id))
    terminal.show(found, describe_workflow(found))


@workflows.command("ls", short_help="List workflows.")
@click.argument("name", required=False)
@click.option("--state", default=None, type=click.Choice(LISTED))
@click.option("--cursor", default=None, type=int, help="The next page: ids below this one.")
@click.option(
    "--max", "workflows_max", default=100, show_default=True, type=click.IntRange(1, 1000)
)
def list_workflows(terminal: Terminal, /, name: str | None, **choice: Any) -> None:
    """List all workflows with their counts, or the runs of NAME, newest first."""
    if name is None:
        names = terminal.run(Jobs, lambda jobs: jobs.workflows.names())
        rows = [
            (one.queue.partition(".")[2], one.ready, one.scheduled, one.leased, one.failed)
            for one in names
        ]
        head = ("workflow", "ready", "scheduled", "leased", "failed")
        terminal.show(listing(names, next_cursor=None), table(head, rows))
        return
    page = terminal.run(Jobs, lambda jobs: jobs.workflows.find(name, **choice))
    found = [(job.id, job.state.value, first_line(job.error)) for job in page.jobs]
    text = paged(table(("id", "state", "error"), found), page.next_cursor)
    terminal.show(listing(page.jobs, next_cursor=page.next_cursor), text)


@workflows.command("cancel", short_help="Cancel a workflow and its jobs.")
@click.argument("workflow_id", type=int)
def cancel(terminal: Terminal, workflow_id: int) -> None:
    """Cancel workflow WORKFLOW_ID and all jobs that it started."""
    running = terminal.run(Jobs, lambda jobs: jobs.workflows.cancel(workflow_id))
    text = f"workflow {workflow_id} is cancelled"
    if running:
        text += f"; {pluralize(len(running), 'job')} still run: {' '.join(map(str, running))}"
    terminal.show({"id": workflow_id, "running": running}, text)


@workflows.command("event", short_help="Send an event.")
@click.argument("name")
@click.argument("key")
@click.argument("payload", default="null", type=PAYLOAD)
def event(terminal: Terminal, name: str, key: str, payload: Any) -> None:
    """Send event NAME with KEY to every workflow that waits for it; PAYLOAD is JSON."""
    is_first = terminal.run(Jobs, lambda jobs: jobs.workflows.send_event(name, key, payload))
    text = "sent" if is_first else "not sent: an event with this name and key was sent before"
    terminal.show({"is_first": is_first}, text)


def describe_workflow(found: WorkflowRun) -> str:
    """A workflow in lines of text."""
    rows = [
        ("workflow", f"{found.id} {found.workflow}"),
        ("version", found.version),
        ("state", found.state.value),
        ("begun", moment(found.begun_at)),
        ("ended", moment(found.ended_at)),
        ("waits", found.waits_for),
        ("error", found.error),
        ("result", None if found.result is None else _json(found.result)),
    ]
    lines: list[str] = [f"{name:<10}{value}" for name, value in rows if value is not None]
    if found.steps:
        head = ("step", "name", "kind", "state", "failures", "")
        lines += ["", table(head, [_step_row(step) for step in found.steps])]
    return Lines(*lines)


def _step_row(step: Step) -> tuple[Any, ...]:
    text = step.waits_for or first_line(step.error)
    if step.jobs:
        text = f"{text} jobs {' '.join(map(str, step.jobs[:10]))}".strip()
    elif not text and step.result is not None:
        text = _json(step.result)[:80]
    return (step.number, step.name, step.kind, step.state, step.failures or "", text)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
