"""Commands `headrace jobs ...`, and the text output of jobs, queues and lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import click
import msgspec

from headrace.jobs.errors import InvalidFilter, InvalidJob, InvalidTake, PayloadTooLarge
from headrace.jobs.model import (
    BulkDone,
    Job,
    JobFilter,
    NewJob,
    Taken,
    TakenOutcome,
)
from headrace.jobs.service import Jobs
from headrace.jobs.service.bulk import CHANGEABLE, LISTED
from headrace.kernel.config import parse_duration_s, parse_instant, parse_moment
from headrace.kernel.errors import FieldProblem, HeadraceError, InvalidInput
from headrace.kernel.terminal import (
    CommandGroup,
    Lines,
    Parsed,
    Terminal,
    listing,
    paged,
    parse_json,
    pluralize,
    table,
)

TIME: Final = Parsed(parse_moment, InvalidFilter, name="moment")
MOMENT: Final = Parsed(parse_instant, InvalidJob, name="moment")
PAYLOAD: Final = Parsed(parse_json, InvalidJob)


def duration(
    option: str,
    help_text: str,
    *,
    refusal: type[InvalidInput] = InvalidJob,
    default: str | None = None,
) -> Callable[[Any], Any]:
    """An option that is a duration. The command receives the seconds, such as `after_s`."""
    return click.option(
        option,
        option.strip("-").replace("-", "_") + "_s",
        type=Parsed(parse_duration_s, refusal),
        default=default,
        show_default=default is not None,
        help=help_text,
    )


APP: Final = click.option(
    "--app",
    "application",
    default=None,
    metavar="MODULE:APP",
    help="Check the payload by the handler of this application.",
)

LINE_MAX: Final = 80
UNCHECKED: Final = "the payload was not checked: --app MODULE:APP checks it"
EMPTY: Final = ", with the empty payload null"


@click.group("jobs", cls=CommandGroup)
def jobs() -> None:
    """Background jobs: add, show, list, cancel, retry."""


@jobs.command("add", short_help="Enqueue a job.")
@click.argument("queue")
@click.argument("payload", default="null", type=PAYLOAD)
@click.option("--at", default=None, type=MOMENT, help="Time at which it is due.")
@duration("--after", "Delay such as 30s or 2h.")
@duration("--spread", "Random delay up to a duration such as 2h.")
@click.option("--priority", default=5, show_default=True, type=int, help="0 first to 9 last.")
@click.option(
    "--unique",
    default=None,
    help="Key of at most one unfinished job of the queue; if one has it, print its id.",
)
@duration(
    "--unique-for", "Keep the key for a duration from now, such as 24h, also after the job is done."
)
@click.option("--lane", default=None, help="Lane inside the queue's limiter.")
@click.option("--chain", default=None, help="Name of a chain, whose jobs run one after another.")
@click.option("--retries", default=None, type=int, help="Retries, if not those of the queue.")
@duration("--timeout", "Time limit of a call, if not that of the task.")
@duration("--expires", "Cancel it if it has not started this long after it is due.")
@click.option(
    "--version", default=None, type=int, help="Version of the payload: 1, with --app its task's."
)
@APP
def add(terminal: Terminal, /, *, application: str | None, **options: Any) -> None:
    """Enqueue one job into QUEUE; PAYLOAD is JSON, by default null.

    Without --app the payload is not checked against the handler's parameters.
    """

    async def enqueue(jobs: Jobs) -> int:
        task = jobs.registry.get(options["queue"]) if application else None
        if options["version"] is None:
            options["version"] = 1 if task is None else task.version
        return await jobs.enqueue(NewJob(**options))

    try:
        job_id = terminal.run(Jobs, enqueue, application=application)
    except (InvalidJob, PayloadTooLarge) as error:
        raise of_one_job(error) from error
    is_empty = application is None and options["payload"] is None
    terminal.show({"id": job_id}, f"job {job_id}{EMPTY if is_empty else ''}")
    if application is None:
        terminal.note(UNCHECKED)


def of_one_job(error: InvalidJob | PayloadTooLarge) -> HeadraceError:
    """The error with places in the only job: `/lane` instead of `/0/lane`."""
    problems = tuple(
        FieldProblem(one.pointer.removeprefix("/0"), one.code, one.text) for one in error.problems
    )
    return type(error)(re.sub(r"(^|[ ;])/0/", r"\1/", error.text), problems=problems)


@jobs.command("show", short_help="Show a job.")
@click.argument("job_id", type=int)
def show(terminal: Terminal, job_id: int) -> None:
    """Show job JOB_ID in any state."""
    job = terminal.run(Jobs, lambda jobs: jobs.job(job_id))
    terminal.show(job, describe_job(job))


@jobs.command("why", short_help="Explain why a job is in its state.")
@click.argument("job_id", type=int)
def why(terminal: Terminal, job_id: int) -> None:
    """Explain why job JOB_ID is in its state, such as why it waits, and until when if known."""
    found = terminal.run(Jobs, lambda jobs: jobs.why(job_id))
    reason = "" if found.reason == found.state.value else f" [{found.reason}]"
    terminal.show(found, f"job {job_id} is {found.state.value}: {found.text}{reason}")


@jobs.command("ls", short_help="List jobs.")
@click.option("--queue", default=None, help="Only this queue.")
@click.option("--state", default=None, type=click.Choice(LISTED))
@click.option("--lane", default=None, help="Only this lane.")
@click.option("-q", "q", default=None, help="Text in the error of ended jobs.")
@click.option("--from", "from_at", default=None, type=TIME, help="Ended, or due, from then on.")
@click.option("--to", "to_at", default=None, type=TIME, help="Ended, or due, before then.")
@click.option("--cursor", default=None, type=int, help="The next page: ids below this one.")
@click.option("--max", "jobs_max", default=100, show_default=True, type=click.IntRange(1, 1000))
def list_jobs(terminal: Terminal, /, **choice: Any) -> None:
    """List jobs in any state, newest first."""
    page = terminal.run(Jobs, lambda jobs: jobs.find(**choice))
    rows = [
        (job.id, job.state.value, job.queue, job.lane or "", job.attempt, first_line(job.error))
        for job in page.jobs
    ]
    grid = table(("id", "state", "queue", "lane", "attempts", "error"), rows)
    terminal.show(listing(page.jobs, next_cursor=page.next_cursor), paged(grid, page.next_cursor))


@jobs.command("cancel", short_help="Cancel a waiting job.")
@click.argument("job_id", type=int)
@click.option("--running", is_flag=True, help="Also a running one: request its end.")
def cancel(terminal: Terminal, job_id: int, *, running: bool) -> None:
    """Cancel job JOB_ID, which must be scheduled or ready."""
    is_cancelled = terminal.run(Jobs, lambda jobs: jobs.cancel(job_id, running=running))
    text = f"job {job_id} is cancelled"
    if not is_cancelled:
        text = (
            f"cancellation of job {job_id} is requested: its handler is cancelled now, or its slot"
            " is ended after jobs.grace"
        )
    terminal.show({"id": job_id, "state": "cancelled" if is_cancelled else "leased"}, text)


@jobs.command("edit", short_help="Change a waiting job.")
@click.argument("job_id", type=int)
@click.option("--payload", default=msgspec.UNSET, type=PAYLOAD, help="New payload, as JSON.")
@click.option("--priority", default=None, type=int, help="0 first to 9 last.")
@click.option("--at", default=None, type=MOMENT, help="Time at which it is due.")
@duration("--after", "Delay from now, such as 30s or 2h.")
@APP
def edit(terminal: Terminal, /, job_id: int, *, application: str | None, **options: Any) -> None:
    """Change waiting job JOB_ID; omitted values stay as they are."""
    terminal.run(Jobs, lambda jobs: jobs.edit(job_id, **options), application=application)
    terminal.show({"id": job_id}, f"job {job_id} is changed")
    if application is None and options["payload"] is not msgspec.UNSET:
        terminal.note(UNCHECKED)


@jobs.command("retry", short_help="Retry a failed job.")
@click.argument("job_id", type=int)
def retry(terminal: Terminal, job_id: int) -> None:
    """Make job JOB_ID ready again; it must have failed or been cancelled or quarantined."""
    terminal.run(Jobs, lambda jobs: jobs.retry(job_id))
    terminal.show({"id": job_id, "state": "ready"}, f"job {job_id} is ready again")


@jobs.command("rm", short_help="Delete a job.")
@click.argument("job_id", type=int)
def remove(terminal: Terminal, job_id: int) -> None:
    """Delete job JOB_ID, which must not be running."""
    terminal.run(Jobs, lambda jobs: jobs.delete(job_id))
    terminal.show({"id": job_id, "state": "gone"}, f"job {job_id} deleted")


@jobs.command("bulk", short_help="Retry, cancel or delete many jobs.")
@click.argument("action", type=click.Choice(tuple(CHANGEABLE)))
@click.option("--queue", default=None, help="Only this queue.")
@click.option("--state", default=None, help="Only this state.")
@click.option("--lane", default=None, help="Only this lane.")
@click.option("-q", "q", default=None, help="Text in the error of ended jobs.")
@duration(
    "--older", "Minimum age since the end or the due time, such as 2h.", refusal=InvalidFilter
)
@click.option("--from", "from_at", default=None, type=TIME, help="Ended, or due, from then on.")
@click.option("--to", "to_at", default=None, type=TIME, help="Ended, or due, before then.")
@click.option(
    "--id", "ids", multiple=True, type=int, help="Only this job; repeat the option for several."
)
@click.option("--dry-run", is_flag=True, help="Only count them.")
def bulk(
    terminal: Terminal, /, action: str, *, dry_run: bool, older_s: float | None, **choice: Any
) -> None:
    """Retry, cancel or delete all matching jobs, newest first. Safe to interrupt and run again."""
    wanted = JobFilter(older_than_s=older_s, ids=list(choice.pop("ids")) or None, **choice)

    async def run(jobs: Jobs) -> BulkDone:
        done = await jobs.bulk(action, wanted, dry_run=dry_run)
        while done.more:
            terminal.progress(f"{action}: {done.changed} of {pluralize(done.matched, 'job')}")
            step = await jobs.bulk(action, wanted, dry_run=dry_run, cursor=done.next_cursor)
            done = msgspec.structs.replace(
                step,
                matched=done.matched + step.matched,
                changed=done.changed + step.changed,
                skipped=done.skipped + step.skipped,
            )
        return done

    done = terminal.run(Jobs, run)
    changed = f"{action}: {done.changed} {'job' if done.changed == 1 else 'jobs'}"
    matching = pluralize(done.matched, "job matches", "jobs match")
    text = matching if dry_run else changed
    terminal.show(done, f"{text}, {done.skipped} skipped" if done.skipped else text)


SEND_TO: Final = "A job and the queue to move it to."
DECIDE: Final = "A job and one of the decisions that its queue declares."


@jobs.command("take", short_help="Take jobs of a queue to work on them yourself.")
@click.argument("queue")
@click.option("-n", "n", default=1, show_default=True, type=int, help="Maximum number of jobs.")
@duration("--lease", "Duration of the lease.", default="5m", refusal=InvalidTake)
@duration("--wait", "Longest wait for the first job.", default="0s", refusal=InvalidTake)
def take(terminal: Terminal, queue: str, **options: Any) -> None:
    """Take due jobs of QUEUE, to work on them yourself until `headrace jobs ack`."""
    taken = terminal.run(Jobs, lambda jobs: jobs.takes.take(queue, **options))
    terminal.show(taken, describe_taken(taken))


@jobs.command("ack", short_help="Record outcomes of taken jobs.")
@click.argument("lease_id", type=int)
@click.option("--done", multiple=True, type=int, help="A job that is done.")
@click.option("--retry", multiple=True, type=int, help="A job to run again.")
@click.option(
    "--snooze",
    multiple=True,
    type=int,
    help="A job to run later; this run does not count as an attempt.",
)
@duration("--after", "Delay of --retry and --snooze, such as 1m.", refusal=InvalidTake)
@click.option("--fail", multiple=True, type=int, help="A job that failed.")
@click.option("--cancel", multiple=True, type=int, help="A job that is cancelled.")
@click.option("--send-to", multiple=True, type=(int, str), metavar="JOB QUEUE", help=SEND_TO)
@click.option("--back", multiple=True, type=int, help="A job to return to its queue, unchanged.")
@click.option("--decide", multiple=True, type=(int, str), metavar="JOB DECISION", help=DECIDE)
@click.option("--by", default="", help="Who decided, for --decide.")
@click.option("--why", default="", help="Reason of --retry, --fail or --cancel.")
def ack(terminal: Terminal, /, lease_id: int, **options: Any) -> None:
    """Record outcomes of jobs that `jobs take` leased; without options all of LEASE_ID are done.

    Repeat an option for several jobs.
    """
    after_s = options["after_s"]
    given = {
        "done": TakenOutcome(outcome="done"),
        "retry": TakenOutcome(outcome="retry", after_s=after_s, why=options["why"]),
        "snooze": TakenOutcome(outcome="snooze", after_s=after_s),
        "fail": TakenOutcome(outcome="fail", why=options["why"]),
        "cancel": TakenOutcome(outcome="cancel", why=options["why"]),
        "back": TakenOutcome(outcome="return"),
    }
    named = [(job_id, outcome) for option, outcome in given.items() for job_id in options[option]]
    named += [
        (job_id, TakenOutcome(outcome="send_to", queue=queue))
        for job_id, queue in options["send_to"]
    ]
    named += [
        (job_id, TakenOutcome(decision=decision, by=options["by"]))
        for job_id, decision in options["decide"]
    ]
    if options["by"] and not options["decide"]:
        raise InvalidTake("--by goes with --decide JOB DECISION")
    outcomes = dict(named)
    if len(outcomes) < len(named):
        raise InvalidTake("a job is named twice: give one outcome per job")
    if not named and (after_s is not None or options["why"]):
        raise InvalidTake("--after and --why go with --retry ID or --fail ID: name the jobs")
    rest = None if named else TakenOutcome(outcome="done")
    terminal.run(Jobs, lambda jobs: jobs.takes.ack(lease_id, outcomes, rest=rest))
    shown = {str(job_id): one.decision or one.outcome for job_id, one in outcomes.items()}
    text = ", ".join(f"job {job_id}: {word}" for job_id, word in shown.items()) or "all done"
    terminal.show({"lease_id": lease_id, "outcomes": shown or "done"}, text)


@jobs.command("extend", short_help="Extend a lease.")
@click.argument("lease_id", type=int)
@duration("--lease", "Duration from now.", default="5m", refusal=InvalidTake)
def extend(terminal: Terminal, lease_id: int, lease_s: float) -> None:
    """Extend LEASE_ID of `headrace jobs take`."""
    expires_at = terminal.run(Jobs, lambda jobs: jobs.takes.extend(lease_id, lease_s))
    text = f"lease {lease_id} until {expires_at:%Y-%m-%d %H:%M:%S} UTC"
    terminal.show({"lease_id": lease_id, "expires_at": expires_at}, text)


def describe_job(job: Job) -> str:
    """A job in lines of text."""
    rows: list[tuple[str, Any]] = [
        ("job", job.id),
        ("state", job.state.value),
        ("queue", job.queue),
        ("lane", job.lane),
        ("chain", job.chain),
    ]
    timeout = None if job.timeout_s is None else f"{job.timeout_s:g} s"
    rows += [("due", moment(job.run_at)), ("attempts", job.attempt or None)]
    rows += [("losses", job.losses or None), ("retries", job.retries), ("timeout", timeout)]
    rows.append(("expires", moment(job.expires_at)))
    rows += [("host", job.host), ("ended", moment(job.ended_at)), ("error", job.error)]
    if job.failure is not None:
        rows.append(("failed", f"{moment(job.failure.at)}, then retried: {job.failure.error}"))
    if job.progress is not None:
        rows.append(("progress", f"{job.progress.ratio:.0%} {job.progress.text}"))
    if job.result is not None:
        rows.append(("result", msgspec.json.encode(job.result).decode()))
    if job.payload is not None:
        rows.append(("payload", msgspec.json.encode(job.payload).decode()))
    lines = [f"{name:<10}{value}" for name, value in rows if value is not None]
    return "\n".join([*lines, job.traceback] if job.traceback else lines)


def moment(at: datetime | None) -> str | None:
    """A time for people; None stays None."""
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def describe_taken(taken: Taken) -> str:
    """A take in lines of text."""
    if taken.lease_id is None:
        return "no job is due"
    rows = [
        (job.id, job.attempt, job.lane or "", msgspec.json.encode(job.payload).decode())
        for job in taken.jobs
    ]
    until = f"lease {taken.lease_id} until {taken.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    return Lines(until, table(("id", "run", "lane", "payload"), rows))


def first_line(text: str | None) -> str:
    """The first line of a text; a long one ends after a clause or a word, with ` ...`."""
    line = (text or "").partition("\n")[0]
    if len(line) <= LINE_MAX:
        return line
    shown = line[:LINE_MAX]
    clause = shown.rpartition("; ")[0]
    return f"{clause or shown.rpartition(' ')[0] or shown} ..."
