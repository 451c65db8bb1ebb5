"""Commands `penstock jobs ...`."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from penstock.jobs.cli.text import describe_job, first_line, table
from penstock.jobs.errors import InvalidJob
from penstock.jobs.model import STATES_BY_ENDING, NewJob
from penstock.jobs.service import Jobs
from penstock.kernel.config import parse_duration_s
from penstock.kernel.terminal import Terminal


@click.group("jobs")
def jobs() -> None:
    """Jobs: add, look, steer."""


@jobs.command("add", short_help="Enqueue a job.")
@click.argument("queue")
@click.argument("payload", default="null")
@click.option("--after", default=None, help="Delay such as 30s or 2h.")
@click.option("--priority", default=5, show_default=True, type=int, help="0 first to 9 last.")
@click.option("--unique", default=None, help="Key that one unfinished job may have.")
@click.option("--lane", default=None, help="Lane inside the queue's limiter.")
@click.pass_obj
def add(terminal: Terminal, /, queue: str, payload: str, **options: Any) -> None:
    """Enqueue one job into QUEUE; PAYLOAD is JSON."""
    after = options.pop("after")
    try:
        decoded = msgspec.json.decode(payload)
        after_s = None if after is None else parse_duration_s(after)
    except ValueError as error:
        raise InvalidJob(f"PAYLOAD is JSON and --after a duration such as 30s: {error}") from error
    job = NewJob(queue=queue, payload=decoded, after_s=after_s, **options)
    job_id = terminal.run(Jobs, lambda jobs: jobs.enqueue(job))
    terminal.show({"id": job_id}, f"job {job_id}")


@jobs.command("show", short_help="Show a job.")
@click.argument("job_id", type=int)
@click.pass_obj
def show(terminal: Terminal, job_id: int) -> None:
    """Show job JOB_ID in whatever state it is."""
    job = terminal.run(Jobs, lambda jobs: jobs.job(job_id))
    terminal.show(job, describe_job(job))


@jobs.command("why", short_help="Say why a job is where it is.")
@click.argument("job_id", type=int)
@click.pass_obj
def why(terminal: Terminal, job_id: int) -> None:
    """Say why job JOB_ID is where it is, and until when where that is known."""
    found = terminal.run(Jobs, lambda jobs: jobs.why(job_id))
    terminal.show(found, f"job {job_id} is {found.state.value}: {found.text} [{found.reason}]")


@jobs.command("ls", short_help="List jobs that failed.")
@click.option("--queue", default=None, help="Of this queue only.")
@click.option("--state", default=None, type=click.Choice(STATES_BY_ENDING))
@click.option("--before", default=None, type=int, help="Ids below this one: the next page.")
@click.option("--max", "jobs_max", default=100, show_default=True, type=click.IntRange(1, 1000))
@click.pass_obj
def list_ended(terminal: Terminal, /, **choice: Any) -> None:
    """List kept jobs that ended failed, cancelled or quarantined, newest id first."""
    found = terminal.run(Jobs, lambda jobs: jobs.ended(**choice))
    rows = [
        (job.id, job.state.value, job.queue, job.attempt, first_line(job.error)) for job in found
    ]
    terminal.show(found, table(("id", "state", "queue", "attempts", "error"), rows))


@jobs.command("cancel", short_help="Cancel a waiting job.")
@click.argument("job_id", type=int)
@click.pass_obj
def cancel(terminal: Terminal, job_id: int) -> None:
    """Cancel job JOB_ID, which must be scheduled or ready."""
    terminal.run(Jobs, lambda jobs: jobs.cancel(job_id))
    terminal.show({"id": job_id, "state": "cancelled"}, f"job {job_id} is cancelled")


@jobs.command("retry", short_help="Give a failed job another life.")
@click.argument("job_id", type=int)
@click.pass_obj
def retry(terminal: Terminal, job_id: int) -> None:
    """Make job JOB_ID, which ended failed, cancelled or quarantined, ready again."""
    terminal.run(Jobs, lambda jobs: jobs.retry(job_id))
    terminal.show({"id": job_id, "state": "ready"}, f"job {job_id} is ready again")
