"""Commands `headrace jobs ...`."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from headrace.jobs.cli.takes import COMMANDS
from headrace.jobs.cli.text import describe_job, duration_s, first_line
from headrace.jobs.errors import InvalidFilter, InvalidJob
from headrace.jobs.model import BulkDone, JobFilter, NewJob
from headrace.jobs.service import Jobs
from headrace.jobs.service.steering import LISTED, STEERED
from headrace.kernel.terminal import Terminal, table

MOMENT: Final = "%Y-%m-%dT%H:%M:%S%z"


@click.group("jobs")
def jobs() -> None:
    """Jobs: add, look, steer, take."""


for command in COMMANDS:
    jobs.add_command(command)


@jobs.command("add", short_help="Enqueue a job.")
@click.argument("queue")
@click.argument("payload", default="null")
@click.option("--at", default=None, type=click.DateTime([MOMENT]), help="When it is due.")
@click.option("--after", default=None, help="Delay such as 30s or 2h.")
@click.option("--spread", default=None, help="A random moment of so long after that; such as 2h.")
@click.option("--priority", default=5, show_default=True, type=int, help="0 first to 9 last.")
@click.option("--unique", default=None, help="Key that one unfinished job may have.")
@click.option("--lane", default=None, help="Lane inside the queue's limiter.")
@click.option("--version", default=1, show_default=True, type=int, help="Of the payload's shape.")
@click.pass_obj
def add(terminal: Terminal, /, queue: str, payload: str, **options: Any) -> None:
    """Enqueue one job into QUEUE; PAYLOAD is JSON."""
    after, spread = options.pop("after"), options.pop("spread")
    try:
        decoded = msgspec.json.decode(payload)
    except RecursionError as error:
        raise InvalidJob("PAYLOAD: the JSON is nested too deep: flatten it") from error
    except ValueError as error:
        raise InvalidJob(
            f"PAYLOAD: expected JSON with its quotes, got {payload[:80]!r}: {error}"
        ) from error
    after_s = None if after is None else duration_s("--after", after)
    spread_s = None if spread is None else duration_s("--spread", spread)
    job = NewJob(queue=queue, payload=decoded, after_s=after_s, spread_s=spread_s, **options)
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


@jobs.command("ls", short_help="List jobs.")
@click.option("--queue", default=None, help="Of this queue only.")
@click.option("--state", default=None, type=click.Choice(LISTED))
@click.option("--lane", default=None, help="Of this lane only.")
@click.option("-q", "q", default=None, help="Text in the error of jobs that ended.")
@click.option("--before", default=None, type=int, help="Ids below this one: the next page.")
@click.option("--max", "jobs_max", default=100, show_default=True, type=click.IntRange(1, 1000))
@click.pass_obj
def list_jobs(terminal: Terminal, /, **choice: Any) -> None:
    """List jobs in whatever state, newest id first."""
    page = terminal.run(Jobs, lambda jobs: jobs.find(**choice))
    rows = [
        (job.id, job.state.value, job.queue, job.lane or "", job.attempt, first_line(job.error))
        for job in page.jobs
    ]
    text = table(("id", "state", "queue", "lane", "attempts", "error"), rows)
    if page.next_before is not None:
        text += f"\nmore: --before {page.next_before}"
    terminal.show(page, text)


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


@jobs.command("rm", short_help="Remove a job for good.")
@click.argument("job_id", type=int)
@click.pass_obj
def remove(terminal: Terminal, job_id: int) -> None:
    """Remove job JOB_ID for good, which must wait or have ended."""
    terminal.run(Jobs, lambda jobs: jobs.delete(job_id))
    terminal.show({"id": job_id, "state": "gone"}, f"job {job_id} is gone")


@jobs.command("bulk", short_help="Retry, cancel or delete many jobs.")
@click.argument("action", type=click.Choice(tuple(STEERED)))
@click.option("--queue", default=None, help="Of this queue only.")
@click.option("--state", default=None, help="In this state only.")
@click.option("--lane", default=None, help="Of this lane only.")
@click.option("-q", "q", default=None, help="Text in the error of jobs that ended.")
@click.option("--older", default=None, help="Ended, or were due, so long ago; such as 2h.")
@click.option("--id", "ids", multiple=True, type=int, help="These jobs only.")
@click.option("--dry-run", is_flag=True, help="Count them only.")
@click.pass_obj
def bulk(terminal: Terminal, /, action: str, *, dry_run: bool, **choice: Any) -> None:
    """Do ACTION to all jobs that fit, newest first; stopped and called again it goes on."""
    older, ids = choice.pop("older"), choice.pop("ids")
    older_than_s = None if older is None else duration_s("--older", older, InvalidFilter)
    wanted = JobFilter(older_than_s=older_than_s, ids=list(ids) or None, **choice)

    async def run(jobs: Jobs) -> BulkDone:
        done = await jobs.bulk(action, wanted, dry_run=dry_run)
        while done.more:
            terminal.progress(f"{done.changed} of {done.matched} jobs")
            step = await jobs.bulk(action, wanted, dry_run=dry_run, before=done.next_before)
            done = msgspec.structs.replace(
                step,
                matched=done.matched + step.matched,
                changed=done.changed + step.changed,
                skipped=done.skipped + step.skipped,
            )
        return done

    done = terminal.run(Jobs, run)
    changed = f"{action}: {done.changed} {'job' if done.changed == 1 else 'jobs'}"
    fit = "1 job fits" if done.matched == 1 else f"{done.matched} jobs fit"
    told = fit if dry_run else changed
    terminal.show(done, f"{told}, {done.skipped} skipped" if done.skipped else told)
