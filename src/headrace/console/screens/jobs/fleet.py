"""The fleet's table: what each queue wants and gets.

Cost: two statements whatever the number of queues. The page with 150 queues and 40 hosts: see tests/console/test_console_size.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.console.seeing import Ask
from headrace.jobs.fleet.state import FleetLoad, QueueLoad
from headrace.jobs.model import QueueStatus
from headrace.jobs.tasks.options import SLOTS_MAX

SORTS: Final = ("load", "name", "importance", "waiting", "leased", "failed", "oldest", "slots")
STATES: Final = ("active", "waiting", "paused", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A line of the table; None is unknown."""

    status: QueueStatus
    slots_mean: float
    load: float | None
    run_s: float | None
    wait_s: float | None
    wait_max_s: float | None
    done_per_s: float
    is_floating: bool = False
    """Floating slots alone did its work, so that it has no load to tell."""

    @property
    def state(self) -> str:
        """What it does now, as one word or two."""
        queue = self.status
        if queue.paused:
            return "paused"
        if not queue.is_known:
            return "no code"
        if self.is_behind:
            return "behind"
        if queue.leased or (queue.ready and self.done_per_s):
            return "running"
        return "waiting" if queue.ready else "idle"

    @property
    def is_behind(self) -> bool:
        """Whether more is wanted than its slots do. What it wanted minutes ago and has done is no arrears."""
        return self.load is not None and self.load > 1 and self.status.ready > 0

    @property
    def slots_most(self) -> str:
        """The most slots that it may have."""
        return "any" if self.status.slots_max >= SLOTS_MAX else str(self.status.slots_max)

    @property
    def tone(self) -> str:
        """The tone of its state."""
        no_code = "warn" if self.status.ready else ""
        tones = {"paused": "warn", "no code": no_code, "behind": "bad", "running": "good"}
        return tones.get(self.state, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The table and what is above it."""

    rows: Sequence[QueueRow]
    queues_count: int
    waiting: int
    waiting_is_capped: bool
    leased: int
    failed: int
    done_per_s: float
    slots: int
    span_s: float
    q: str
    state: str
    sort: str


async def see_fleet(ask: Ask) -> FleetView:
    """Every queue that fits the filter."""
    jobs = ask.service("jobs")
    q = ask.query.text("q").strip()
    state = ask.query.choice("state", STATES, "")
    sort = ask.query.choice("sort", SORTS, "load")
    queues, load = await asyncio.gather(jobs.queues.all(), jobs.fleet.load())
    rows = rows_of(queues, load)
    return FleetView(
        rows=sorted(
            (row for row in rows if q.lower() in row.status.queue.lower() and _fits(row, state)),
            key=lambda row: _key(row, sort),
        ),
        queues_count=len(queues),
        waiting=sum(queue.ready for queue in queues),
        waiting_is_capped=any(queue.ready_is_capped for queue in queues),
        leased=sum(queue.leased for queue in queues),
        failed=sum(queue.failed for queue in queues),
        done_per_s=sum(row.done_per_s for row in rows),
        slots=sum(queue.slots for queue in queues),
        span_s=load.span_s,
        q=q,
        state=state,
        sort=sort,
    )


def rows_of(queues: Sequence[QueueStatus], load: FleetLoad) -> list[QueueRow]:
    """Each queue with what it did lately."""
    did: Mapping[str, QueueLoad] = {one.queue: one for one in load.queues}
    return [_row(queue, did.get(queue.queue), load.span_s) for queue in queues]


def _row(queue: QueueStatus, did: QueueLoad | None, span_s: float) -> QueueRow:
    if did is None:
        return QueueRow(
            status=queue,
            slots_mean=0.0,
            load=None if queue.ready else 0.0,
            run_s=None,
            wait_s=None,
            wait_max_s=None,
            done_per_s=0.0,
        )
    return QueueRow(
        status=queue,
        slots_mean=did.slot_s / span_s,
        load=did.ratio(queue.ready),
        run_s=did.run_mean_s,
        wait_s=did.wait_mean_s,
        wait_max_s=None if did.wait_mean_s is None else did.wait_max_s,
        done_per_s=did.done / span_s,
        is_floating=did.calls > 0 and not did.slot_s,
    )


def _fits(row: QueueRow, state: str) -> bool:
    queue = row.status
    match state:
        case "active":
            return queue.ready + queue.leased > 0
        case "waiting":
            return queue.ready > 0
        case "paused":
            return queue.paused
        case "failed":
            return queue.failed > 0
        case _:
            return True


def _key(row: QueueRow, sort: str) -> tuple[float, str]:
    """Greatest first, but for names; equals by name."""
    queue = row.status
    figures = {
        "name": 0.0,
        # What waits and has no slots is worse than any figure.
        "load": float("inf") if row.load is None else row.load,
        "importance": queue.importance,
        "waiting": queue.ready,
        "leased": queue.leased,
        "failed": queue.failed,
        "oldest": queue.oldest_ready_age_s or 0.0,
        "slots": queue.slots,
    }
    return -figures[sort], queue.queue
