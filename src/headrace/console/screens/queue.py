"""The page of a queue: figures, charts by minute or hour, failed jobs and slot decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from headrace.console.screens.fleet import rows_of
from headrace.console.stored import recent_outages
from headrace.console.views import Chart, Line, ViewContext, attempt
from headrace.jobs.fleet.state import QueueSpan
from headrace.jobs.model import JobsConfig
from headrace.web.marks import Mark

SPANS: Final = {"1h": 3_600, "6h": 21_600, "24h": 86_400, "7d": 604_800, "90d": 7_776_000}
"""Seconds; from HOURLY_S on, the charts have a point per hour instead of minute."""
HOURLY_S: Final = 604_800
FAILED_SHOWN: Final = 10
DECISIONS_LOOKED_AT: Final = 300
QUEUE_DECISIONS_SHOWN: Final = 10


async def view_queue(context: ViewContext) -> dict[str, Any]:
    """The page of a queue, by name or alias. Raises: QueueUnknown."""
    jobs = context.jobs
    status = await jobs.queues.get(context.params["queue"])
    span = context.query.choice("span", tuple(SPANS), "1h")
    load, charts, failed, moves = await asyncio.gather(
        jobs.fleet.load(),
        _charts_of(context, status.queue, SPANS[span]),
        attempt(jobs.find, queue=status.queue, state="failed", jobs_max=FAILED_SHOWN),
        jobs.fleet.decisions(decisions_max=DECISIONS_LOOKED_AT),
    )
    [row] = rows_of([status], load)
    ended, backlog, times, slots = charts
    own_moves = [one for one in moves if one.queue == status.queue]
    return {
        "row": row,
        "load_span_s": load.span_s,
        "span": span,
        "spans": tuple(SPANS),
        "ended": ended,
        "backlog": backlog,
        "times": times,
        "slots": slots,
        "failed": failed,
        "failed_shown": FAILED_SHOWN,
        "kept_s": context.house.config.section(JobsConfig).failed_kept_s,
        "decisions": own_moves[:QUEUE_DECISIONS_SHOWN],
    }


async def _charts_of(context: ViewContext, queue: str, span_s: int) -> tuple[Chart, ...]:
    """Charts of the last `span_s`, with a point per minute or hour."""
    jobs, now_at = context.jobs, context.now_at
    from_at = now_at - timedelta(seconds=span_s)
    if span_s < HOURLY_S:
        minute_at = from_at - timedelta(minutes=1)
        minutes = await jobs.queues.minutes(queue, from_at=minute_at, to_at=now_at)
        by_minute = {int(one.minute.timestamp()): one for one in minutes}
        outages = (await recent_outages(context)).value or ()
        down = [one for one in outages if "postgres" in one.engines]
        return _charts(by_minute, queue, now_at, step_s=60, span_s=span_s, down=down)
    hours = await jobs.queues.hours(queue, from_at=from_at, to_at=now_at)
    by_hour = {int(one.hour.timestamp()): one for one in hours}
    return _charts(by_hour, queue, now_at, step_s=3_600, span_s=span_s)


def _mean(total_s: float, jobs: int) -> float | None:
    return round(total_s / jobs, 4) if jobs else None


def _run_s(row: QueueSpan) -> float | None:
    return _mean(row.run_s, row.done + row.failed + row.cancelled + row.retried)


def _longest_wait_s(row: QueueSpan) -> float | None:
    return row.wait_max_s if row.claimed else None


def _charts(
    found: Mapping[int, QueueSpan],
    queue: str,
    now_at: datetime,
    *,
    step_s: int,
    span_s: int,
    down: Sequence[Mark] = (),
) -> tuple[Chart, ...]:
    """Charts of runs, backlog, times and slots; spans without work have no times.

    A span without counts in an outage of PostgreSQL, `down`, has no values: its jobs are unknown.
    """
    # The current span is incomplete and would look like a drop.
    this = int(now_at.timestamp()) // step_s * step_s
    xs = [this - step_s * back for back in range(span_s // step_s, 0, -1)]
    rows = [found.get(x) for x in xs]
    outages = [(one.at.timestamp(), one.until_at.timestamp()) for one in down if one.until_at]
    unknown = [any(at <= x and x + step_s <= until for at, until in outages) for x in xs]

    def line(
        label: str,
        value: Callable[[QueueSpan], float | None],
        tone: str = "",
        *,
        idle: float | None = 0,
    ) -> Line:
        empty = [None if is_unknown else idle for is_unknown in unknown]
        values = [value(row) if row else no for row, no in zip(rows, empty, strict=True)]
        return Line(label, values, tone)

    ended = [
        line("done", lambda row: row.done),
        line("failed", lambda row: row.failed, "bad"),
        line("cancelled", lambda row: row.cancelled, "warn"),
        line("run again later", lambda row: row.retried, "warn"),
        line("cut off, run again", lambda row: row.lost),
    ]
    backlog = [
        line("waiting", lambda row: row.ready),
        line("in progress", lambda row: row.running, "good"),
        line("failed or quarantined, kept", lambda row: row.failed_kept, "bad"),
    ]
    times = [
        line("average slot time of a run", _run_s, idle=None),
        line("average wait", lambda row: _mean(row.wait_s, row.claimed), idle=None),
        line("longest wait", _longest_wait_s, "warn", idle=None),
    ]
    slots = [
        line("assigned, or floating in use", lambda row: round(row.slot_s / step_s, 2), idle=None),
        line(
            "busy, counted at the end of each call",
            lambda row: round(row.run_s / step_s, 2),
            "good",
        ),
    ]
    runs_unit = "runs/min" if step_s == 60 else "runs/h"
    failed = f"/jobs/jobs?{urlencode({'state': 'failed', 'queue': queue})}|failed jobs"
    charts = (
        (runs_unit, ended, "stack", failed),
        ("jobs", backlog, "line", ""),
        ("s", times, "line", ""),
        ("slots", slots, "line", ""),
    )
    return tuple(
        Chart(xs=xs, unit=unit, lines=lines, kind=kind, step_s=step_s, brush=brush)
        for unit, lines, kind, brush in charts
    )
