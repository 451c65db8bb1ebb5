"""What happens on the simulated day: queues, hosts, and everything that goes wrong.

350 million jobs in 150 queues on 40 hosts with 3,500 slots; the load swings 4:1 and offers 75 % of
all slots at the peak. A day can be squeezed into fewer hours: rates stay, the swing gets steeper.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

JOBS_PER_DAY: Final = 350e6
QUEUES: Final = 150
HOSTS: Final = 40
SLOTS: Final = 3_500
PEAK_LOAD: Final = 0.75
POISONED_SLOTS_MAX: Final = 400
BACKLOG_SLOTS_MAX: Final = 600
SWING: Final = 0.6
"""Between 0.4 and 1.6 times the mean: 4:1."""
BURSTS: Final = 30
BURST_FACTOR: Final = 10
BURST_S: Final = 60.0
BACKLOG_SLOT_S: Final = 600_000.0
POISON_FACTOR: Final = 50
AWAY_S: Final = 30.0
DRIFT: Final = 0.4
CLASSES: Final = ("p0-1", "p2-3", "p4-6", "p7-9")


@dataclass(frozen=True)
class SimulatedQueue:
    """A queue and its ordinary load."""

    name: str
    importance: int
    rate_per_s: float
    """Mean over the day."""
    handler_s: float
    batch: int
    slots_min: int
    slots_max: int
    drift_turns: float
    drift_phase: float
    starts_at: float = 0.0
    """Share of the day after which it exists."""

    @property
    def group(self) -> str:
        """Which of CLASSES it is in."""
        return CLASSES[
            0 if self.importance < 2 else 1 + (self.importance > 3) + (self.importance > 6)
        ]


@dataclass(frozen=True)
class Event:
    """Something that happens from one moment of the day to another; moments in seconds."""

    what: str
    from_s: float
    to_s: float
    queue: int | None = None
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """A whole day."""

    hours: float
    queues: list[SimulatedQueue]
    capacities: list[int]
    events: list[Event] = field(default_factory=list)

    @property
    def day_s(self) -> float:
        """Its length."""
        return self.hours * 3_600

    def swing(self, at_s: float) -> float:
        """The load at a moment, the day's mean being 1.

        Lowest at its ends, highest in the middle.
        """
        return 1 - SWING * float(np.cos(2 * np.pi * at_s / self.day_s))

    def under_way(self, what: str, at_s: float) -> list[Event]:
        """The events of a kind at a moment."""
        return [e for e in self.events if e.what == what and e.from_s <= at_s < e.to_s]


def build(hours: float, seed: int, *, hosts: int = HOSTS, slots: int = SLOTS) -> Scenario:
    """The day of a seed, on so many hosts with so many slots together; the load is the same."""
    rng = np.random.default_rng(seed)
    queues = _queues(rng)
    capacities = rng.multinomial(slots - 40 * hosts, np.ones(hosts) / hosts) + 40
    scenario = Scenario(hours, queues, [int(c) for c in capacities])
    scenario.events.extend(_events(scenario, rng))
    return scenario


def _queues(rng: np.random.Generator) -> list[SimulatedQueue]:
    rates = rng.lognormal(0, 1.5, QUEUES)
    rates *= JOBS_PER_DAY / 86_400 / rates.sum()
    handlers = np.clip(rng.lognormal(-1.5, 1.2, QUEUES), 0.005, 15)
    # No queue is more than 6 % of the work; what it lacks then is made up for by all.
    for _ in range(20):
        handlers *= SLOTS * PEAK_LOAD / (1 + SWING) / (rates * handlers).sum()
        handlers = np.minimum(handlers, 0.06 * (rates * handlers).sum() / rates)
    importances = np.arange(QUEUES) % 10
    starts = np.zeros(QUEUES)
    starts[[40, 85, 130]] = 0.2, 0.4, 0.8
    queues = []
    for i in range(QUEUES):
        peak = rates[i] * handlers[i] * (1 + SWING) * (1 + DRIFT)
        queues.append(
            SimulatedQueue(
                name=f"q{i:03}",
                importance=int(importances[i]),
                rate_per_s=float(rates[i]),
                handler_s=float(handlers[i]),
                batch=int(rng.choice([1, 1, 10, 100])),
                slots_min=1,
                slots_max=int(20 + 4 * peak),
                drift_turns=float(rng.uniform(2, 6)),
                drift_phase=float(rng.uniform(0, 2 * np.pi)),
                starts_at=float(starts[i]),
            )
        )
    return queues


def _events(scenario: Scenario, rng: np.random.Generator) -> list[Event]:
    day_s = scenario.day_s
    work = [queue.rate_per_s * queue.handler_s for queue in scenario.queues]
    small = [i for i, w in enumerate(work) if w <= 3 and not scenario.queues[i].starts_at]
    poisoned = _nearest(scenario, work, importance=5, slots=8.0)
    late = _nearest(scenario, work, importance=9, slots=5.0)
    for i, slots_max in ((poisoned, POISONED_SLOTS_MAX), (late, BACKLOG_SLOTS_MAX)):
        scenario.queues[i] = replace(scenario.queues[i], slots_max=slots_max)
    count = len(scenario.capacities)
    hosts = rng.permutation(count)
    fifth, more = count // 5, count // 5 + round(count * 0.15)
    events = [
        Event("shrunk", 0.30 * day_s, 0.36 * day_s, hosts=tuple(int(h) for h in hosts[fifth:more])),
        Event("dead", 0.50 * day_s, 0.52 * day_s, hosts=tuple(int(h) for h in hosts[:fifth])),
        Event("no scheduler", 0.57 * day_s, 0.57 * day_s + AWAY_S),
        Event("backlog", 0.62 * day_s, 0.62 * day_s + 1, queue=late),
        Event("poisoned", 0.72 * day_s, 0.76 * day_s, queue=poisoned),
    ]
    for i, queue in enumerate(scenario.queues):
        if queue.starts_at:
            events.append(Event("new queue", queue.starts_at * day_s, day_s, queue=i))
    for start in np.sort(rng.uniform(0.02, 0.97, BURSTS)) * day_s:
        burst = int(rng.choice(small))
        events.append(Event("burst", float(start), float(start) + BURST_S, queue=burst))
    return events


def _nearest(scenario: Scenario, work: list[float], *, importance: int, slots: float) -> int:
    """The queue of an importance whose work is nearest to so many slots."""
    of_it = [i for i, q in enumerate(scenario.queues) if q.importance == importance]
    return min(of_it, key=lambda i: abs(work[i] - slots))
