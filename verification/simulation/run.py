"""Run a scenario with a seed; compare two runs of it; shrink the faults of one that fails.

A scenario is a class with the attributes and methods of `Scenario`. Its findings are those of the
checkers in `tests/kit/checkers.py` and of its own comparison with the final state.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tests.kit.checkers import Finding

from verification.simulation.faults import Fault, FaultInjector, FaultKind, plan_faults
from verification.simulation.loop import SimulationStuck
from verification.simulation.world import World, silent_logs

SETTLE_MAX_S: Final = 600.0
"""Virtual time for the work to end after the last fault is healed, where no limit delays it."""
RUN_MAX: Final = 6
"""A run, with the end of its work, takes at most this many times its hours, and one hour."""
RUNS_TO_SHRINK_MAX: Final = 200


class Scenario(Protocol):
    """A room's processes, clients, faults and checks in one world."""

    gap_s: float
    """Mean time between faults."""

    @property
    def settle_max_s(self) -> float:
        """Virtual time for the work to end after the last fault is healed."""

    def __init__(self, world: World) -> None: ...

    def fault_kinds(self) -> Sequence[FaultKind]:
        """The faults that the plan is drawn from."""

    async def begin(self) -> None:
        """Start engines and processes."""

    async def work(self, until_s: float) -> None:
        """Send requests until the virtual time `until_s`."""

    async def is_settled(self) -> bool:
        """Whether all accepted work has ended."""

    def findings(self) -> list[Finding]:
        """Broken promises."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    seed: int
    hours: float
    findings: tuple[Finding, ...]
    faults: tuple[Fault, ...]
    digest: str
    steps: int
    events: int
    cpu_s: float
    """Processor time that the run took."""


def run_seed(
    kind: Callable[[World], Scenario],
    seed: int,
    *,
    hours: float,
    faults: Sequence[Fault] | None = None,
) -> Outcome:
    """Run one seed for `hours` of virtual time, with its own plan of faults or a part of it."""
    gc.disable()  # no finalizer may run at a moment that the seed does not fix
    try:
        return _run_seed(kind, seed, hours=hours, faults=faults)
    finally:
        _bury()
        gc.enable()


def _bury() -> None:
    """Collect what a run left: tasks that wait for ever, whose cleanup can do nothing any more."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _unraisable: None
    try:
        with silent_logs():
            gc.collect()
    finally:
        sys.unraisablehook = hook


def _run_seed(
    kind: Callable[[World], Scenario],
    seed: int,
    *,
    hours: float,
    faults: Sequence[Fault] | None,
) -> Outcome:
    began_s = time.process_time()
    world = World(seed)
    scenario = kind(world)
    kinds = scenario.fault_kinds()
    if faults is None:
        faults = plan_faults(world.stream("faults"), kinds, hours=hours, gap_s=scenario.gap_s)
    injector = FaultInjector(world, kinds, faults)
    found: list[Finding] = []

    async def whole() -> None:
        await scenario.begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(injector.run())
            group.create_task(scenario.work(hours * 3600))
        injector.heal_all()
        settle_max_s = scenario.settle_max_s
        deadline_s = world.now_s + settle_max_s
        while not await scenario.is_settled():
            if world.now_s > deadline_s:
                text = f"work is left {settle_max_s:.0f} s after the last fault was healed"
                found.append(Finding("stuck", "the scenario", text))
                break
            await asyncio.sleep(1.0)
        found.extend(scenario.findings())

    try:
        world.run(whole, hours_max=RUN_MAX * hours + 1.0)
    except (SimulationStuck, TimeoutError) as error:
        found.append(Finding("stuck", "the run", repr(error)))
    finally:
        world.end()
    found += [Finding("error", "a process", text) for text in world.errors]
    return Outcome(
        seed=seed,
        hours=world.now_s / 3600,
        findings=tuple(found),
        faults=tuple(faults),
        digest=world.digest,
        steps=world.loop.steps,
        events=len(world.recorder.history.events),
        cpu_s=time.process_time() - began_s,
    )


def shrink(
    kind: Callable[[World], Scenario],
    failed: Outcome,
    *,
    hours: float,
    note: Callable[[str], Any] = lambda _text: None,
) -> Outcome:
    """The same failure with as few faults as can be found: delta debugging (Zeller, 2002)."""
    best = failed
    wanted = {finding.fault for finding in failed.findings}
    parts, runs = 2, 0
    while len(best.faults) > 0 and runs < RUNS_TO_SHRINK_MAX:
        size = max(1, len(best.faults) // parts)
        smaller = None
        for first in range(0, len(best.faults), size):
            left = best.faults[:first] + best.faults[first + size :]
            tried = run_seed(kind, failed.seed, hours=hours, faults=left)
            runs += 1
            if wanted & {finding.fault for finding in tried.findings}:
                smaller = tried
                break
            if runs >= RUNS_TO_SHRINK_MAX:
                break
        if smaller is not None:
            best = smaller
            parts = max(parts - 1, 2)
            note(f"{len(best.faults)} faults after {runs} runs")
        elif size == 1:
            break
        else:
            parts = min(parts * 2, len(best.faults))
    return best
