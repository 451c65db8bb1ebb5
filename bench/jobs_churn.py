"""Does the queue keep its speed on a large backlog, for ten minutes, beside a long transaction,
behind future jobs?

A producer holds the backlog at its size while one worker drains it. Three cases: plain; beside a
transaction that stays open all the time, so that vacuum removes nothing; behind jobs of the most
urgent priority that are not due. Decay compares the first part of the time with the last: a
minute each in a run of ten minutes, a quarter each in a shorter one. Claim times are the server's
own, from its log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import asyncpg

from bench.children import BenchFault, Child
from bench.figures import Figure, Goal, figure, percentile
from bench.harness import Run, wait_started
from bench.ours import nothing, open_app
from bench.peers.driver import PAYLOAD
from bench.systems import Cell
from bench.tally import read_tally
from headrace import Headrace
from headrace.jobs import NewJob

DECAY_GOAL = Goal(at_most=10)
CLAIM_GOAL = Goal(at_most=10)
NORMAL_S, QUICK_S = 60, 5
MINUTE_S = 60.0
LOGGED_SHARE = 0.2
CALL = 1_000
FEEDERS = 2
FUTURE_S = 86_400.0


@dataclass(frozen=True)
class Case:
    """What is different in it."""

    name: str
    is_transaction_held: bool = False
    has_future: bool = False
    why: str = "the two enqueuers and the worker share the cores, in shares that vary"


CASES = (
    Case("plain"),
    Case(
        "beside a held transaction",
        is_transaction_held=True,
        why="vacuums that may remove nothing, searches from the beginning and pages that are not"
        " reused take time beside the claims, which keep their cost (docs/decisions/0009)",
    ),
    Case("behind urgent future jobs", has_future=True),
)


async def measure(run: Run) -> list[Figure]:
    """The three cases; once each, for their length is the point."""
    figures: list[Figure] = []
    seconds = run.churn_s or float(run.sized(NORMAL_S, QUICK_S))
    backlog, future = run.sized(1_000_000, 50_000), run.sized(500_000, 50_000)
    for case in CASES:
        cells = {case.name: partial(_churn, run, case, seconds, backlog, future)}
        found = await run.alternate(cells, pairs=1)
        extra = f", {future:,} future" if case.has_future else ""
        size = f"{backlog:,} waiting{extra}, {seconds:.0f} s"
        for metric, name, unit, goal in (
            ("decay", "churn, decay", "%", DECAY_GOAL),
            ("claim_p99", "churn, claim p99", "ms", CLAIM_GOAL),
            ("rate", "churn, drained while enqueued", "jobs/s", None),
        ):
            ours = found.get(metric, {}).get(case.name)
            row = figure(f"{name}, {case.name}", unit, size, ours=ours, goal=goal, why=case.why)
            figures.append(row)
    return figures


async def _churn(
    run: Run, case: Case, seconds: float, backlog: int, future: int
) -> Mapping[str, float]:
    async with run.cell() as cell, _app(cell) as app:
        if case.has_future:
            await _enqueue(app, future, after_s=FUTURE_S, priority=0)
        await _enqueue(app, backlog)
        await cell.engines.settle(cell.database)
        await cell.engines.log_durations(
            cell.database, share=1.0 if seconds < MINUTE_S else LOGGED_SHARE
        )
        logged = cell.engines.log_size()
        async with _transaction(cell, is_held=case.is_transaction_held):
            worker = cell.work()
            try:
                await wait_started(cell, worker, 1)
                part_s = MINUTE_S if seconds >= 5 * MINUTE_S else seconds / 4
                counts = await _feed(app, cell, worker, seconds=seconds, part_s=part_s)
            finally:
                await worker.end()
        claims = cell.engines.claims_ms(logged)
        ended = read_tally(cell.tally_folder).count
        left = await _waiting(cell)
        if counts.enqueued + backlog != ended + left - (future if case.has_future else 0):
            raise BenchFault(f"{counts.enqueued + backlog} enqueued, {ended} run, {left} left")
    if not claims:
        raise BenchFault("the server's log names no claim")
    first, last = counts.rates_per_s[0], counts.rates_per_s[-1]
    return {
        "decay": max(0.0, (1 - last / first) * 100),
        "claim_p99": percentile(claims, 0.99),
        "rate": sum(counts.rates_per_s) / len(counts.rates_per_s),
    }


@dataclass
class Counts:
    """What was enqueued meanwhile, and the rate of starts by part of the time."""

    enqueued: int
    rates_per_s: list[float]


async def _feed(
    app: Headrace, cell: Cell, worker: Child, *, seconds: float, part_s: float
) -> Counts:
    """Hold the backlog while the worker drains it."""
    stop = asyncio.Event()
    done = [0] * FEEDERS
    start = read_tally(cell.tally_folder).count

    async def feed(index: int) -> None:
        while not stop.is_set():
            missing = read_tally(cell.tally_folder).count - sum(done)
            if missing < CALL:
                await asyncio.sleep(0.002)
                continue
            await _enqueue(app, CALL)
            done[index] += CALL

    counts: list[float] = []
    async with asyncio.TaskGroup() as group:
        for index in range(FEEDERS):
            group.create_task(feed(index))
        before, before_s = start, time.monotonic()
        for _ in range(round(seconds / part_s)):
            await asyncio.sleep(part_s)
            count, now_s = read_tally(cell.tally_folder).count, time.monotonic()
            counts.append((count - before) / (now_s - before_s))
            before, before_s = count, now_s
        stop.set()
    if not worker.is_running:
        raise BenchFault(f"the worker ended: {worker.err[-1000:]}")
    return Counts(sum(done), counts)


@asynccontextmanager
async def _app(cell: Cell) -> AsyncIterator[Headrace]:
    app = open_app(cell.url)
    app.task("noop")(nothing)
    try:
        await app.jobs.queues.declare()
        yield app
    finally:
        await app.close()


async def _enqueue(app: Headrace, jobs: int, **options: float) -> None:
    """Enqueue alike jobs, up to 10,000 a call."""
    job = NewJob(queue="noop", payload=PAYLOAD, **options)  # type: ignore[arg-type]
    for start in range(0, jobs, 10_000):
        await app.jobs.enqueue_many([job] * min(10_000, jobs - start))


@asynccontextmanager
async def _transaction(cell: Cell, *, is_held: bool) -> AsyncIterator[None]:
    """A transaction with an id and a snapshot of its own, open as long as the block."""
    if not is_held:
        yield
        return
    connection = await asyncpg.connect(cell.url)
    try:
        await connection.execute("SET idle_in_transaction_session_timeout = 0")
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.execute("SELECT pg_current_xact_id(), count(*) FROM headrace.queue")
        yield
        await connection.execute("COMMIT")
    finally:
        await connection.close()


async def _waiting(cell: Cell) -> int:
    connection = await asyncpg.connect(cell.url)
    try:
        return int(
            await connection.fetchval(
                "SELECT (SELECT count(*) FROM headrace.job_ready)"
                " + (SELECT coalesce(sum(cardinality(ids) - cardinality(settled)), 0)"
                " FROM headrace.job_lease)"
            )
        )
    finally:
        await connection.close()
