"""Are lanes strict and still fast: 2,000 lanes x 10 a minute over three queues, also while slots
are stopped and killed?

Counted at handler start, by the clock that all processes share: a window is over when an eleventh
start of a lane falls less than the window after the first. The share of the theoretical rate is
measured by spacing: window / mean span of n + 1 starts. Beside kills it is measured by count over
whole windows, since a killed slot's grants stay spent.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from tests.kit.processes import descendants

from bench.apps.lanes import LIMITER, QUEUES, RATE_VARIABLE, Visit
from bench.children import BenchFault, Child, send_signal, wait_for
from bench.figures import Figure, Goal, figure
from bench.harness import READY_S, Run
from bench.ours import open_app
from bench.systems import OURS, Cell
from bench.tally import read_starts
from headrace.jobs import NewJob

APP = "bench.apps.lanes:app"
STARTS_MAX = 10
WORKERS = 2
SLOTS = 2
CATCH_UP_S = 5.0
"""For the last burst, in which every lane starts at once."""
SHARE_GOAL = Goal(at_least=99)
OVER_GOAL = Goal(at_most=0)
WHY_KILLED = "starts granted to a killed slot stay spent, so that no window is exceeded"
WHY_LATE = "each start comes later than its window allows, by the delay of a claim"
SHORT_LEASE = {
    "HEADRACE_JOBS_LEASE": "3s",
    "HEADRACE_JOBS_HEARTBEAT": "1s",
    "HEADRACE_JOBS_SWEEP_EVERY": "1s",
}


@dataclass(frozen=True)
class Shape:
    """How many lanes, and their window."""

    lanes: int
    window_s: float
    windows: int
    """How many whole windows are watched."""

    @property
    def rate(self) -> str:
        """As the setting of a limiter."""
        return f"{STARTS_MAX}/{self.window_s:g}s"


async def measure(run: Run) -> list[Figure]:
    """Undisturbed, then with stops and kills (not in a quick run)."""
    shape = Shape(2_000, 30.0, 1) if run.quick else Shape(2_000, 60.0, 2)
    size = f"{shape.lanes:,} lanes x {STARTS_MAX} in {shape.window_s:.0f} s, {len(QUEUES)} queues"
    figures: list[Figure] = []
    for name, is_disturbed in (("", False), (", slots stopped and killed", True)):
        missing = ["left out of a quick run"] if run.quick and is_disturbed else []
        cells = {OURS.name: partial(_starts, run, shape, is_disturbed=is_disturbed)}
        found = await run.alternate({} if missing else cells, pairs=1)
        figures += [
            figure(
                f"lanes, share of the theoretical rate{name}",
                "%",
                size,
                goal=None if missing else SHARE_GOAL,
                why=WHY_KILLED if is_disturbed else WHY_LATE,
                ours=found.get("share", {}).get(OURS.name),
                not_measured=missing,
            ),
            figure(
                f"lanes, windows over the limit at handler start{name}",
                "windows",
                size,
                goal=None if missing else OVER_GOAL,
                ours=found.get("over", {}).get(OURS.name),
                not_measured=missing,
            ),
        ]
    return figures


async def _starts(run: Run, shape: Shape, *, is_disturbed: bool) -> Mapping[str, float]:
    each = STARTS_MAX * (shape.windows + 2) // len(QUEUES) + 1
    async with run.cell() as cell:
        cell.env = {RATE_VARIABLE: shape.rate}
        await _fill(cell, shape, each)
        settings = SHORT_LEASE if is_disturbed else {}
        workers = [cell.work(APP, slots=SLOTS, **settings) for _ in range(WORKERS)]
        sweeper = cell.role("scheduler", **settings)
        try:
            await wait_for(lambda: read_starts(cell.tally_folder), "a start", READY_S, workers[0])
            ends_s = time.monotonic() + shape.windows * shape.window_s + CATCH_UP_S
            if is_disturbed:
                await _disturb(cell, workers, settings, ends_s)
            else:
                await asyncio.sleep(ends_s - time.monotonic())
            ended_s = time.monotonic()
        finally:
            for child in [*workers, sweeper]:
                await child.end()
        starts = read_starts(cell.tally_folder)
    judged = judge(starts, shape, ended_s)
    if judged.checked == 0:
        raise BenchFault(f"{len(starts)} starts fill no window")
    print(
        f"  {len(starts):,} starts, {judged.checked:,} windows, {judged.over} over,"
        f" least span {judged.least_s:.3f} s"
    )
    share = judged.by_count if is_disturbed else judged.by_spacing
    return {"share": share * 100, "over": float(judged.over)}


async def _fill(cell: Cell, shape: Shape, each: int) -> None:
    """Declare the limiter and enqueue `each` jobs a queue and lane."""
    app = open_app(cell.url)
    try:
        app.limiter(LIMITER, rate=shape.rate)
        for queue in QUEUES:
            app.task(queue, limiter=LIMITER)(_nothing)
        await app.jobs.queues.declare()
        for queue in QUEUES:
            for _ in range(each):
                jobs = [
                    NewJob(queue=queue, payload=Visit(n), lane=f"customer:{n}")
                    for n in range(shape.lanes)
                ]
                await app.jobs.enqueue_many(jobs)
    finally:
        await app.close()
    await cell.engines.settle(cell.database)


async def _disturb(
    cell: Cell, workers: list[Child], settings: dict[str, str], ends_s: float
) -> None:
    """Stop a slot for up to 3 s, or kill one, again and again; replace a worker that died."""
    chance = random.Random(3)
    while time.monotonic() < ends_s:
        await asyncio.sleep(chance.uniform(0.3, 1.0))
        index = chance.randrange(len(workers))
        family = [workers[index].pid, *descendants(workers[index].pid)]
        pid = family[-1] if len(family) > 1 else family[0]
        if chance.random() < 0.3:
            send_signal(pid, signal.SIGKILL)
        else:
            send_signal(pid, signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0.0, 3.0))
            send_signal(pid, signal.SIGCONT)
        if not workers[index].is_running:
            workers[index] = cell.work(APP, slots=SLOTS, **settings)


@dataclass(frozen=True)
class Judged:
    """The judgment of the starts."""

    checked: int
    over: int
    least_s: float
    by_spacing: float
    by_count: float


def judge(starts: Iterable[tuple[int, int]], shape: Shape, ended_s: float) -> Judged:
    """Look at every n + 1 starts of a lane in a row: they need at least a window.

    A lane that is behind at the end has spans that are not over yet: they count as they stand, so
    that lanes which get nothing lower the share.
    """
    by_lane: dict[int, list[float]] = {lane: [] for lane in range(shape.lanes)}
    for lane, moment_ns in starts:
        by_lane[lane].append(moment_ns / 1e9)
    spans, open_spans = [], []
    for moments in by_lane.values():
        spans += [b - a for a, b in zip(moments, moments[STARTS_MAX:], strict=False)]
        behind = range(len(moments), shape.windows * STARTS_MAX + 1)
        open_spans += [
            ended_s - moments[at - STARTS_MAX]
            for at in behind
            if at - STARTS_MAX in range(len(moments))
        ]
    if not spans:
        return Judged(0, 0, 0.0, 0.0, 0.0)
    # Whole windows from half a window after the first start on: each lane has n starts in each.
    began_s = min(moments[0] for moments in by_lane.values() if moments) + shape.window_s / 2
    whole = max(1, shape.windows - 1)
    last_s = began_s + whole * shape.window_s
    inside = sum(began_s < moment <= last_s for moments in by_lane.values() for moment in moments)
    all_spans = spans + open_spans
    return Judged(
        checked=len(spans),
        over=sum(span < shape.window_s for span in spans),
        least_s=min(spans),
        by_spacing=shape.window_s * len(all_spans) / sum(all_spans),
        by_count=inside / (shape.lanes * STARTS_MAX * whole),
    )


async def _nothing(payload: Visit) -> None:
    """Never run here."""
