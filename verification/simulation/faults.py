"""The plan of faults of a run: which fault hits which process, when, for how long.

A plan comes from the seed before the run, so that a run can be repeated with a part of it: a
failing plan is shrunk to the faults that matter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from verification.simulation.world import World

if TYPE_CHECKING:
    from verification.simulation.postgres import PostgresModel


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at `at_s` it hits `target`, and is healed after `lasts_s`."""

    at_s: float
    name: str
    target: str
    lasts_s: float
    strength: float
    """Uniform in 0 to 1; its meaning belongs to the fault, such as the size of a clock step."""

    def __str__(self) -> str:
        return (
            f"{self.at_s:10.3f} s  {self.name} {self.target}"
            f"  for {self.lasts_s:.3f} s, strength {self.strength:.3f}"
        )


Act: TypeAlias = Callable[[World, Fault], Callable[[], Any] | None]
"""Begins a fault; returns what heals it, if it must be healed."""


def _cut(world: World, fault: Fault) -> Callable[[], None]:
    heals = [world.network.cut(fault.target, "*"), world.network.cut("*", fault.target)]
    return lambda: [heal() for heal in heals] and None


def _clock(world: World, fault: Fault) -> None:
    world.step_clock(fault.target, (fault.strength - 0.5) * 7200)


PROCESS_FAULTS: Final[Mapping[str, Act]] = {
    "kill": lambda world, fault: world.kill(fault.target),
    "pause": lambda world, fault: world.pause(fault.target),
    "cut": _cut,
    "cut_requests": lambda world, fault: world.network.cut(fault.target, "*"),
    "cut_replies": lambda world, fault: world.network.cut("*", fault.target),
    "slow": lambda world, fault: world.network.slow(fault.target, fault.strength * 2),
    "lossy": lambda world, fault: world.network.lose(fault.target, fault.strength * 0.5),
    "clock_step": _clock,
}
"""Faults of any process."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A fault of a scenario: how it acts, which processes it may hit, and its longest duration."""

    name: str
    act: Act
    targets: Sequence[str]
    lasts_max_s: float = 0.0
    weight: float = 1.0


def process_kinds(targets: Sequence[str], *, lasts_max_s: float) -> list[FaultKind]:
    """All PROCESS_FAULTS for these processes."""
    return [FaultKind(name, act, targets, lasts_max_s) for name, act in PROCESS_FAULTS.items()]


def freeze_host(world: World, fault: Fault) -> Callable[[], Any]:
    """Pause an agent with its slots, as when a virtual machine stops for a while."""
    names = [name for name in world.processes if name.partition(".")[0] == fault.target]
    heals = [world.pause(name) for name in names]
    return lambda: [heal() for heal in heals]


def stall_kinds(
    model: PostgresModel, hosts: Sequence[str], processes: Sequence[str], *, lasts_max_s: float
) -> list[FaultKind]:
    """Freezes of hosts, and pauses at one of the next eight statements of a process.

    A statement is sent before the pause or after it. A pause at any moment hits the middle of a
    sequence of statements too seldom.
    """

    def pause(_world: World, fault: Fault) -> Callable[[], None]:
        place = int(fault.strength * 16)
        return model.pause_in_call(fault.target, statements=1 + place // 2, is_sent=place % 2 > 0)

    kinds = [FaultKind("pause_in_call", pause, processes, lasts_max_s, 3.0)]
    return kinds + [FaultKind("freeze_host", freeze_host, hosts, lasts_max_s, 2.0)] * bool(hosts)


def plan_faults(
    chance: random.Random, kinds: Sequence[FaultKind], *, hours: float, gap_s: float
) -> list[Fault]:
    """Faults with a mean gap of `gap_s` in a span of `hours`, in order of their time."""
    faults: list[Fault] = []
    at_s = 0.0
    weights = [kind.weight for kind in kinds]
    while (at_s := at_s + chance.expovariate(1 / gap_s)) < hours * 3600:
        [kind] = chance.choices(kinds, weights)
        # Most faults are short, and some as long as they may be.
        lasts_s = kind.lasts_max_s * chance.random() ** 3
        target = chance.choice(kind.targets)
        faults.append(Fault(at_s, kind.name, target, lasts_s, chance.random()))
    return faults


@dataclass(slots=True)
class FaultInjector:
    """Applies a plan of faults while the scenario runs."""

    world: World
    kinds: Sequence[FaultKind]
    faults: Sequence[Fault]
    _heals: dict[int, Callable[[], Any]] = field(default_factory=dict)

    async def run(self) -> None:
        """Apply all faults at their times; returns after the last one began."""
        acts = {kind.name: kind.act for kind in self.kinds}
        for number, fault in enumerate(self.faults):
            await asyncio.sleep(max(0.0, fault.at_s - self.world.now_s))
            self.world.trace("fault", fault.name, fault.target)
            heal = acts[fault.name](self.world, fault)
            if heal is not None:
                self._heals[number] = heal
                self.world.loop.call_later(fault.lasts_s, self._heal, number)

    def heal_all(self) -> None:
        """End all faults that still last."""
        for number in list(self._heals):
            self._heal(number)

    def _heal(self, number: int) -> None:
        heal = self._heals.pop(number, None)
        if heal is not None:
            self.world.trace("heal", number)
            heal()
