"""How long does a plan of the whole fleet take: 150 queues, 40 hosts, 3,500 slots, and half and
double of it?

CPU time of its one thread, which waits for nothing. From a map that fits and needs that have
moved since, as in a running fleet, and from an empty map, which is the worst.
"""

from __future__ import annotations

import random
import time

from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from headrace.jobs.fleet.plan import HostRoom, QueueNeed, plan

SIZES = ((75, 20, 1_750), (150, 40, 3_500), (300, 80, 7_000))
GOAL = Goal(at_most=50)


async def measure(run: Run) -> list[Figure]:
    """Three sizes; the worst of both starts."""
    figures = []
    for queues, hosts, slots in SIZES:
        size = f"{queues} queues, {hosts} hosts, {slots:,} slots"
        values = [_plan_ms(queues, hosts, slots, seed) for seed in range(run.sized(9, 3))]
        goal = GOAL if (queues, hosts) == SIZES[1][:2] else None
        steady = Runs(tuple(value[0] for value in values))
        empty = Runs(tuple(value[1] for value in values))
        figures += [
            figure("plan of the fleet, from a map that fits", "ms", size, ours=steady, goal=goal),
            figure("plan of the fleet, from nothing", "ms", size, ours=empty, goal=goal),
        ]
    return figures


def _plan_ms(queues: int, hosts: int, slots: int, seed: int) -> tuple[float, float]:
    """Plan twice; milliseconds of the second plan and of the first."""
    chance = random.Random(seed)
    rooms = [HostRoom(name=f"host{n}", capacity=slots // hosts) for n in range(hosts)]
    needs = [_need(n, chance, slots / queues) for n in range(queues)]
    began_s = time.thread_time()
    first = plan(needs, rooms, {})
    empty_ms = (time.thread_time() - began_s) * 1e3
    moved = [_need(n, chance, slots / queues) for n in range(queues)]
    began_s = time.thread_time()
    second = plan(moved, rooms, first.slots)
    given = sum(sum(there.values()) for there in second.slots.values())
    assert 0 < given <= slots, given
    return (time.thread_time() - began_s) * 1e3, empty_ms


def _need(number: int, chance: random.Random, share: float) -> QueueNeed:
    handler_s = chance.uniform(0.01, 2.0)
    return QueueNeed(
        queue=f"queue{number}",
        importance=number % 10,
        slots_min=1,
        batch=100,
        active=chance.randrange(20_000),
        rate_per_s=0.75 * share * chance.uniform(0.2, 1.8) / handler_s,
        handler_s=handler_s,
    )
