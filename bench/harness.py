"""One run: the engines, cells in turns A B A B, what they cost, and the figures so far.

A cell is one system on an empty store. Whatever a cell raises as BenchFault leaves that value out
and is printed beside the table; everything is bounded in time and ends only processes started here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.children import BenchFault, Child, wait_for
from bench.engines import BenchEngines, bench_engines
from bench.figures import Figure, Runs
from bench.machine import sync_us
from bench.report import QUICK_RESULTS, RESULTS
from bench.systems import OURS, Cell, System, template_of
from bench.tally import Tallied, read_tally

Answer = TypeVar("Answer")
PAIRS = 3
READY_S = 40.0
QUESTION_S = 7_200.0
"""A question of a full run that takes longer is a fault."""
QUICK_S = 165.0
"""All questions of a quick run together, so that it ends within three minutes."""
CANCEL_EVERY_S = 5.0


@dataclass
class Run:
    """One `make bench`."""

    engines: BenchEngines
    folder: Path
    quick: bool = False
    churn_s: float | None = None
    """How long churn runs; None: as the kind of run has it."""
    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    cells_done: int = 0
    began_s: float = field(default_factory=time.monotonic)
    syncs_us: list[float] = field(default_factory=list)
    """How long the disk took to sync before each cell: what commits cost at that moment."""

    @property
    def pairs(self) -> int:
        """How often each cell is run."""
        return 1 if self.quick else PAIRS

    @property
    def question_s(self) -> float:
        """How long the next question may take."""
        left_s = self.began_s + QUICK_S - time.monotonic()
        return (max(0.0, left_s) if self.quick else QUESTION_S) + (self.churn_s or 0.0)

    @property
    def flag(self) -> str:
        """What `make bench` needs for this kind of run."""
        return " QUICK=1" if self.quick else ""

    @property
    def results(self) -> Path:
        """The folder of the tables and plots: a quick run leaves the record as it is."""
        return QUICK_RESULTS if self.quick else RESULTS

    def sized(self, normal: int, quick: int) -> int:
        """The size for this kind of run."""
        return quick if self.quick else normal

    @asynccontextmanager
    async def cell(self, system: System = OURS) -> AsyncIterator[Cell]:
        """An empty store for `system`, and a scratch folder, emptied when the block ends."""
        self.cells_done += 1
        folder = self.folder / f"cell{self.cells_done}"
        folder.mkdir()
        self.syncs_us.append(sync_us(folder))
        if system.engine == "valkey":
            await self.engines.clear_valkey()
        async with self.engines.database(template=template_of(system)) as database:
            cell = Cell(self.engines, system, folder, database)
            try:
                yield cell
            finally:
                empty(folder)

    async def alternate(
        self,
        cells: Mapping[str, Callable[[], Awaitable[Mapping[str, float]]]],
        *,
        pairs: int | None = None,
    ) -> dict[str, dict[str, Runs]]:
        """Run all cells in turns, as often as there are pairs; their values by metric and cell."""
        values: dict[str, dict[str, list[float]]] = {}
        rounds = pairs or self.pairs
        for pair in range(rounds):
            for name, measure in cells.items():
                began_s = time.monotonic()
                try:
                    found = await measure()
                except BenchFault as fault:
                    print(f"  {name}: {fault}", flush=True)
                    # The middle lines of a traceback name paths of this machine.
                    lines = str(fault).strip().splitlines()
                    brief = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
                    self.faults.append(f"{name}: {brief}")
                    continue
                for metric, value in found.items():
                    values.setdefault(metric, {}).setdefault(name, []).append(value)
                shown = f"syncs {self.syncs_us[-1]:.0f} us, " + ", ".join(
                    f"{metric} {value:,.4g}" for metric, value in found.items()
                )
                took_s = time.monotonic() - began_s
                print(f"  {pair + 1}/{rounds} {name}: {shown} ({took_s:.1f} s)", flush=True)
        return {
            metric: {name: Runs(tuple(row)) for name, row in rows.items()}
            for metric, rows in values.items()
        }

    def leave_out(self, *names: str) -> None:
        """Print what a quick run does not measure."""
        print(f"  left out of a quick run: {', '.join(names)}", flush=True)

    def add(self, *figures: Figure) -> None:
        """Take figures in."""
        self.figures += figures


def empty(folder: Path) -> None:
    """Free the disk space of a finished cell; its files are deleted with the run.

    ext4 looks at each inode that was deleted in the last minutes before it takes a free one: with
    deleted cells the third cell of 2,000 photos used 345 us of CPU a photo more than the first.
    """
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                os.truncate(path, 0)


async def bounded(measuring: Coroutine[Any, Any, Answer], longest_s: float) -> Answer:
    """What `measuring` returns. Raises: BenchFault after `longest_s`.

    It is cancelled until it ends, for a library may swallow one cancellation.
    """
    task = asyncio.create_task(measuring)
    try:
        done, _ = await asyncio.wait([task], timeout=longest_s)
        if done:
            return task.result()
        raise BenchFault(f"not measured in {longest_s:.0f} s")
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_EVERY_S)
        if not task.cancelled():
            task.exception()


@asynccontextmanager
async def bench_run(*, quick: bool, churn_s: float | None = None) -> AsyncIterator[Run]:
    """Start engines in a scratch folder; all of it is removed when the block ends."""
    folder, began_s = Path(tempfile.mkdtemp(prefix="bench-")), time.monotonic()
    # PostgreSQL runs as another user where we are root, and reads what it COPYs by itself.
    os.chmod(folder, 0o755)  # noqa: PTH101
    try:
        async with bench_engines(folder / "engines") as engines:
            yield Run(engines, folder, quick, churn_s, began_s=began_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


Measure = Callable[[Run], Awaitable[list[Figure]]]
"""Measures the rows of one question."""


@dataclass(frozen=True)
class Produced:
    """The report of a producer."""

    enqueued: int
    rate_per_s: float
    cpu_us: float
    """CPU of the producer and the servers a job, in microseconds."""


async def produce(cell: Cell, command: str, jobs: int, deadline_s: float = 120) -> Produced:
    """Run a producer to its end."""
    before_s = cell.engines.cpu_s()
    child = cell.produce(command, jobs)
    try:
        out = await child.finish(deadline_s)
    finally:
        await child.end()
    if command == "prepare":
        return Produced(0, 0.0, 0.0)
    found = json.loads(out.strip().splitlines()[-1])
    servers_s = (cell.engines.cpu_s() - before_s) * found["timed"] / found["enqueued"]
    return Produced(
        found["enqueued"],
        found["timed"] / found["seconds"],
        (found["cpu_s"] + servers_s) / found["timed"] * 1e6,
    )


@dataclass(frozen=True)
class Drained:
    """What a drain came to."""

    rate_per_s: float
    cpu_us: float
    """CPU of the worker and the servers a job, in microseconds."""


async def drain(cell: Cell, jobs: int, *, app: str = "bench.apps.noop:app") -> Drained:
    """Let one worker run `jobs` waiting jobs; from the first handler call to the last.

    Raises: BenchFault, also where more or fewer were run.
    """
    if cell.system.engine == "postgres":
        await cell.engines.settle(cell.database)
    worker = cell.work(app)
    try:
        # What its start costs is no cost of a job: CPU is counted from the first start on.
        early = await wait_started(cell, worker, 1)
        before_s = worker.cpu_s() + cell.engines.cpu_s()
        found = await wait_started(cell, worker, jobs)
        spent_s = worker.cpu_s() + cell.engines.cpu_s() - before_s
    finally:
        await worker.end()
    after = read_tally(cell.tally_folder)
    if after.count != jobs:
        raise BenchFault(f"{jobs} jobs, {after.count} handler starts")
    return Drained(found.rate_per_s, spent_s / max(1, jobs - early.count) * 1e6)


async def wait_started(cell: Cell, worker: Child, jobs: int) -> Tallied:
    """Wait until `jobs` handler starts were counted."""

    def counted() -> Tallied | None:
        found = read_tally(cell.tally_folder)
        return found if found.count >= jobs else None

    found = await wait_for(
        counted, f"{jobs} starts", READY_S + cell.system.deadline_s + jobs / 5_000, worker
    )
    assert isinstance(found, Tallied)
    return found
