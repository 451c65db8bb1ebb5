"""Commands: `penstock jobs add|show|why|ls|cancel|retry`, `queues ls|show|pause|resume`, `lanes show|set`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import click
import msgspec

from penstock.jobs.errors import InvalidJob
from penstock.jobs.model import STATES_BY_ENDING, Job, Lane, NewJob, QueueStatus
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
    rows = [(job.id, job.state.value, job.queue, job.attempt, _line(job.error)) for job in found]
    terminal.show(found, _table(("id", "state", "queue", "attempts", "error"), rows))


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


@click.group("queues")
def queues() -> None:
    """Queues: their backlog; pause and resume."""


@queues.command("ls", short_help="List the queues.")
@click.pass_obj
def list_queues(terminal: Terminal) -> None:
    """List every queue with its backlog."""
    found = terminal.run(Jobs, lambda jobs: jobs.queues())
    terminal.show(found, _table(_QUEUE_HEAD, map(_queue_row, found)))


@queues.command("show", short_help="Show a queue.")
@click.argument("queue")
@click.pass_obj
def show_queue(terminal: Terminal, queue: str) -> None:
    """Show QUEUE with its backlog."""
    found = terminal.run(Jobs, lambda jobs: jobs.queue(queue))
    terminal.show(found, _table(_QUEUE_HEAD, [_queue_row(found)]))


@queues.command("pause", short_help="Hand out no more jobs of a queue.")
@click.argument("queue")
@click.pass_obj
def pause(terminal: Terminal, queue: str) -> None:
    """Hand out no more jobs of QUEUE; those in hand go on."""
    terminal.run(Jobs, lambda jobs: jobs.pause_queue(queue))
    terminal.show({"queue": queue, "paused": True}, f"queue {queue} is paused")


@queues.command("resume", short_help="Hand out jobs of a queue again.")
@click.argument("queue")
@click.pass_obj
def resume(terminal: Terminal, queue: str) -> None:
    """Hand out jobs of QUEUE again."""
    terminal.run(Jobs, lambda jobs: jobs.resume_queue(queue))
    terminal.show({"queue": queue, "paused": False}, f"queue {queue} is running")


@click.group("lanes")
def lanes() -> None:
    """Lanes: limits on the jobs of one customer, host or whatever a lane stands for."""


@lanes.command("show", short_help="Show a lane.")
@click.argument("limiter")
@click.argument("lane")
@click.pass_obj
def show_lane(terminal: Terminal, limiter: str, lane: str) -> None:
    """Show LANE of LIMITER: its limits and what it is doing."""
    found = terminal.run(Jobs, lambda jobs: jobs.get_lane(limiter, lane))
    terminal.show(found, describe_lane(found))


@lanes.command("set", short_help="Set a lane's limits, live.")
@click.argument("limiter")
@click.argument("lane")
@click.option("--rate", default=None, help="Starts per window such as 600/m or 10/30s.")
@click.option("--concurrency", default=None, type=int, help="Jobs at once.")
@click.option("--weight", default=1, show_default=True, type=int, help="Share against other lanes.")
@click.option("--paused", is_flag=True, help="Hand out none.")
@click.pass_obj
def set_lane(terminal: Terminal, /, limiter: str, lane: str, **options: Any) -> None:
    """Set the limits of LANE of LIMITER; what is left out is without limit."""
    starts_max, window_s = parse_rate(options.pop("rate"))

    async def change(jobs: Jobs) -> Lane:
        await jobs.set_lane(limiter, lane, starts_max=starts_max, window_s=window_s, **options)
        return await jobs.get_lane(limiter, lane)

    found = terminal.run(Jobs, change)
    terminal.show(found, describe_lane(found))


COMMANDS: Final[list[click.Command]] = [jobs, queues, lanes]
_QUEUE_HEAD: Final = ("queue", "ready", "scheduled", "leased", "failed", "oldest", "")


def parse_rate(text: str | None) -> tuple[int | None, float | None]:
    """Starts and window in seconds of `600/m` or `10/30s`; nothing of None. Raises: InvalidJob."""
    if text is None:
        return None, None
    match = re.fullmatch(r"([0-9]{1,9})/([0-9.]*)([a-z]{1,2})", text)
    try:
        if match is not None:
            return int(match[1]), parse_duration_s(f"{match[2] or 1}{match[3]}")
        reason = "a rate such as 600/m or 10/30s"
    except ValueError as error:
        reason = str(error)
    raise InvalidJob(f"--rate: expected {reason}, got {text[:80]!r}")


def describe_job(job: Job) -> str:
    """A job in lines of text."""
    rows: list[tuple[str, Any]] = [
        ("job", job.id),
        ("state", job.state.value),
        ("queue", job.queue),
        ("lane", job.lane),
    ]
    rows += [("due", job.run_at), ("attempts", job.attempt or None), ("losses", job.losses or None)]
    rows += [("host", job.host), ("ended", job.ended_at), ("error", job.error)]
    if job.payload is not None:
        rows.append(("payload", msgspec.json.encode(job.payload).decode()))
    lines = [f"{name:<10}{value}" for name, value in rows if value is not None]
    return "\n".join([*lines, job.traceback] if job.traceback else lines)


def describe_lane(lane: Lane) -> str:
    """A lane in lines of text."""
    rate = "none" if lane.window_s is None else f"{lane.starts_max} in {lane.window_s:g} s"
    full = "none" if lane.concurrency is None else str(lane.concurrency)
    lines = [
        f"lane        {lane.limiter} / {lane.lane}{' (paused)' if lane.paused else ''}",
        f"rate        {rate}",
        f"concurrency {full}",
        f"weight      {lane.weight}",
        f"waiting     {lane.waiting}",
        f"in flight   {lane.inflight}",
        f"started     {lane.starts_live} in the current window",
    ]
    if lane.next_at is not None:
        lines.append(f"next        {lane.next_at:%Y-%m-%d %H:%M:%S} UTC")
    return "\n".join(lines)


def _queue_row(status: QueueStatus) -> tuple[Any, ...]:
    age = "" if status.oldest_ready_age_s is None else f"{status.oldest_ready_age_s:.0f} s"
    paused = "paused" if status.paused else ""
    counts = (status.ready, status.scheduled, status.leased, status.failed)
    return (status.queue, *counts, age, paused)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(line.rstrip() for line in lines)


def _line(text: str | None) -> str:
    return (text or "").partition("\n")[0][:80]
