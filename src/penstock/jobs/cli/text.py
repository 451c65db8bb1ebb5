"""What the commands of jobs print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from penstock.jobs.model import Job, Lane, QueueStatus


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


def queue_row(status: QueueStatus) -> tuple[Any, ...]:
    """A queue as a row of the table."""
    age = "" if status.oldest_ready_age_s is None else f"{status.oldest_ready_age_s:.0f} s"
    paused = "paused" if status.paused else ""
    counts = (status.ready, status.scheduled, status.leased, status.failed)
    return (status.queue, *counts, age, paused)


QUEUE_HEAD: Final = ("queue", "ready", "scheduled", "leased", "failed", "oldest", "")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under a head, in aligned columns."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(line.rstrip() for line in lines)


def first_line(text: str | None) -> str:
    """The first line of a text, shortened."""
    return (text or "").partition("\n")[0][:80]
