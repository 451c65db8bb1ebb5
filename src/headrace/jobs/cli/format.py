"""Text output of the commands of jobs."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.jobs.errors import InvalidJob
from headrace.jobs.model import Job, Lane, QueueStatus, Taken
from headrace.kernel.config import parse_duration_s
from headrace.kernel.errors import InvalidInput
from headrace.kernel.terminal import table


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
    if job.progress is not None:
        rows.append(("progress", f"{job.progress.ratio:.0%} {job.progress.text}"))
    if job.result is not None:
        rows.append(("result", msgspec.json.encode(job.result).decode()))
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


def queue_row(status: QueueStatus) -> tuple[Any, ...]:
    """A queue as a row of the table."""
    age = "" if status.oldest_ready_age_s is None else f"{status.oldest_ready_age_s:.0f} s"
    notes = ["paused"] if status.paused else []
    notes += [] if status.is_known else ["no code runs"]
    counts = (
        _count(status.ready, is_capped=status.ready_is_capped),
        _count(status.scheduled, is_capped=status.scheduled_is_capped),
        status.leased,
        _count(status.failed, is_capped=status.failed_is_capped),
    )
    slots = f"{status.slots} ({status.slots_min}-{status.slots_max})"
    return (status.queue, *counts, age, slots, status.importance, ", ".join(notes))


QUEUE_HEAD: Final = (
    "queue",
    "ready",
    "scheduled",
    "leased",
    "failed",
    "oldest",
    "slots",
    "importance",
    "",
)


def describe_queue(status: QueueStatus) -> str:
    """A queue in lines of text."""
    by_hand = status.overridden
    held = {
        name: getattr(status, name) for name in ("importance", "slots_min", "slots_max", "retries")
    }
    lines = [table(QUEUE_HEAD, [queue_row(status)]), ""]
    lines += [
        f"{name:<12}{value}{' (by hand)' if name in by_hand else ''}"
        for name, value in held.items()
    ]
    kept = "not kept" if status.keep_done_s is None else f"kept for {status.keep_done_s:g} s"
    lines += [
        f"batch       {status.batch}",
        f"timeout     {status.timeout_s:g} s",
        f"limiter     {status.limiter}{', a lane is required' if status.needs_lane else ''}",
        f"done jobs   {kept}",
    ]
    if status.tag is not None:
        lines.append(f"tag         {status.tag}")
    if status.aliases:
        lines.append(f"aliases     {' '.join(status.aliases)}")
    return "\n".join(lines)


def describe_taken(taken: Taken) -> str:
    """A take in lines of text."""
    if taken.lease_id is None:
        return "nothing is due"
    rows = [
        (job.id, job.attempt, job.lane or "", msgspec.json.encode(job.payload).decode())
        for job in taken.jobs
    ]
    until = f"lease {taken.lease_id} until {taken.expires_at:%Y-%m-%d %H:%M:%S} UTC"
    return f"{until}\n{table(('id', 'run', 'lane', 'payload'), rows)}"


def duration_s(name: str, text: str, refusal: type[InvalidInput] = InvalidJob) -> float:
    """Parse a duration such as 30s. Raises: `refusal`, the error of the calling command."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise refusal(f"{name}: expected {error}, got {text[:80]!r}") from error


def _count(count: int, *, is_capped: bool) -> str:
    return f"{count}+" if is_capped else str(count)


def first_line(text: str | None) -> str:
    """The first line of a text, shortened."""
    return (text or "").partition("\n")[0][:80]
