"""The fleet of the simulated day: jobs that wait and run, slots that start late, hosts that die.

A fluid of whole jobs in steps of 0.25 s: arrivals by chance (Poisson), service times by chance
(geometric with the right mean; within one step for faster handlers). A slot that was given to
another queue serves nobody for 1 to 3 s and until its running job has ended (10 s at most).
Waits below a step read as 0.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bench.day.scenario import (
    BACKLOG_SLOT_S,
    BURST_FACTOR,
    DRIFT,
    POISON_FACTOR,
    Event,
    Scenario,
)
from bench.day.waits import Ints, Waits
from headrace.jobs.fleet.placement import HostRoom
from headrace.jobs.fleet.rates import Reading

STEP_S = 0.25
STEPS_PER_PLAN = 20
AGE_STEPS_MAX = 24
"""Readings are up to 6 s old."""
SHRUNK_TO = 0.6
LOST_RETURN_S = 33.0
"""A dead host's lease lasts 30 s, and the sweep comes every 3 s."""
HOST_NOTICED_S = 10.0
"""After two or three missed beats a host is planned without."""
HANDOVER_S_MAX = 10.0


class SimulatedFleet:
    """State of all queues and slots; `step` lets 0.25 s pass."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator, *, noticed_s: float) -> None:
        self.scenario, self.rng, self.noticed_s = scenario, rng, noticed_s
        queues = scenario.queues
        count = len(queues)
        self.names = [queue.name for queue in queues]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.rate = np.array([queue.rate_per_s for queue in queues])
        self.handler = np.array([queue.handler_s for queue in queues])
        self.turns = np.array([queue.drift_turns for queue in queues])
        self.phase = np.array([queue.drift_phase for queue in queues])
        self.starts_s = np.array([queue.starts_at * scenario.day_s for queue in queues])
        self.waiting = np.zeros(count, np.int64)
        self.running = np.zeros(count, np.int64)
        self.lost = np.zeros(count, np.int64)
        self.finished = np.zeros(count, np.int64)
        self.run_s = np.zeros(count)
        hosts = len(scenario.capacities)
        self.placed = np.zeros((count, hosts), np.int64)
        self.serving = np.zeros((count, hosts), np.int64)
        self.alive = np.ones(hosts, bool)
        self.slots = np.zeros(count, np.int64)
        self.now = 0
        self.busy = 0.0
        self.offered = 0.0
        self._rates = self.rate
        self._handlers = self.handler
        self._arrivals: Ints = np.zeros((STEPS_PER_PLAN, count), np.int64)
        self._starting: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._returning: dict[int, Ints] = {}
        self._history: list[tuple[Ints, Ints, np.ndarray]] = []
        self.waits = Waits([self._group(i) for i in range(count)])

    @property
    def now_s(self) -> float:
        """Seconds since the day began."""
        return self.now * STEP_S

    def step(self) -> None:
        """Let a step pass."""
        if self.now % STEPS_PER_PLAN == 0:
            self._look_ahead()
        self._happen()
        arrived = self._arrivals[self.now % STEPS_PER_PLAN].copy()
        if self.now in self._returning:
            back = self._returning.pop(self.now)
            self.lost -= back
            arrived += back
        before = self.waiting
        queued = before + arrived
        is_slow = self._handlers >= STEP_S
        chance = np.where(is_slow, STEP_S / self._handlers, 1.0)
        ended = self.rng.binomial(self.running, np.minimum(chance, 1.0))
        at_once = self.rng.poisson(self.slots * np.where(is_slow, 0.0, STEP_S / self._handlers))
        free = np.maximum(0, self.slots - self.running + ended)
        started = np.minimum(queued, np.where(is_slow, free, at_once))
        self.running = self.running - ended + np.where(is_slow, started, 0)
        spent_s = np.where(is_slow, self.running * STEP_S, started * self._handlers)
        self.waiting = queued - started
        self.finished = self.finished + ended + np.where(is_slow, 0, started)
        self.run_s = self.run_s + spent_s
        self.busy = float(spent_s.sum()) / STEP_S
        self.waits.step(self.now, arrived, started, has_line=(before > 0) | (self.waiting > 0))
        self._history.append((self.finished, self.waiting + self.running + self.lost, self.run_s))
        self._history = self._history[-AGE_STEPS_MAX - 1 :]
        self.now += 1

    def readings(self) -> dict[str, Reading]:
        """What a scheduler sees: each queue as it was up to 6 s ago."""
        ages = self.rng.integers(0, len(self._history), len(self.names))
        read = {}
        for i, name in enumerate(self.names):
            if self.starts_s[i] <= self.now_s:
                finished, active, run_s = self._history[-1 - ages[i]]
                at_s = (self.now - 1 - int(ages[i])) * STEP_S
                read[name] = Reading(at_s, int(finished[i]), int(active[i]), float(run_s[i]))
        return read

    def hosts(self) -> list[HostRoom]:
        """The hosts that are thought to live."""
        gone = {
            host
            for event in self.scenario.under_way("dead", self.now_s)
            if self.now_s >= event.from_s + self.noticed_s
            for host in event.hosts
        }
        shrunk = {host for e in self.scenario.under_way("shrunk", self.now_s) for host in e.hosts}
        return [
            HostRoom(name=f"h{h:02}", capacity=int(c * (SHRUNK_TO if h in shrunk else 1)))
            for h, c in enumerate(self.scenario.capacities)
            if h not in gone
        ]

    def apply(self, slots: dict[str, dict[str, int]]) -> None:
        """Bring the slots to a new map."""
        target = np.zeros_like(self.placed)
        for name, there in slots.items():
            for queue_name, count in there.items():
                target[self.index[queue_name], int(name[1:])] = count
        delta = target - self.placed
        self.placed = target
        self.serving = np.minimum(self.serving, target)
        for host in np.nonzero((delta > 0).any(axis=0))[0]:
            donors = [int(q) for q in np.nonzero(delta[:, host] < 0)[0]]
            for queue in np.nonzero(delta[:, host] > 0)[0]:
                for _ in range(int(delta[queue, host])):
                    wait_s = self.rng.uniform(1, 3)
                    if donors:
                        donor_s = self._handlers[donors[int(self.rng.integers(len(donors)))]]
                        wait_s += min(HANDOVER_S_MAX, self.rng.exponential(donor_s))
                    due = self.now + int(wait_s / STEP_S)
                    self._starting[due].append((int(queue), int(host), 1))
        self._count_slots()

    def _look_ahead(self) -> None:
        """Load and handler times of the next 5 s."""
        at_s, day_s = self.now_s, self.scenario.day_s
        drift = 1 + DRIFT * np.sin(2 * np.pi * self.turns * at_s / day_s + self.phase)
        self._handlers = self.handler * drift
        self._rates = self.rate * self.scenario.swing(at_s) * (self.starts_s <= at_s)
        for event in self.scenario.under_way("burst", at_s):
            self._rates[event.queue] *= BURST_FACTOR
        for event in self.scenario.under_way("poisoned", at_s):
            self._handlers[event.queue] *= POISON_FACTOR
        self.offered = float((self._rates * self._handlers).sum())
        size = (STEPS_PER_PLAN, len(self.names))
        self._arrivals = self.rng.poisson(self._rates * STEP_S, size)
        for event in self.scenario.events:
            if event.what == "backlog" and at_s <= event.from_s < at_s + STEPS_PER_PLAN * STEP_S:
                jobs = int(BACKLOG_SLOT_S / self.handler[event.queue])
                self._arrivals[0, event.queue] += jobs

    def _happen(self) -> None:
        """Slots that have started, hosts that die and come back."""
        for queue, host, count in self._starting.pop(self.now, ()):
            room = self.placed[queue, host] - self.serving[queue, host]
            self.serving[queue, host] += min(count, room)
            self.slots[queue] += min(count, room) if self.alive[host] else 0
        for event in self.scenario.events:
            if event.what == "dead":
                if self.now == int(event.from_s / STEP_S):
                    self._die(event)
                elif self.now == int(event.to_s / STEP_S):
                    self.alive[list(event.hosts)] = True
                    self._count_slots()

    def _die(self, event: Event) -> None:
        """Hosts stop; their running jobs come back when their leases have expired."""
        dead = list(event.hosts)
        share = self.serving[:, dead].sum(axis=1) / np.maximum(1, self.serving.sum(axis=1))
        torn = self.rng.binomial(self.running, np.minimum(1.0, share))
        self.running = self.running - torn
        self.lost += torn
        self._returning[self.now + int(LOST_RETURN_S / STEP_S)] = torn
        self.alive[dead] = False
        self.serving[:, dead] = 0
        self._count_slots()

    def _count_slots(self) -> None:
        self.slots = (self.serving * self.alive).sum(axis=1)

    def _group(self, i: int) -> str:
        """Queues with a disaster of their own are counted apart."""
        for event in self.scenario.events:
            if event.queue == i and event.what in ("backlog", "poisoned"):
                return event.what
        return self.scenario.queues[i].group
