"""A queue's page: how it stands, what it did by minute, what it may, and what failed in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from headrace.console.screens.jobs.fleet import QueueRow, rows_of
from headrace.console.seeing import Ask, Chart, Found, Line, attempt
from headrace.jobs.fleet.state import Decision, QueueMinute
from headrace.jobs.model import JobPage

SPANS: Final = {"1h": 60, "6h": 360, "24h": 1_440}
FAILED_SHOWN: Final = 10
DECISIONS_LOOKED_AT: Final = 300
DECISIONS_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """The page."""

    row: QueueRow
    span: str
    ended: Chart
    times: Chart
    slots: Chart
    failed: Found[JobPage]
    decisions: Sequence[Decision]


async def see_queue(ask: Ask) -> QueueView:
    """A queue by name or alias. Raises: QueueUnknown."""
    jobs = ask.service("jobs")
    status = await jobs.queues.get(ask.params["queue"])
    span = ask.query.choice("span", tuple(SPANS), "1h")
    from_at = ask.now_at - timedelta(minutes=SPANS[span] + 1)
    load, minutes, failed, decisions = await asyncio.gather(
        jobs.fleet.load(),
        jobs.queues.minutes(status.queue, from_at=from_at, to_at=ask.now_at + timedelta(minutes=1)),
        attempt(jobs.find(queue=status.queue, state="failed", jobs_max=FAILED_SHOWN)),
        jobs.fleet.decisions(decisions_max=DECISIONS_LOOKED_AT),
    )
    [row] = rows_of([status], load)
    ended, times, slots = _charts(minutes, int(ask.now_at.timestamp()), SPANS[span])
    return QueueView(
        row=row,
        span=span,
        ended=ended,
        times=times,
        slots=slots,
        failed=failed,
        decisions=[one for one in decisions if one.queue == status.queue][:DECISIONS_SHOWN],
    )


def _charts(
    minutes: Sequence[QueueMinute], now_s: int, minutes_shown: int
) -> tuple[Chart, Chart, Chart]:
    """Ended jobs, run and wait, slots; a minute without a row had no work, so its times are not known."""
    # The minute that is under way would look like a fall.
    this = now_s // 60 * 60
    xs = [this - 60 * back for back in range(minutes_shown, 0, -1)]
    found = {int(one.minute.timestamp()): one for one in minutes}
    rows = [found.get(x) for x in xs]

    def mean(total_s: float, jobs: int) -> float | None:
        return round(total_s / jobs, 4) if jobs else None

    ended = Chart(
        xs=xs,
        unit="jobs/min",
        lines=[
            Line("done", [row.done if row else 0 for row in rows]),
            Line("failed", [row.failed if row else 0 for row in rows], "bad"),
            Line("retried", [row.retried if row else 0 for row in rows], "warn"),
        ],
    )
    times = Chart(
        xs=xs,
        unit="s",
        lines=[
            Line(
                "mean run",
                [
                    mean(row.run_s, row.done + row.failed + row.retried) if row else None
                    for row in rows
                ],
            ),
            Line("mean wait", [mean(row.wait_s, row.claimed) if row else None for row in rows]),
            Line("longest wait", [row.wait_max_s if row else None for row in rows], "warn"),
        ],
    )
    slots = Chart(
        xs=xs,
        unit="slots",
        lines=[
            Line("had", [round(row.slot_s / 60, 2) if row else None for row in rows]),
            Line("busy", [round(row.run_s / 60, 2) if row else 0 for row in rows], "good"),
        ],
    )
    return ended, times, slots
